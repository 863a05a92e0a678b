"""`torch.export.ExportedProgram` -> `Graph`, with the calls of modules.

Two things change, and nothing else. Nodes that run under another grad mode or autocast move from graph modules of their own into the list,
and get the context as a property. Results of operators that return several get names in the place of ``getitem`` nodes.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.capture.programs import Capture
from stagepack.capture.traced_calls import CallBoundary, TracedCall, TracedCalls, call_boundaries
from stagepack.errors import UnsupportedError, first_line
from stagepack.format.graph import Argument, Graph, ModuleCall, Scope, ValueArg
from stagepack.format.rules import split_call_path
from stagepack.format.shapes import Dim, Guard
from stagepack.format.traversal import child_arguments
from stagepack.format.tree import UNUSED_VALUE, Signature
from stagepack.graph.analysis import GraphAnalysis
from stagepack.linearize.body import BodyBuilder, FxValue
from stagepack.linearize.conditions import program_conditions
from stagepack.linearize.declared_sizes import DeclaredSizes, declared_sizes
from stagepack.linearize.guards import program_guards
from stagepack.linearize.op_tables import Tables, module_stack, with_node_location
from stagepack.linearize.program_tensors import constant_argument, program_tensors
from stagepack.linearize.signature import SignatureLeaf, call_signature, program_signature
from stagepack.linearize.symbols import SymbolTable, TracedSymbol
from stagepack.linearize.weight_table import WeightTable, weight_table
from stagepack.torch_internals import asserted_conditions, is_vmap_boundary

# Calls with more leaves get no signature: a cache of all layers is an argument of each of them.
_MAX_LEAVES = 64
_WEIGHT_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def module_calls(body: BodyBuilder, traced_calls: TracedCalls) -> Iterator[ModuleCall]:
    """Yield the calls of modules whose nodes follow one another."""
    positions: dict[Scope, list[int]] = {}
    for position, source in enumerate(body.sources):
        for scope in module_stack(source):
            positions.setdefault(scope, []).append(position)
    signatures = _CallSignatures(body)
    for scope, call_positions in positions.items():
        first, last = call_positions[0], call_positions[-1]
        if not scope.path or last - first + 1 != len(call_positions):
            continue
        numbered_call = traced_calls.numbered_calls.get(split_call_path(scope.path))
        signature = None if numbered_call is None else signatures.signature(*numbered_call)
        yield ModuleCall(
            path=scope.path, type=scope.type, first=str(first), nodes=len(call_positions), signature=signature
        )


class _CallSignatures:
    """Signatures of module calls, in terms of the values of a program."""

    def __init__(self, body: BodyBuilder) -> None:
        self._symbols = body.tables.symbols
        self._crossing: Mapping[CallBoundary, FxValue] = {
            boundary: argument for node, argument in body.arguments.items() for boundary in call_boundaries(node)
        }
        self._size_values: dict[Dim, str] = {}
        node_outputs = (value for node in body.nodes for value in node.outputs if value is not None)
        for value in (*body.inputs, *node_outputs):
            if value.expr is not None:
                self._size_values.setdefault(value.expr, value.name)

    def signature(self, call_number: int, call: TracedCall) -> Signature | None:
        """The signature of a call; None if a bundle cannot hold it."""
        if len(call.arguments) + len(call.results) > _MAX_LEAVES:
            return None
        arguments = self._leaves(call.arguments, call_number, "argument")
        results = self._leaves(call.results, call_number, "result")
        try:
            return call_signature(call, arguments, results)
        except UnsupportedError:
            return None

    def _leaves(
        self, traced: Sequence[Any], call_number: int, direction: Literal["argument", "result"]
    ) -> list[SignatureLeaf]:
        return [
            self._leaf(leaf, self._crossing.get((call_number, direction, leaf_index)))
            for leaf_index, leaf in enumerate(traced)
        ]

    def _leaf(self, traced: Any, argument: FxValue) -> SignatureLeaf:
        """The value or the constant that a leaf of the trace is; a value that the graph lacks has the name for unused ones."""
        if isinstance(traced, torch.Tensor):
            return argument.name if isinstance(argument, ValueArg) else UNUSED_VALUE
        if isinstance(traced, torch.SymInt):
            size = self._symbols.exact_dim(traced)
            return UNUSED_VALUE if size is None else self._size_values.get(size, UNUSED_VALUE)
        return ConstantArgument(name="", value=traced)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizedProgram:
    """A captured program as data."""

    graph: Graph
    signature: Signature
    # What the program returns, in order. The tree of the signature may have more leaves: constants in objects that it returns.
    result_leaves: tuple[SignatureLeaf, ...]
    # The conditions on its dynamic sizes.
    guards: tuple[Guard, ...]
    weights: WeightTable
    # The positions of the nodes before which ``split_here`` was called.
    split_positions: tuple[int, ...]
    # The type of the device that the program was captured on.
    device: str
    exported: ExportedProgram
    # The fx node that each node of the graph was made of.
    sources: tuple[FxNode, ...]
    # What torch has for each symbol of the graph, by name.
    traced_symbols: Mapping[str, TracedSymbol]
    # What the caller said about the sizes of its inputs.
    declared: DeclaredSizes

    def with_constant_prefix(self, prefix: str) -> "LinearizedProgram":
        """Return the program with other names of its constants, which torch numbers in each program."""
        return self._with_weights(self.weights.with_constant_prefix(prefix))

    def without_unused_weights(self) -> "LinearizedProgram":
        """Return the program with only the weights that its nodes use or that it returns."""
        return self._with_weights(self.weights.of_values(GraphAnalysis(self.graph).last_uses.keys()))

    def _with_weights(self, weights: WeightTable) -> "LinearizedProgram":
        return dataclasses.replace(
            self, weights=weights, graph=msgspec.structs.replace(self.graph, weights=weights.weights)
        )


def linearize_program(capture: Capture) -> LinearizedProgram:
    """Turn a captured program into data."""
    program = _without_vmap(capture.program)
    _check_tensors(program)
    tensors = program_tensors(program)
    weights = weight_table(tensors.tensors, store_zeros=capture.is_pretrained, deferred=capture.deferred)
    declared = declared_sizes(capture)
    symbols = SymbolTable(program, declared.names, {name: asked.smallest for name, asked in declared.requests.items()})
    body, input_leaves = _bound_body(program, Tables(symbols, tensors.device, weights.values, tensors.inner_constants))
    try:
        body.build()
    except UnsupportedError as error:
        raise UnsupportedError(with_node_location(str(error), body.tables.current_node)) from None
    result_leaves = _result_leaves(program, body)
    graph = _graph(body, weights, result_leaves, capture.calls)
    signature = program_signature(program, input_leaves, result_leaves, capture.model)
    conditions = [*program_conditions(capture.program)]
    if program is not capture.program:
        conditions += program_conditions(program)
    return LinearizedProgram(
        graph=graph,
        signature=signature,
        result_leaves=tuple(result_leaves),
        guards=program_guards(conditions, asserted_conditions(program), symbols, body.inputs),
        weights=weights,
        split_positions=tuple(body.tables.split_positions),
        device=tensors.device,
        exported=program,
        sources=tuple(body.sources),
        traced_symbols=symbols.traced_symbols,
        declared=declared,
    )


def _graph(
    body: BodyBuilder, weights: WeightTable, result_leaves: Sequence[SignatureLeaf], traced_calls: TracedCalls
) -> Graph:
    tables = body.tables
    # First, since signatures of calls may have symbols that no node has.
    calls = tuple(module_calls(body, traced_calls))
    return Graph(
        symbols=tables.symbols.symbols,
        inputs=tuple(body.inputs),
        weights=weights.weights,
        nodes=tuple(body.nodes),
        outputs=tuple(dict.fromkeys(leaf for leaf in result_leaves if isinstance(leaf, str))),
        subgraphs=tuple(tables.subgraphs),
        ops=tuple(tables.ops),
        scopes=tables.scopes,
        contexts=tables.contexts,
        calls=calls,
    )


def _without_vmap(program: ExportedProgram) -> ExportedProgram:
    """The program, decomposed if it has calls that enter and leave levels of ``torch.vmap``."""
    graph_modules = (module for module in program.graph_module.modules() if isinstance(module, GraphModule))
    if any(is_vmap_boundary(node.target) for module in graph_modules for node in module.graph.nodes):
        try:
            program = program.run_decompositions({})
        except RuntimeError as error:
            # torch 2.13 fails where a function that an operator calls holds a constant.
            advice = (
                "make constants in functions that torch.vmap, flex_attention and the like call buffers of the module"
            )
            raise UnsupportedError(
                f"torch cannot decompose the calls of torch.vmap: {first_line(error)}: {advice}"
            ) from error
    return program


def _check_tensors(program: ExportedProgram) -> None:
    """Refuse inputs and results that are sparse, and results on the meta device: stages pass on elements with strides."""
    placeholders = _placeholders(program)
    inputs = [placeholders[name] for name in program.graph_signature.user_inputs if name in placeholders]
    results = program.graph.output_node().all_input_nodes
    for role, verb, nodes in (("input", "take", inputs), ("result", "return", results)):
        for node in nodes:
            value = node.meta.get("val")
            # A program that was captured on the meta device has such inputs, and runs on any device.
            if role == "result" and isinstance(value, torch.Tensor) and value.device.type == "meta":
                raise UnsupportedError(f"the {role} {node.name} has no data: it is on the meta device")
            layout = getattr(value, "layout", torch.strided)
            if layout != torch.strided:
                raise UnsupportedError(
                    f"the {role} {node.name}: expected a tensor with strides, found {layout}: let the model {verb} its indices and values"
                )


def _bound_body(program: ExportedProgram, tables: Tables) -> tuple[BodyBuilder, list[SignatureLeaf]]:
    """The body of a program with its placeholders bound to weights, constants and inputs, and the leaves of the model's arguments."""
    placeholders = _placeholders(program).values()
    body = BodyBuilder(tables, program.graph_module)
    leaves: list[SignatureLeaf] = []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind in _WEIGHT_INPUTS:
            body.bind_weight(node, str(spec.target))
        elif spec.kind == InputKind.TOKEN:
            body.arguments[node] = None
        elif spec.kind != InputKind.USER_INPUT:
            raise UnsupportedError(f"the input {node.name} is a {spec.kind.name}, which a bundle cannot hold")
        elif isinstance(spec.arg, ConstantArgument):
            body.arguments[node] = constant_argument(spec.arg.value, f"the input {node.name}")
            leaves.append(spec.arg)
        else:
            leaves.append(body.add_input(node, node.name))
    return body, leaves


