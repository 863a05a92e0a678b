"""Initializers of an ONNX model that point into the weight files of a bundle."""

import math
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Weight
from stagepack.format.onnx import ELEMENT_TYPES
from stagepack.format.weights import StoredTensor, TensorSpec, tensor_layout
from stagepack.onnx.stage_place import StagePlace

# Bytes of a tensor that may be in the ONNX file itself.
_MAX_INLINE_BYTES = 1024
_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64}
_DTYPE_NAMES = {element_type: dtype_name for dtype_name, element_type in ELEMENT_TYPES.items()}


def move_weights_out(
    model: ir.Model, weights: Mapping[str, Weight], stage_place: StagePlace
) -> dict[TensorSpec, bytes]:
    """Let the initializers of a model point into weight files, apart from small ones.

    The result is the tensors that are in no weight file yet, with their bytes, in the order of the stage's own weight file.
    """
    new_tensors: dict[TensorSpec, bytes] = {}
    new_values = []
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        assert tensor is not None
        assert value.name is not None
        weight = weights.get(value.name)
        start = None if weight is None else _start_in_file(weight, tensor, stage_place.stored_tensors)
        if weight is not None and weight.zeros and tensor.nbytes > _MAX_INLINE_BYTES:
            _compute_zeros(model, value)
        elif weight is not None and start is not None:
            weight_file = stage_place.stored_tensors[weight.stored][0].name
            value.const_value = _external_tensor(tensor, weight_file, start)
        elif tensor.nbytes > _MAX_INLINE_BYTES:
            shape = tuple(tensor.shape.numpy())
            spec = TensorSpec(name=value.name, dtype=_DTYPE_NAMES[tensor.dtype], shape=shape)
            new_tensors[spec] = tensor.tobytes()
            new_values.append(value)
    for value, stored in zip(new_values, tensor_layout(new_tensors), strict=True):
        assert value.const_value is not None
        value.const_value = _external_tensor(value.const_value, stage_place.own_weight_file, stored.start)
    return new_tensors


def _start_in_file(
    weight: Weight, tensor: ir.TensorProtocol, stored_tensors: Mapping[str, tuple[Path, StoredTensor]]
) -> int | None:
    """The first byte of a weight in its file; None if the initializer cannot point there."""
    # Runtimes read sizes and indices from small integers, and only from those in the ONNX file.
    is_small_integer = tensor.dtype in _INTEGERS and tensor.nbytes <= _MAX_INLINE_BYTES
    if weight.zeros or tensor.nbytes == 0 or is_small_integer:
        return None
    start = stored_tensors[weight.stored][1].start
    if weight.base is None:
        return start
    contiguous_strides = [math.prod(weight.shape[index + 1 :]) for index in range(len(weight.shape))]
    is_contiguous = all(
        size == 1 or stride == contiguous_stride
        for size, stride, contiguous_stride in zip(weight.shape, weight.strides or (), contiguous_strides, strict=True)
    )
    return start + weight.offset * ITEM_SIZE[weight.dtype] if is_contiguous else None


def _external_tensor(tensor: ir.TensorProtocol, weight_file: str, start: int) -> ir.ExternalTensor:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(weight_file, start, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name or "")


def _compute_zeros(model: ir.Model, value: ir.Value) -> None:
    """Replace an initializer of all zeros, which is in no file, by a node that computes it."""
    tensor, value_name = value.const_value, value.name
    assert tensor is not None
    assert value_name is not None
    sizes = ir.tensor(list(tensor.shape.numpy()), dtype=ir.DataType.INT64, name=f"{value_name}/shape")
    sizes_value = ir.Value(name=sizes.name, const_value=sizes)
    zero = ir.tensor([0], dtype=tensor.dtype)
    node = ir.node("ConstantOfShape", [sizes_value], {"value": zero})
    del model.graph.initializers[value_name]
    ir.convenience.replace_all_uses_with(value, node.outputs[0], replace_graph_outputs=True)
    node.outputs[0].name, node.outputs[0].dtype = value_name, tensor.dtype
    model.graph.initializers.add(sizes_value)
    if len(model.graph):
        model.graph.insert_before(model.graph[0], node)
    else:
        model.graph.append(node)
