"""A stage as a module that returns what it writes, as ONNX needs it.

- A stage computed in float64: the answers against which the rounding of lower precisions is measured.
- Linear layers that use their weights as the weight files store them. torch's exporter transposes the weight of each linear layer. A
  runtime transposes such an initializer when it loads the model, and keeps the copy; ``Gemm`` takes the weight as it is stored.
- Initializers of an ONNX model that point into the weight files of a bundle.
- Where a stage is in its bundle, and how its ONNX model says so.
"""

import importlib.metadata
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import rewriter
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from stagepack.format.aliasing import alias_classes
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import VERSION, Edge
from stagepack.format.onnx import ELEMENT_TYPES
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor, TensorSpec, tensor_layout
from stagepack.onnx.replacements import call_replaced
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.operators import resolve_operators
from stagepack_loaders.torch.weights import WeightCache

# Inputs that torch.export would replace by their value in the example, so they are passed as tensors.
PASSED_AS_TENSORS = {"symfloat": torch.float64, "symbool": torch.bool}
_CPU = torch.device("cpu")
_WIDE_DTYPES = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
# The first version of ONNX in which a node names its pipeline stage.
_IR_VERSION = 11
_MODULE_KEY = "pkg.stagepack.module"
# Bytes of a tensor that may be in the ONNX file itself.
_MAX_INLINE_BYTES = 1024
_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64}
_DTYPE_NAMES = {element_type: dtype_name for dtype_name, element_type in ELEMENT_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWrites:
    """The values whose memory a stage writes."""

    state: Sequence[str]
    inputs: Sequence[str]


def stage_writes(graph: Graph) -> StageWrites:
    """Return the weights and inputs that a stage writes, by the names of their values."""
    classes = alias_classes(graph)
    return StageWrites(
        state=tuple(weight.value for weight in graph.weights if classes.is_written(weight.value)),
        inputs=tuple(value.name for value in graph.inputs if classes.is_written(value.name)),
    )


class FunctionalStage(torch.nn.Module):
    """A stage that returns what it writes instead of writing it.

    Its arguments are a tensor that is not used, the inputs of the stage, and the content of the weights that the stage writes. Its
    results are the outputs of the stage, the next content of these weights, and the content of the inputs that the stage writes. The
    unused tensor is for torch, which cannot trace a module without tensor arguments.
    """

    def __init__(
        self, module: GraphModule, graph: Graph, tensors: Mapping[str, torch.Tensor], writes: StageWrites
    ) -> None:
        super().__init__()
        # A tuple, so that the module is not registered as a child.
        self._stage = (module, graph)
        self._writes = writes
        for value_name, tensor in tensors.items():
            if value_name not in writes.state:
                self.register_buffer(value_name, tensor.detach())

    def forward(self, _: torch.Tensor, *given: Any) -> tuple[Any, ...]:
        """Run the stage."""
        # The parameter keeps its name: torch's exporter derives names of values from it, which are in the ONNX file.
        module, graph = self._stage
        written_names = (*self._writes.state, *self._writes.inputs)
        argument_names = [*(value.name for value in graph.inputs), *self._writes.state]
        values = dict(zip(argument_names, given, strict=True))
        values |= {value_name: values[value_name].clone() for value_name in written_names}
        scalars = {value.name: values[value.name].item() for value in graph.inputs if value.dtype in PASSED_AS_TENSORS}
        stage_inputs = [scalars.get(value.name, values[value.name]) for value in graph.inputs]
        weights = [
            values[weight.value] if weight.value in values else getattr(self, weight.value) for weight in graph.weights
        ]
        with torch.fx.traceback.preserve_node_meta():
            outputs = _StageInterpreter(module).run(*stage_inputs, *weights)
        return (*outputs, *(values[value_name] for value_name in written_names))


class _StageInterpreter(torch.fx.Interpreter):
    """Runs a graph node by node, nodes in contexts too, so that each traced node records the module that it came from."""

    def fetch_attr(self, target: str) -> Any:
        attribute = super().fetch_attr(target)
        is_context = isinstance(attribute, GraphModule) and target.startswith("_context_")
        return (lambda *args: _StageInterpreter(attribute).run(*args)) if is_context else attribute

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, or what torch's ONNX exporter converts right in the place of one that it converts wrong."""
        return call_replaced(target, args, kwargs)


def float64_answers(
    bundle: Bundle, stage_number: int, inputs: Sequence[Any], allow_ops: Collection[str]
) -> dict[str, torch.Tensor]:
    """Run a stage in float64, also where its graph names a lower precision.

    The result is the outputs by the names of their edges; nothing if the stage cannot run in float64, for example because an operator has
        no kernel for it.
    """
    graph = bundle.graph(stage_number)
    module = build_graph_module(
        trivially_folded(graph), graph, resolve_operators(graph.ops, allow_ops, bundle.stages[stage_number].graph), _CPU
    )
    _widen_graphs(module)
    stored_tensors, cache, written = bundle.tensors(stage_number, graph), WeightCache(), stage_writes(graph)
    weights = [_widened(cache.read(weight, stored_tensors, _CPU)) for weight in graph.weights]
    # What the stage writes, it writes into copies.
    weights = [
        tensor.clone() if weight.value in written.state else tensor
        for weight, tensor in zip(graph.weights, weights, strict=True)
    ]
    copied_inputs = [_widened(value.clone()) if isinstance(value, torch.Tensor) else value for value in inputs]
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = module(*copied_inputs, *weights)
    except Exception:  # noqa: BLE001 - operators raise any class
        return {}
    finally:
        torch.set_default_dtype(default_dtype)
    return {
        edge_name: answer
        for edge_name, answer in zip(bundle.stages[stage_number].outputs, outputs, strict=True)
        if isinstance(answer, torch.Tensor)
    }


def rounding_error(exact_answers: Mapping[str, torch.Tensor], edge_name: str, answer: torch.Tensor) -> float | None:
    """Return the largest absolute difference of an answer of a stage from that in float64."""
    if edge_name not in exact_answers or answer.dtype not in _WIDE_DTYPES:
        return None
    error, _ = TORCH_ARRAYS.difference(answer.to(_WIDE_DTYPES[answer.dtype]), exact_answers[edge_name], 0.0, 0.0)
    return error if math.isfinite(error) else None


def _widen_graphs(module: GraphModule) -> None:
    """Replace the dtypes in the arguments of all nodes."""
    for nested in module.modules():
        if not isinstance(nested, GraphModule):
            continue
        for node in nested.graph.nodes:
            node.args = map_aggregate(node.args, _wide_dtype)
            node.kwargs = map_aggregate(node.kwargs, _wide_dtype)
        nested.recompile()


def _wide_dtype(argument: Any) -> Any:
    return _WIDE_DTYPES.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _widened(value: Any) -> Any:
    return value.to(_wide_dtype(value.dtype)) if isinstance(value, torch.Tensor) else value


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
