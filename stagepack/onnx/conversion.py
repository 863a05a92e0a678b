"""A stage of a bundle -> the files of its ONNX model.

- Why a stage has no ONNX form.
- A model of torch's ONNX exporter -> the ONNX model of a stage as bundles have it (SPEC section 10).
- A stage -> a `torch.export.ExportedProgram` that writes nothing and has dynamic sizes.
- Names of the values of an ONNX model: edges at the boundary, weights as in the original model, all others unique to the stage.
- The types and sizes of the inputs and outputs of an ONNX model.
"""

# Long because the steps from a stage to its file, in the order in which they run.

import ast
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript.optimizer import optimize_ir
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from stagepack.capture.traced_code import sequences_of_any_length
from stagepack.format.aliasing import alias_classes
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph, Value, Weight
from stagepack.format.manifest import Edge, Stage
from stagepack.format.onnx import (
    COMPLEX_PART_DTYPES,
    NEXT_STATE_PREFIX,
    STATE_PREFIX,
    WRITTEN_PREFIX,
    onnx_element_type,
)
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Expr, Symbol, evaluate_dim, format_dim
from stagepack.format.weights import TensorSpec
from stagepack.onnx.check import lost_assertion
from stagepack.onnx.empty_inputs import guard_empty_inputs
from stagepack.onnx.functional_stage import (
    PASSED_AS_TENSORS,
    FunctionalStage,
    StagePlace,
    StageWrites,
    describe_place,
    move_weights_out,
    stage_writes,
    use_stored_weights,
)
from stagepack.torch_internals import (
    NO_MODULE_PREFIX,
    OperatorOverload,
    batch_norm_decompositions,
    operator_schema,
    operators_without_onnx_form,
)
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.prepare import read_parts
from stagepack_loaders.torch.weights import WeightCache

_MAX_REASON_LENGTH = 300
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_CPU = torch.device("cpu")
# The others are decomposed into the steps of the example, so that their stages are refused where the length is dynamic.
_LAYERS_IN_ONNX = ("lstm", "gru")
_EXPORTER_LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript")


def explain_failure(graph: Graph, program: ExportedProgram | None, error: BaseException) -> str:
    """Return the reason why a stage could not be converted.

    program: the captured stage; None if the capture failed.
    The result is the operators without an ONNX form, each with the paths of the modules that call it; if there are none, the first cause of
        the exception.
    """
    unsupported = [] if program is None else _unsupported_calls(graph, program)
    if unsupported:
        module_paths: dict[str, dict[str, None]] = {}
        for operator_name, module_path in unsupported:
            module_paths.setdefault(operator_name, {})[module_path or "the model itself"] = None
        return "; ".join(
            f"no ONNX form of {operator_name} in {', '.join(paths)}" for operator_name, paths in module_paths.items()
        )
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_LENGTH]}"


def _unsupported_calls(graph: Graph, program: ExportedProgram) -> list[tuple[str, str]]:
    """The operators without an ONNX form, with the paths of the modules that call them; those that are custom, if torch cannot tell."""
    try:
        calls = [
            (operator_name, _module_path(node.meta)) for operator_name, node in operators_without_onnx_form(program)
        ]
    except Exception:  # noqa: BLE001 - torch cannot decompose the program, and raises any class
        calls = []
    return calls or [
        (graph.ops[node.op].name, graph.scopes[node.scope].path)
        for node in graph.nodes
        if operator_namespace(graph.ops[node.op].name) not in ALLOWED_NAMESPACES
    ]


def _module_path(meta: dict[str, object]) -> str:
    stack = meta.get("nn_module_stack")
    paths = [path for path, _ in stack.values()] if isinstance(stack, dict) else []
    return paths[-1] if paths else ""


def name_values(model: ir.Model, graph: Graph, writes: StageWrites, stage_number: int) -> None:
    """Rename all values and nodes of a model.

    Stages can then be merged, for example by ``onnx.compose``, apart from inputs and weights that several stages use.
    """
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
    for value in all_values(model):
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


def all_values(model: ir.Model) -> Iterator[ir.Value]:
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
    _optimize(model, weights)
    guard_empty_inputs(model)
    _allow_zero_sizes(model)
    tensors = move_weights_out(model, weights, stage_place)
    module_paths = {node: _node_module_path(node) for node in model.graph.all_nodes()}
    _clear_debug_information(model)
    name_values(model, graph, writes, stage_place.stage_number)
    describe_boundary(model, graph, stage_place.edges)
    describe_place(model, stage_place, module_paths)
    return OnnxFiles(model=ir.to_proto(model).SerializeToString(deterministic=True), tensors=tensors)