def _result_leaves(program: ExportedProgram, body: BodyBuilder) -> list[SignatureLeaf]:
    """The leaves of the model's result. What a functional program returns to be written into its state is written here."""
    signature = program.graph_signature
    placeholders = _placeholders(program)
    weight_placeholders = {
        str(spec.target): placeholders[spec.arg.name] for spec in signature.input_specs if spec.target is not None
    }
    leaves: list[SignatureLeaf] = []
    for result, spec in zip(child_arguments(body.result), signature.output_specs, strict=True):
        match spec.kind:
            case OutputKind.USER_OUTPUT:
                leaves.append(_result_leaf(result, spec.arg))
            case OutputKind.BUFFER_MUTATION | OutputKind.PARAMETER_MUTATION:
                body.copy_into(weight_placeholders[str(spec.target)], result)
            case OutputKind.USER_INPUT_MUTATION:
                body.copy_into(placeholders[str(spec.target)], result)
            case OutputKind.TOKEN:
                pass
            case _:
                raise UnsupportedError(f"the output {spec.arg.name} is a {spec.kind.name}, which a bundle cannot hold")
    return leaves


def _result_leaf(result: Argument, spec: object) -> SignatureLeaf:
    if isinstance(result, ValueArg):
        return result.name
    if isinstance(spec, TensorArgument | SymIntArgument | SymFloatArgument | SymBoolArgument):
        if isinstance(result, None | bool | int | float | str):
            return ConstantArgument(name="", value=result)
        raise UnsupportedError(f"the output {spec.name} is not a value")
    assert isinstance(spec, ConstantArgument)
    return spec


def _placeholders(program: ExportedProgram) -> dict[str, FxNode]:
    return {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
