"""What torch's exporter makes of a stage -> an ONNX model as bundles have it (SPEC section 10)."""

import ast
import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import optimize_ir

from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import Edge
from stagepack.format.onnx import (
    COMPLEX_PART_DTYPES,
    ELEMENT_TYPES,
    NEXT_STATE_PREFIX,
    STATE_PREFIX,
    WRITTEN_PREFIX,
    onnx_element_type,
)
from stagepack.format.shapes import format_dim
from stagepack.format.version import VERSION
from stagepack.format.weights import StoredTensor, TensorSpec, tensor_layout
from stagepack.onnx.linear import use_weights_as_they_lie
from stagepack.onnx.trace import Written

_INLINE = 1024  # bytes of a tensor that may stand in the ONNX file itself
_IR_VERSION = 11  # the first in which a node tells its pipeline stage
_MODULE = "pkg.stagepack.module"
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # what torch notes of what it adds itself
_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64}
_DTYPES = {number: name for name, number in ELEMENT_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stage stands: its number, among how many, and where the tensors of its weight files lie."""

    number: int
    stages: int
    tensors: Mapping[str, tuple[Path, StoredTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFiles:
    """The content of the files of an ONNX model: the model, and the tensors that are in no weight file of the stage, by name."""

    model: bytes
    tensors: Mapping[TensorSpec, bytes]

    def read(self, name: str) -> list[bytes]:
        """The bytes of a tensor."""
        return [octets for spec, octets in self.tensors.items() if spec.name == name]


def finish(
    model: ir.Model, graph: Graph, edges: Mapping[str, Edge], written: Written, place: Place, own: str
) -> OnnxFiles:
    """Give a model of torch's exporter the names, types and weights of its stage.

    Args:
        model: the model, which is changed.
        graph: the stage as data. The initializers of the model have the names of the values of its weights.
        edges: the edges by name.
        written: what the stage writes.
        place: where the stage stands.
        own: the name of the weight file for tensors that are in none of the stage's.
    """
    weights = {weight.value: weight for weight in graph.weights}
    del model.graph.inputs[0]  # see `trace`
    _simplify(model, weights)
    tensors = _place(model, weights, place, own)
    modules = {node: _module(node) for node in model.graph.all_nodes()}
    _forget(model)
    _name(model, graph, written, place.number)
    _describe(model, graph, edges, place, modules)
    return OnnxFiles(model=ir.to_proto(model).SerializeToString(deterministic=True), tensors=tensors)


def _module(node: ir.Node) -> str:
    """The path of the module that a node came from, as torch's exporter tells it: the last of its scopes is the node itself."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    return scopes[-2] if len(scopes) > 1 and scopes[-2] != _NO_MODULE else ""


def _simplify(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Optimize a model as torch's exporter would, but without the bytes of its weights: these stay those of the weight files.

    Functions, which torch makes of branches and of subgraphs that are called, are inlined.
    """
    kept = {value: value.const_value for value in model.graph.initializers.values() if value.name in weights}
    for value in kept:
        value.const_value = None
    use_weights_as_they_lie(model)
    optimize_ir(model, onnx_shape_inference=False)
    for value, tensor in kept.items():
        value.const_value = tensor


def _forget(model: ir.Model) -> None:
    """Remove what torch's exporter notes for those who debug it: traces of stacks, sizes under names of its own."""
    common.ClearMetadataAndDocStringPass()(model)
    model.graph.metadata_props.clear()
    for value in _values(model):
        value.metadata_props.clear()
        if value.is_graph_input() or value.is_graph_output():  # a loop needs the rank of what it carries
            shape = value.shape
            value.shape = shape and ir.Shape([dim if isinstance(dim, int) else None for dim in shape])
        elif not value.is_initializer():
            value.shape = value.type = None


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """All values, each once."""
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs


def _name(model: ir.Model, graph: Graph, written: Written, stage: int) -> None:
    """Name what crosses the boundary by the edges, weights as in the original model, and all else so that no other stage has the name.

    So stages can be joined, by ``onnx.compose`` for example; but for inputs and weights that several of them use.
    """
    weights = {weight.value: weight.names[0] for weight in graph.weights}
    state = [weights[name] for name in written.state]
    inputs = [*(value.name for value in graph.inputs), *(STATE_PREFIX + name for name in state)]
    outputs = [
        *graph.outputs,
        *(NEXT_STATE_PREFIX + name for name in state),
        *(WRITTEN_PREFIX + name for name in written.inputs),
    ]
    edges = {*inputs, *outputs}
    prefix = f"s{stage}."
    while any(name.startswith(prefix) for name in weights.values()):
        prefix = f"_{prefix}"
    names: dict[ir.Value, str] = {}
    for value in _values(model):
        known = weights.get(value.name or "") if value.is_initializer() else None
        names[value] = f"{prefix}{value.name}" if known is None or known in edges else known
    names |= zip(model.graph.inputs, inputs, strict=True)
    names |= zip(model.graph.outputs, outputs, strict=True)
    for number, value in enumerate(names):  # out of the way: a new name may be the old one of another
        value.name = f"/{number}"
    for value, name in names.items():
        value.name = name
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name if node.outputs else None


def _describe(
    model: ir.Model, graph: Graph, edges: Mapping[str, Edge], place: Place, modules: Mapping[ir.Node, str]
) -> None:
    """Give the boundary its types and sizes, and the model and its nodes what they say of where they belong."""
    weights = {weight.names[0]: weight for weight in graph.weights}
    for value in list(model.graph.outputs):
        _convert(model, value, _expected(value.name, edges, weights).dtype)
    for value in (*model.graph.inputs, *model.graph.outputs):
        expected = _expected(value.name, edges, weights)
        pair = [2] if expected.dtype in COMPLEX_PART_DTYPES else []
        value.shape = ir.Shape([*(dim if isinstance(dim, int) else format_dim(dim) for dim in expected.shape), *pair])
    model.ir_version = _IR_VERSION
    model.producer_name, model.producer_version = "stagepack", importlib.metadata.version("stagepack")
    # What differs from stage to stage is told of the graph: onnx.compose refuses to merge models that say different things of themselves.
    model.metadata_props["pkg.stagepack.format_version"] = VERSION
    model.metadata_props["pkg.stagepack.stages"] = str(place.stages)
    model.graph.name = f"stage_{place.number}"
    model.graph.metadata_props["pkg.stagepack.stage"] = str(place.number)
    configuration = model.add_device_configuration("stagepack", num_devices=place.stages)
    stage = ir.NodeDeviceConfiguration(configuration, pipeline_stage=place.number)
    for node in model.graph.all_nodes():
        node.device_configurations = (stage,)
        if modules.get(node):
            node.metadata_props[_MODULE] = modules[node]


def _expected(name: str | None, edges: Mapping[str, Edge], weights: Mapping[str, Weight]) -> Edge | Weight:
    """What stands behind the name of an input or output."""
    assert name is not None
    for prefix in (STATE_PREFIX, NEXT_STATE_PREFIX):
        if name.startswith(prefix):
            return weights[name.removeprefix(prefix)]
    return edges[name.removeprefix(WRITTEN_PREFIX)]


def _convert(model: ir.Model, output: ir.Value, dtype: str) -> None:
    """Let an output be of its type: torch's exporter makes floats of the host float32."""
    wanted = ir.DataType(onnx_element_type(dtype) or 0)
    if output.dtype == wanted:
        return
    name, output.name = output.name, f"{output.name}/given"
    cast = ir.node("Cast", [output], {"to": wanted})
    cast.outputs[0].name, cast.outputs[0].dtype = name, wanted
    model.graph.append(cast)
    model.graph.outputs[model.graph.outputs.index(output)] = cast.outputs[0]


def _place(model: ir.Model, weights: Mapping[str, Weight], place: Place, own: str) -> dict[TensorSpec, bytes]:
    """Let initializers point into weight files; those that are in none, and not small, into a file of their own."""
    moved: dict[TensorSpec, bytes] = {}
    homeless = []
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        assert tensor is not None
        assert value.name is not None
        weight = weights.get(value.name)
        if weight is not None and weight.zeros and tensor.nbytes > _INLINE:
            _zeros(model, value)
        elif weight is not None and _stays(weight, tensor) and (start := _start(weight, place.tensors)) is not None:
            file = place.tensors[weight.stored][0].name
            value.const_value = _external(tensor, file, start)
        elif tensor.nbytes > _INLINE:
            spec = TensorSpec(name=value.name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape.numpy()))
            moved[spec] = tensor.tobytes()
            homeless.append(value)
    for value, stored in zip(homeless, tensor_layout(moved), strict=True):
        assert value.const_value is not None
        value.const_value = _external(value.const_value, own, stored.start)
    return moved


def _stays(weight: Weight, tensor: ir.TensorProtocol) -> bool:
    """Whether a weight stays in its file. Runtimes read sizes and indices off small integers, and look into no file for that."""
    is_small_integer = tensor.dtype in _INTEGERS and tensor.nbytes <= _INLINE
    return not weight.zeros and tensor.nbytes > 0 and not is_small_integer


def _start(weight: Weight, tensors: Mapping[str, tuple[Path, StoredTensor]]) -> int | None:
    """The first byte of a weight in its file, in which its elements lie one after another; None if they do not."""
    start = tensors[weight.stored][1].start
    if weight.base is None:
        return start
    expected = [math.prod(weight.shape[place + 1 :]) for place in range(len(weight.shape))]
    dense = all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(weight.shape, weight.strides or (), expected, strict=True)
    )
    return start + weight.offset * ITEM_SIZE[weight.dtype] if dense else None


def _external(tensor: ir.TensorProtocol, file: str, start: int) -> ir.ExternalTensor:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(file, start, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name or "")


def _zeros(model: ir.Model, value: ir.Value) -> None:
    """Compute zeros where they are needed: they lie in no file."""
    tensor = value.const_value
    assert tensor is not None
    shape = ir.tensor(list(tensor.shape.numpy()), dtype=ir.DataType.INT64, name=f"{value.name}/shape")
    sizes = ir.Value(name=shape.name, const_value=shape)
    zero = ir.tensor([0], dtype=tensor.dtype)
    node = ir.node("ConstantOfShape", [sizes], {"value": zero})
    name = value.name
    assert name is not None
    del model.graph.initializers[name]
    ir.convenience.replace_all_uses_with(value, node.outputs[0], replace_graph_outputs=True)
    node.outputs[0].name, node.outputs[0].dtype = name, tensor.dtype
    model.graph.initializers.add(sizes)
    if len(model.graph):
        model.graph.insert_before(model.graph[0], node)
    else:
        model.graph.append(node)