def _optimize(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Optimize a model as torch's exporter would, without changing its weights, which stay those of the weight files.

    Functions are inlined; torch makes them of branches and subgraphs.
    """
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
    for value in all_values(model):
        value.metadata_props.clear()
        if value.is_graph_input() or value.is_graph_output():
            # A loop needs the rank of its inputs.
            shape = value.shape
            value.shape = shape and ir.Shape([dim if isinstance(dim, int) else None for dim in shape])
        elif not value.is_initializer():
            value.shape = value.type = None


def trace_stage(
    module: GraphModule,
    graph: Graph,
    targets: Sequence[Callable[..., Any]],
    tensors: Mapping[str, torch.Tensor],
    writes: StageWrites,
) -> ExportedProgram:
    """Capture a stage as a `FunctionalStage`, with the sizes that may change."""
    sizes = _traced_sizes(graph.symbols)
    examples = [_example_input(value, sizes) for value in graph.inputs]
    examples += [(tensors[value_name].detach().clone(), None) for value_name in writes.state]
    dynamic_shapes = (None, tuple(dynamic for _, dynamic in examples)) if examples else (None,)
    with torch.no_grad():
        program = torch.export.export(
            FunctionalStage(module, graph, tensors, writes),
            (torch.zeros(()), *(example for example, _ in examples)),
            dynamic_shapes=dynamic_shapes,
            strict=False,
            # The loader checks the sizes, not the graph.
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    decompositions = _decompositions(graph, targets)
    return program.run_decompositions(decompositions) if decompositions else program


def _decompositions(graph: Graph, targets: Sequence[Callable[..., Any]]) -> dict[Any, Any]:
    """Decompositions of operators for which torch's ONNX exporter loses what they write, or that their results are views."""
    if not alias_classes(graph).writers:
        return {}
    norms = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}.intersection(targets)
    silent_views = {
        target for op, target in zip(graph.ops, targets, strict=True) if op.aliases and _has_silent_schema(target)
    }
    decompositions: dict[Any, Any] = batch_norm_decompositions() if norms else {}
    if norms or silent_views:
        defaults = torch.export.default_decompositions()
        decompositions |= {target: defaults[target] for target in norms | silent_views if target in defaults}
    return decompositions


def _has_silent_schema(target: Callable[..., Any]) -> bool:
    """Whether the schema of an operator does not say what its results alias."""
    return isinstance(target, OperatorOverload) and not any(
        parameter.alias_info for parameter in operator_schema(target).arguments
    )


def _traced_sizes(symbols: Sequence[Symbol]) -> dict[str, int]:
    """A size for each symbol: that of the example if it is at least 2, since torch takes 0 and 1 for constants."""
    sizes = {}
    for symbol in symbols:
        size = symbol.example if symbol.example is not None and symbol.example > 1 else max(symbol.min or 0, 2)
        sizes[symbol.name] = size if symbol.max is None else min(size, symbol.max)
    return sizes


def _example_input(value: Value, sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """An input to trace with, and its dynamic dimensions."""
    if value.dtype == "symint":
        return (2 if value.expr is None else evaluate_dim(value.expr, sizes)), Dim.DYNAMIC
    if value.dtype in PASSED_AS_TENSORS:
        return torch.ones((), dtype=PASSED_AS_TENSORS[value.dtype]), None
    shape = [evaluate_dim(dim, sizes) for dim in value.shape]
    dynamic_dims = {index: Dim.DYNAMIC for index, dim in enumerate(value.shape) if isinstance(dim, str | Expr)}
    return torch.zeros(shape, dtype=getattr(torch, value.dtype)), dynamic_dims


def convert_stage(bundle: Bundle, stage_number: int, allow_ops: Collection[str]) -> OnnxFiles | str:
    """Convert a stage with torch's ONNX exporter."""
    _, graph, targets = read_parts(bundle, stage_number, PrepareOptions(allow_ops=allow_ops))
    writes = stage_writes(graph)
    if reason := _inexpressible(bundle, stage_number, graph, writes):
        return reason
    module = build_graph_module(trivially_folded(graph), graph, targets, _CPU)
    stored_tensors = bundle.tensors(stage_number, graph)
    cache = WeightCache()
    tensors = {weight.value: cache.read(weight, stored_tensors, _CPU) for weight in graph.weights}
    stage_place = StagePlace(
        stage_number=stage_number,
        stage_count=len(bundle.stages),
        edges={edge.name: edge for edge in bundle.edges},
        stored_tensors=stored_tensors,
        own_weight_file=own_weight_file(bundle.stages[stage_number]),
    )
    program = None
    with _exporter_silenced(), sequences_of_any_length(_LAYERS_IN_ONNX):
        try:
            program = trace_stage(module, graph, targets, tensors, writes)
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert converted is not None
            return finish_model(converted.model, graph, writes, stage_place)
        except Exception as error:  # noqa: BLE001 - torch, its exporter and their libraries raise any class
            return explain_failure(graph, program, error)


def model_file(stage: Stage) -> str:
    """Return the name of the ONNX file of a stage: that of its graph, with another suffix."""
    return f"{stage.graph.removesuffix('.msgpack')}.onnx"


def own_weight_file(stage: Stage) -> str:
    """Return the name of the weight file for tensors that only the ONNX model of a stage uses."""
    return f"{model_file(stage)}.safetensors"


def _inexpressible(bundle: Bundle, stage_number: int, graph: Graph, writes: StageWrites) -> str | None:
    """Why ONNX cannot express a stage, if that is known without tracing it."""
    stored_names = {weight.value: weight.stored for weight in graph.weights}
    written_tensors = [stored_names[value_name] for value_name in writes.state]
    if len(set(written_tensors)) < len(written_tensors):
        shared = next(weight.names[0] for weight in graph.weights if written_tensors.count(weight.stored) > 1)
        return f"it writes {shared} in memory that another weight shares"
    edges = {edge.name: edge for edge in bundle.edges}
    stage = bundle.stages[stage_number]
    for edge_name in (*stage.inputs, *stage.outputs):
        if onnx_element_type(edges[edge_name].dtype) is None:
            return f"ONNX has no type for {edges[edge_name].dtype}, of the edge {edge_name}"
    if any(op.name.startswith("aten.as_strided") for op in graph.ops):
        return "aten.as_strided selects elements by their places in memory, and ONNX Runtime gets all inputs in row-major memory"
    return lost_assertion(graph, bundle.entry_point.guards)


@contextmanager
def _exporter_silenced() -> Iterator[None]:
    """Suppress warnings of torch's exporter and its libraries, which are for their own developers."""
    loggers = [logging.getLogger(logger_name) for logger_name in _EXPORTER_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
