"""A stage of a bundle -> the files of its ONNX model, or why it has no ONNX form."""

import warnings
from collections.abc import Collection

import torch
from torch.export import ExportedProgram

from stagepack.capture.recurrent_layers import sequences_of_any_length
from stagepack.capture.torch_messages import only_errors_logged
from stagepack.format import limits
from stagepack.format.aliasing import StageWrites, stage_writes
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Argument, Graph, Node, ValueArg
from stagepack.format.manifest import Stage
from stagepack.format.onnx import onnx_element_type
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, Guard
from stagepack.graph.implied_guards import is_implied
from stagepack.roads.onnx import complex_numbers, elementwise, reductions
from stagepack.roads.onnx.decompositions import NoOnnxFormError
from stagepack.roads.onnx.functional_stage import trace_stage
from stagepack.roads.onnx.stage_model import OnnxFiles, StagePlace, finish_model
from stagepack.torch_internals import constants_matched_exactly, onnx_decompositions, operators_without_onnx_form
from stagepack_loaders.base import Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.prepare import read_parts
from stagepack_loaders.torch.weight_store import WeightCache

_MAX_REASON_LENGTH = 300
_CPU = torch.device("cpu")
DECOMPOSITIONS = {**complex_numbers.TABLE, **elementwise.TABLE, **reductions.TABLE}
# The others are decomposed into the steps of the example, so that their stages are refused where the length is dynamic.
_LAYERS_IN_ONNX = ("lstm", "gru")
_EXPORTER_LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript")
_ASSERTED_SCALAR = "aten._assert_scalar.default"
_RANGE_ASSERTIONS = ("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default")
_SIZES = ("aten.sym_size.int", "aten.sym_numel.default")
_ASSERTIONS = frozenset({_ASSERTED_SCALAR, *_RANGE_ASSERTIONS, "aten._assert_async.default", "aten._assert_async.msg"})
# The relation, and whether its operands are exchanged.
_RELATIONS = {
    "operator.eq": ("eq", False),
    "operator.ne": ("ne", False),
    "operator.lt": ("lt", False),
    "operator.le": ("le", False),
    "operator.gt": ("lt", True),
    "operator.ge": ("le", True),
}


def explain_failure(graph: Graph, program: ExportedProgram | None, error: BaseException) -> str:
    """Return why a stage could not be converted: the operators without an ONNX form, each with the modules that call it.

    If there are none, or the capture failed, so that there is no program, it is the first cause of the exception.
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
    if isinstance(error, NoOnnxFormError):
        # torch adds the node and its place in the code.
        return f"no ONNX form of {str(error).partition(chr(10))[0]}"
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


def convert_stage(bundle: Bundle, stage_number: int, allow_ops: Collection[str]) -> OnnxFiles | str:
    """Convert a stage with torch's ONNX exporter."""
    _, graph, targets = read_parts(bundle, stage_number, Loading(options=LoadOptions(allow_ops=allow_ops)))
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
    # Warnings of torch's exporter and its libraries are for their own developers.
    with (
        only_errors_logged(*_EXPORTER_LOGGERS),
        warnings.catch_warnings(action="ignore"),
        sequences_of_any_length(_LAYERS_IN_ONNX),
        onnx_decompositions(DECOMPOSITIONS),
        constants_matched_exactly(),
    ):
        try:
            program = trace_stage(module, graph, targets, tensors, writes)
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert converted is not None
            return finish_model(converted.model, graph, writes, stage_place)
        except Exception as error:  # noqa: BLE001 - torch, its exporter and their libraries raise any class
            return explain_failure(graph, program, error)


def model_file(stage: Stage) -> str:
    """Return the name of the ONNX file of a stage: the name of its graph, with another suffix."""
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


def lost_assertion(graph: Graph, guards: Collection[Guard]) -> str | None:
    """Return what a stage asserts and ONNX cannot; None where all that it asserts is a guard, or holds for all inputs."""
    nodes = [*graph.nodes, *(node for subgraph in graph.subgraphs for node in subgraph.nodes)]
    scalars = _Scalars(graph)
    for node in nodes:
        operator_name = graph.ops[node.op].name
        if operator_name in _ASSERTIONS and not scalars.is_needless(node, operator_name, guards):
            path = graph.scopes[node.scope].path or "the model itself"
            message = f" ({node.args[1]})" if len(node.args) > 1 and isinstance(node.args[1], str) else ""
            return f"no ONNX form of {operator_name} in {path}{message}"
    return None


class _Scalars:
    """The symbolic scalars of a stage: the nodes that define them, and their dimensions."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._definitions = {value.name: node for node in graph.nodes for value in filter(None, node.outputs)}
        self._dims = {value.name: value.expr for node in graph.nodes for value in filter(None, node.outputs)}
        self._dims |= {value.name: value.expr for value in graph.inputs}
        self._symbols = {symbol.name: symbol for symbol in graph.symbols}
        # The range of an integer that depends on data is what the assertions check.
        self._input_symbols = [symbol for symbol in graph.symbols if symbol.example is not None]

    def is_needless(self, node: Node, operator_name: str, guards: Collection[Guard]) -> bool:
        """Whether what a node asserts is a guard, or always holds."""
        if operator_name in _RANGE_ASSERTIONS:
            bounds = dict(zip(("size", "min", "max"), node.args, strict=False)) | dict(node.kwargs)
            return bounds.get("max") is None and self._is_at_most(bounds.get("min") or 0, bounds["size"])
        asserted = node.args[0] if operator_name == _ASSERTED_SCALAR else None
        definition = self._definition(asserted)
        relation, is_swapped = _RELATIONS.get(self._operator_name(definition), ("", False))
        if definition is None or not relation:
            return False
        lower, upper = definition.args[::-1] if is_swapped else definition.args
        left, right = self._dim(lower), self._dim(upper)
        if left is not None and right is not None:
            guard = Guard(left=left, relation=relation, right=right)
            if guard in guards or is_implied(guard, self._input_symbols):
                return True
        return relation == "le" and self._is_at_most(lower, upper)

    def _is_at_most(self, lower: Argument, upper: Argument) -> bool:
        """Whether an integer is at most another for all inputs."""
        highest, lowest = self._bounds(lower)[1], self._bounds(upper)[0]
        return highest is not None and lowest is not None and highest <= lowest

    def _bounds(self, argument: Argument) -> tuple[int | None, int | None]:
        """The smallest and the largest value of an integer, as far as the ranges of the inputs decide."""
        dim = self._dim(argument)
        if isinstance(dim, int):
            return dim, dim
        symbol = self._symbols.get(dim) if isinstance(dim, str) else None
        if symbol is not None and symbol.example is not None:
            return symbol.min, limits.TENSOR_ELEMENTS if symbol.max is None else symbol.max
        # The range of an integer that depends on data is what the assertions check, but a size is at least 0.
        is_size = self._operator_name(self._definition(argument)) in _SIZES
        return (0, limits.TENSOR_ELEMENTS) if is_size else (None, None)

    def _definition(self, argument: Argument) -> Node | None:
        return self._definitions.get(argument.name) if isinstance(argument, ValueArg) else None

    def _operator_name(self, definition: Node | None) -> str:
        return "" if definition is None else self._graph.ops[definition.op].name

    def _dim(self, argument: Argument) -> Dim | None:
        if isinstance(argument, ValueArg):
            return self._dims.get(argument.name)
        return argument if isinstance(argument, int) and not isinstance(argument, bool) else None
