"""A model of torch's ONNX exporter -> the ONNX model of a stage as bundles have it (SPEC section 10).

Linear layers use their weights as the weight files store them. torch's exporter transposes the weight of each, which a runtime does again
when it loads the model, and keeps the copy; ``Gemm`` takes the weight as it is stored.
"""

import ast
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.optimizer import optimize_ir

from stagepack.format.aliasing import StageWrites
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import VERSION, Edge
from stagepack.format.onnx import (
    COMPLEX_PART_DTYPES,
    ELEMENT_TYPES,
    NEXT_STATE_PREFIX,
    STATE_PREFIX,
    WRITTEN_PREFIX,
    onnx_element_type,
)
from stagepack.format.shapes import format_dim, is_row_major
from stagepack.format.weights import StoredTensor, TensorSpec, tensor_layout
from stagepack.roads.onnx.empty_inputs import guard_empty_inputs
from stagepack.roads.onnx.special_values import bound_clips, guard_special_values, keep_overflow
from stagepack.torch_internals import NO_MODULE_PREFIX

_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
# The first version of ONNX in which a node names its pipeline stage.
_IR_VERSION = 11
_MODULE_KEY = "pkg.stagepack.module"
# Bytes of a tensor that may be in the ONNX file itself.
_MAX_INLINE_BYTES = 1024
_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64}
_DTYPE_NAMES = {element_type: dtype_name for dtype_name, element_type in ELEMENT_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where a stage is in its bundle."""

    stage_number: int
    stage_count: int
    edges: Mapping[str, Edge]
    # The weight file of each stored tensor that the stage uses, and where it is in the file.
    stored_tensors: Mapping[str, tuple[Path, StoredTensor]]
    # The name of the weight file for tensors that are in no other weight file.
    own_weight_file: str


def name_values(model: ir.Model, graph: Graph, writes: StageWrites, stage_number: int) -> None:
    """Rename all values and nodes of a model, so that stages can be merged, for example by ``onnx.compose``."""
    weight_names = {weight.value: weight.names[0] for weight in graph.weights}
    state_names = [weight_names[value_name] for value_name in writes.state]
    input_names = [
        *(value.name for value in graph.inputs),
        *(STATE_PREFIX + weight_name for weight_name in state_names),
    ]
    output_names = [
        *graph.outputs,
        *(NEXT_STATE_PREFIX + weight_name for weight_name in state_names),
        *(WRITTEN_PREFIX + input_name for input_name in writes.inputs),
    ]
    boundary_names = {*input_names, *output_names}
    prefix = _stage_prefix(stage_number, [*weight_names.values()])
    new_names: dict[ir.Value, str] = {}
    for value in onnx_values(model):
        weight_name = weight_names.get(value.name or "") if value.is_initializer() else None
        if weight_name is None or weight_name in boundary_names:
            new_names[value] = f"{prefix}{value.name}"
        else:
            new_names[value] = weight_name
    new_names |= zip(model.graph.inputs, input_names, strict=True)
    new_names |= zip(model.graph.outputs, output_names, strict=True)
    # In two passes, since a new name may be the old name of another value.
    for value_index, value in enumerate(new_names):
        value.name = f"/{value_index}"
    for value, new_name in new_names.items():
        value.name = new_name
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name if node.outputs else None


def onnx_values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the values of a model and of the graphs in it, each once."""
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs


def _stage_prefix(stage_number: int, weight_names: list[str]) -> str:
    """The prefix of names that only this stage has: no weight begins with it."""
    prefix = f"s{stage_number}."
    while any(weight_name.startswith(prefix) for weight_name in weight_names):
        prefix = f"_{prefix}"
    return prefix


def describe_boundary(model: ir.Model, graph: Graph, edges: Mapping[str, Edge]) -> None:
    """Give the inputs and outputs of a model the types and sizes of the edges and weights that they are."""
    weights = {weight.names[0]: weight for weight in graph.weights}
    for output in list(model.graph.outputs):
        _cast_output(model, output, _boundary_value(output.name, edges, weights).dtype)
    for value in (*model.graph.inputs, *model.graph.outputs):
        described = _boundary_value(value.name, edges, weights)
        sizes = [dim if isinstance(dim, int) else format_dim(dim) for dim in described.shape]
        # ONNX has no complex tensors here: the last dimension is real and imaginary part.
        value.shape = ir.Shape([*sizes, 2] if described.dtype in COMPLEX_PART_DTYPES else sizes)


def _boundary_value(value_name: str | None, edges: Mapping[str, Edge], weights: Mapping[str, Weight]) -> Edge | Weight:
    """The edge or weight that an input or output of this name is."""
    assert value_name is not None
    for prefix in (STATE_PREFIX, NEXT_STATE_PREFIX):
        if value_name.startswith(prefix):
            return weights[value_name.removeprefix(prefix)]
    return edges[value_name.removeprefix(WRITTEN_PREFIX)]


def _cast_output(model: ir.Model, output: ir.Value, dtype: str) -> None:
    """Cast an output to its type where it differs: torch's exporter makes symbolic floats float32."""
    element_type = ir.DataType(onnx_element_type(dtype) or 0)
    if output.dtype == element_type:
        return
    output_name, output.name = output.name, f"{output.name}/given"
    cast = ir.node("Cast", [output], {"to": element_type})
    cast.outputs[0].name, cast.outputs[0].dtype = output_name, element_type
    model.graph.append(cast)
    model.graph.outputs[model.graph.outputs.index(output)] = cast.outputs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFiles:
    """The content of the files of an ONNX model."""

    model: bytes
    # The tensors that are in no weight file of the stage, with their bytes.
    tensors: Mapping[TensorSpec, bytes]

    def read(self, tensor_name: str) -> list[bytes]:
        """Return the bytes of a tensor in one piece."""
        return [content for spec, content in self.tensors.items() if spec.name == tensor_name]


def finish_model(model: ir.Model, graph: Graph, writes: StageWrites, stage_place: StagePlace) -> OnnxFiles:
    """Give a model of torch's exporter the names, types and weights of its stage."""
    weights = {weight.value: weight for weight in graph.weights}
    # The argument that `FunctionalStage` does not use.
    del model.graph.inputs[0]
    # The optimizer casts constants.
    keep_overflow(model)
    _optimize(model, weights)
    guard_empty_inputs(model)
    guard_special_values(model)
    bound_clips(model)
    _allow_zero_sizes(model)
    tensors = move_weights_out(model, weights, stage_place)
    module_paths = {node: _node_module_path(node) for node in model.graph.all_nodes()}
    _clear_debug_information(model)
    name_values(model, graph, writes, stage_place.stage_number)
    describe_boundary(model, graph, stage_place.edges)
    describe_place(model, stage_place, module_paths)
    return OnnxFiles(model=ir.to_proto(model).SerializeToString(deterministic=True), tensors=tensors)


def _optimize(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Optimize a model as torch's exporter would, with its functions inlined, without changing its weights: they are in weight files."""
    initializers = model.graph.initializers.values()
    weight_tensors = {value: value.const_value for value in initializers if value.name in weights}
    # The optimizer cannot fold a tensor that it does not know.
    for value in weight_tensors:
        value.const_value = None
    use_stored_weights(model)
    optimize_ir(model, onnx_shape_inference=False)
    for value, tensor in weight_tensors.items():
        value.const_value = tensor


def _allow_zero_sizes(model: ir.Model) -> None:
    """Let a 0 in the shape of a `Reshape` be a size of 0, where all of the shape is sizes: by default it copies a size of the input."""
    for node in model.graph.all_nodes():
        shape = node.inputs[1] if node.op_type == "Reshape" else None
        maker = None if shape is None else shape.producer()
        if maker is None or maker.op_type != "Concat":
            continue
        constants = [ir.convenience.get_const_tensor(part) for part in maker.inputs if part is not None]
        if all(constant is None or bool((constant.numpy() > 0).all()) for constant in constants):
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)


def _node_module_path(node: ir.Node) -> str:
    """The path of the module that a node came from; the last scope that torch's exporter records is the node itself."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES_KEY, "[]"))
    return scopes[-2] if len(scopes) > 1 and not scopes[-2].startswith(NO_MODULE_PREFIX) else ""


def _clear_debug_information(model: ir.Model) -> None:
    """Remove what torch's exporter records for debugging: stack traces, and sizes under names of its own."""
    common.ClearMetadataAndDocStringPass()(model)
    model.graph.metadata_props.clear()
    for value in onnx_values(model):
        value.metadata_props.clear()
        if value.is_graph_input() or value.is_graph_output():
            # A loop needs the rank of its inputs.
            shape = value.shape
            value.shape = shape and ir.Shape([dim if isinstance(dim, int) else None for dim in shape])
        elif not value.is_initializer():
            value.shape = value.type = None


class _Linear(rewriter.RewriteRuleClassBase):
    """``MatMul(x, Transpose(w))`` -> ``Gemm(x, w, transB=1)``, with `x` reshaped to a matrix, and the result reshaped back."""

    def pattern(self, op: Any, x: ir.Value, w: ir.Value) -> Any:
        return op.MatMul(x, op.Transpose(w, perm=[1, 0]))

    def check(self, context: Any, w: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        return _is_stored_matrix(w)

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value) -> Any:
        return _gemm(op, x, w)


class _LinearWithBias(_Linear):
    """The same, with a bias that is added."""

    def pattern(self, op: Any, x: ir.Value, w: ir.Value, b: ir.Value) -> Any:  # type: ignore[override]
        return op.Add(op.MatMul(x, op.Transpose(w, perm=[1, 0])), b)

    def check(self, context: Any, w: ir.Value, b: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        return _is_stored_matrix(w) and b.is_initializer() and w.shape is not None and b.shape == w.shape[:1]

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, b: ir.Value) -> Any:  # type: ignore[override]
        return _gemm(op, x, w, b)


def use_stored_weights(model: ir.Model) -> None:
    """Replace the products of a model with transposed initializers."""
    # One rule after the other: a product comes before the addition of the bias.
    for rule in (_LinearWithBias, _Linear):
        rewriter.RewritePass([rule.rule()])(model)  # type: ignore[no-untyped-call]


def _is_stored_matrix(value: ir.Value) -> bool:
    """Whether a value is an initializer that Gemm takes in every runtime."""
    return (
        value.is_initializer()
        and value.dtype in _FLOATS
        and value.shape is not None
        and len(value.shape) == 2
        and 0 not in value.shape
    )


def _gemm(op: Any, x: ir.Value, w: ir.Value, *bias: ir.Value) -> Any:
    if x.shape is not None and len(x.shape) == 2:
        return op.Gemm(x, w, *bias, transB=1)
    assert w.shape is not None
    out_features, in_features = w.shape.numpy()
    rows = op.Reshape(x, op.Constant(value_ints=[-1, in_features]))
    shape = op.Concat(op.Shape(x, start=0, end=-1), op.Constant(value_ints=[out_features]), axis=0)
    return op.Reshape(op.Gemm(rows, w, *bias, transB=1), shape, allowzero=1)


def describe_place(model: ir.Model, stage_place: StagePlace, module_paths: Mapping[ir.Node, str]) -> None:
    """Write into a model which stage it is, and into its nodes which stage and which module they belong to."""
    model.ir_version = _IR_VERSION
    model.producer_name, model.producer_version = "stagepack", importlib.metadata.version("stagepack")
    # onnx.compose refuses to merge models whose metadata differ, so what differs between stages is metadata of the graph.
    model.metadata_props["pkg.stagepack.format_version"] = VERSION
    model.metadata_props["pkg.stagepack.stages"] = str(stage_place.stage_count)
    model.graph.name = f"stage_{stage_place.stage_number}"
    model.graph.metadata_props["pkg.stagepack.stage"] = str(stage_place.stage_number)
    configuration = model.add_device_configuration("stagepack", num_devices=stage_place.stage_count)
    stage_configuration = ir.NodeDeviceConfiguration(configuration, pipeline_stage=stage_place.stage_number)
    for node in model.graph.all_nodes():
        node.device_configurations = (stage_configuration,)
        if module_paths.get(node):
            node.metadata_props[_MODULE_KEY] = module_paths[node]


def move_weights_out(
    model: ir.Model, weights: Mapping[str, Weight], stage_place: StagePlace
) -> dict[TensorSpec, bytes]:
    """Let the initializers of a model point into weight files, apart from small ones; return those in no weight file yet, in order."""
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
    return start + weight.offset * ITEM_SIZE[weight.dtype] if is_row_major(weight.shape, weight.strides or ()) else None


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
