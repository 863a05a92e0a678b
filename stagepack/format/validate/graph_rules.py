"""The rules on a graph (SPEC section 7, all but G9 and G14)."""

import functools
import itertools
from collections.abc import Iterator, Sequence

from msgspec.msgpack import encode

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.graph import (
    Argument,
    Context,
    DeviceArg,
    DictArg,
    DtypeArg,
    Graph,
    LayoutArg,
    ListArg,
    MemoryFormatArg,
    ModuleCall,
    Node,
    Op,
    SliceArg,
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)
from stagepack.format.operator_schema import schema_effects, schema_parameters
from stagepack.format.operators import is_denied_operator, is_operator_name, is_random_operator
from stagepack.format.rules import (
    DECIMAL_PATTERN,
    WORD_PATTERN,
    BrokenRule,
    format_names,
    is_identifier,
)
from stagepack.format.traversal import child_arguments, sort_module_calls, subgraph_indices
from stagepack.format.validate.graph_weight_rules import check_graph_weights
from stagepack.format.validate.types import check_depth, check_signature, check_symbols, check_type

# Arguments without a rule.
_PLAIN = frozenset({int, float, bool, str, type(None)})


def check_graph(graph: Graph, file_name: str) -> Iterator[Problem]:
    """Yield the problems of a graph by itself: the rules G, S and T."""
    for rule, location, message in _check(graph):
        yield Problem(rule=rule, where=f"{file_name}: {location}", message=message)


def _check(graph: Graph) -> Iterator[BrokenRule]:
    yield from check_symbols(graph.symbols)
    types = _Types({symbol.name for symbol in graph.symbols})
    yield from _check_ops(graph.ops)
    yield from _check_contexts(graph.contexts)
    for scope_index, scope in enumerate(graph.scopes):
        if max(len(scope.path), len(scope.type)) > limits.NAME_CHARACTERS:
            yield "L1", f"scope {scope_index}", "the name is too long"
    defined: set[str] = set()
    for value in graph.inputs:
        yield from _check_definition(value, types, defined, "input")
    yield from check_graph_weights(graph.weights, defined)
    for subgraph_index, subgraph in enumerate(graph.subgraphs):
        yield from _check_body(graph, subgraph, types, set(), subgraph_index, f"subgraph {subgraph_index} ")
    yield from _check_subgraph_calls(graph)
    yield from _check_body(graph, graph, types, defined, len(graph.subgraphs), "")
    for output_name in graph.outputs:
        if output_name not in defined:
            yield "G3", "outputs", f"{output_name[:80]!r} is not defined"
    yield from _check_module_calls(graph.calls)


def _check_module_calls(calls: tuple[ModuleCall, ...]) -> Iterator[BrokenRule]:
    seen: set[str] = set()
    nesting_checkable = True
    for call in calls:
        location = _call_location(call)
        if max(len(call.path), len(call.type)) > limits.NAME_CHARACTERS:
            yield "L1", location, "the name is too long"
        if not all(call.path.split(".")) or call.path in seen:
            yield "G15", location, "the path has an empty part, or is a duplicate"
        seen.add(call.path)
        if not DECIMAL_PATTERN.fullmatch(call.first) or call.nodes < 1:
            nesting_checkable = False
            yield "G15", location, f"{call.first[:80]!r} is not the position of a node, or it has {call.nodes} nodes"
        if call.signature is not None:
            depth_problems = list(check_depth(call.signature, location))
            yield from depth_problems or check_signature(call.signature, location)
    if nesting_checkable:
        yield from _check_call_nesting(calls)


def _check_call_nesting(calls: tuple[ModuleCall, ...]) -> Iterator[BrokenRule]:
    enclosing_ends: list[int] = []
    for call in sort_module_calls(calls):
        first, end = int(call.first), int(call.first) + call.nodes
        while enclosing_ends and enclosing_ends[-1] <= first:
            enclosing_ends.pop()
        if enclosing_ends and enclosing_ends[-1] < end:
            yield "G15", _call_location(call), "it overlaps another module call, and neither contains the other"
        enclosing_ends.append(end)
        if len(enclosing_ends) > limits.NESTING_DEPTH:
            yield "L2", _call_location(call), f"module calls are nested deeper than {limits.NESTING_DEPTH}"
            break


def _call_location(call: ModuleCall) -> str:
    return f"call of {call.path[:80]!r}"


def _check_contexts(contexts: tuple[Context, ...]) -> Iterator[BrokenRule]:
    depths: list[int] = []
    for context_index, context in enumerate(contexts):
        location = f"context {context_index}"
        parent_exists = context.parent is None or 0 <= context.parent < context_index
        if not parent_exists or (context.grad is None) == (context.autocast is None):
            yield (
                "G5",
                location,
                "the parent is not an earlier context, or not exactly one of grad and autocast is given",
            )
        words = () if context.autocast is None else (context.autocast.dtype, context.autocast.device or "own")
        if not all(WORD_PATTERN.fullmatch(word) for word in words):
            yield "G13", location, "the dtype or the device of autocast is not a name"
        depths.append(1 + (depths[context.parent] if parent_exists and context.parent is not None else 0))
        if depths[-1] > limits.NESTING_DEPTH:
            yield "L2", location, f"contexts are nested deeper than {limits.NESTING_DEPTH}"


def _check_subgraph_calls(graph: Graph) -> Iterator[BrokenRule]:
    """Yield the problems of calls of subgraphs: how deep they are, and how many nodes they come to. G6 reports wrong indices."""
    if not graph.subgraphs:
        return
    depths: list[int] = []
    node_counts: list[int] = []
    bodies: list[Graph | Subgraph] = [*graph.subgraphs, graph]
    for subgraph_index, body in enumerate(bodies):
        location = f"subgraph {subgraph_index}" if isinstance(body, Subgraph) else "nodes"
        called = [callee for node in body.nodes for callee in subgraph_indices(node) if 0 <= callee < subgraph_index]
        depths.append(max((depths[callee] for callee in called), default=0) + isinstance(body, Subgraph))
        if depths[-1] > limits.NESTING_DEPTH:
            yield "L2", location, f"calls of subgraphs are nested deeper than {limits.NESTING_DEPTH}"
        called_nodes = sum(node_counts[callee] for callee in called)
        if called_nodes > limits.UNFOLDED_ITEMS:
            yield "L1", location, f"the calls of subgraphs come to more than {limits.UNFOLDED_ITEMS} nodes"
        # One more than the limit is as good as any number: numbers that double in each subgraph are large.
        node_counts.append(min(len(body.nodes) + called_nodes, limits.UNFOLDED_ITEMS + 1))


def _check_ops(ops: tuple[Op, ...]) -> Iterator[BrokenRule]:
    seen: set[str] = set()
    for op_index, op in enumerate(ops):
        location = f"op {op_index}"
        if op.name in seen:
            yield "G12", location, f"duplicate operator {op.name[:80]!r}"
        seen.add(op.name)
        # The cache keeps no large operators of strangers.
        if len(encode(op)) > limits.SCHEMA_CHARACTERS or not _is_sound_op(op):
            yield from _check_op(op, location)


@functools.lru_cache(maxsize=1024)
def _is_sound_op(op: Op) -> bool:
    """Whether an operator breaks no rule by itself. The stages of a bundle have mostly the same operators."""
    return next(_check_op(op, ""), None) is None


def _check_op(op: Op, location: str) -> Iterator[BrokenRule]:
    if not is_operator_name(op.name) or len(op.name) > limits.NAME_CHARACTERS:
        yield "G10", location, f"{op.name[:80]!r} is not the name of an operator"
    elif is_denied_operator(op.name):
        yield "G11", location, f"{op.name} is not allowed in a bundle"
    if len(op.schema) > limits.SCHEMA_CHARACTERS:
        message = f"expected a schema of at most {limits.SCHEMA_CHARACTERS} characters, found {len(op.schema)}"
        yield "L1", location, f"{op.name[:80]}: {message}"
    parameters = set(op.parameters)
    named = (*op.mutates, *(parameter for _, parameter in op.aliases))
    if len(parameters) != len(op.parameters) or not parameters.issuperset(named):
        yield "G12", location, f"{op.name[:80]}: duplicate parameter, or mutates or aliases name an unknown one"
    if any(result_index < 0 for result_index, _ in op.aliases):
        yield "G12", location, f"{op.name[:80]}: aliases name a negative result"
    yield from _check_schema_facts(op, location)


def _check_schema_facts(op: Op, location: str) -> Iterator[BrokenRule]:
    """Yield where the facts of an operator contradict the list of operators, or its schema, which loaders compare with their torch's."""
    if not op.random and is_random_operator(op.name):
        yield "G12", location, f"{op.name[:80]}: random is false, and the operator draws random numbers"
    expected = schema_parameters(op.schema) if op.schema else None
    if expected not in (None, op.parameters):
        yield "G12", location, f"{op.name[:80]}: expected the parameters of its schema, {format_names(expected or ())}"
    effects = schema_effects(op.schema) if op.schema else None
    if effects is None:
        return
    if set(op.mutates) != effects.mutates:
        message = f"mutates is {sorted(op.mutates)}, expected {sorted(effects.mutates)} by its schema"
        yield "G12", location, f"{op.name[:80]}: {message}"[:400]
    stated = set(op.aliases)
    missing = itertools.islice((alias for alias in effects.aliases() if alias not in stated), 10)
    if shown := sorted(set(missing)):
        message = f"aliases has no {shown}, which its schema states"
        yield "G12", location, f"{op.name[:80]}: {message}"[:400]


class _Types:
    """The types of values. A graph has few, each many times: a type in which no problem was found is not checked again."""

    def __init__(self, symbols: set[str]) -> None:
        self._symbols = symbols
        self._sound: set[object] = set()

    def check(self, value: Value) -> Sequence[BrokenRule]:
        key = value.dtype, value.shape, value.expr
        if key in self._sound:
            return ()
        problems = list(check_type(value, self._symbols, "G7", f"value {value.name[:80]}"))
        if not problems:
            self._sound.add(key)
        return problems


def _check_definition(value: Value, types: _Types, defined: set[str], location: str) -> Sequence[BrokenRule]:
    """Return the problems of a value that an input or a node defines, and add its name to `defined`."""
    problems: list[BrokenRule] = []
    if not is_identifier(value.name):
        problems.append(("G1", location, f"{value.name[:80]!r} is not an identifier"))
    if value.name in defined:
        problems.append(("G2", location, f"{value.name[:80]!r} is defined twice"))
    defined.add(value.name)
    problems += types.check(value)
    return problems


def _check_body(
    graph: Graph, body: Graph | Subgraph, types: _Types, defined: set[str], callable_below: int, prefix: str
) -> Iterator[BrokenRule]:
    """Yield the problems of the nodes of a graph or a subgraph."""
    if isinstance(body, Subgraph):
        for value in body.inputs:
            yield from _check_definition(value, types, defined, f"{prefix}input")
    for node_index, node in enumerate(body.nodes):
        location = f"{prefix}node {node_index}"
        # Graphs are large: generators for each node, and for arguments that are most often sound, took half of the time.
        yield from _check_indices(graph, node, location)
        for argument in node.args:
            if not _is_sound(argument, defined):
                yield from _check_argument(argument, defined, callable_below, location)
        for keyword, argument in node.kwargs:
            if not _is_sound(argument, defined):
                yield from _check_argument(argument, defined, callable_below, location)
            if not is_identifier(keyword):
                yield "G1", location, f"the argument name {keyword[:80]!r} is not an identifier"
        yield from _check_node(node, location)
        for output in node.outputs:
            if output is not None:
                yield from _check_definition(output, types, defined, location)
    if isinstance(body, Subgraph):
        yield from _check_argument(body.result, defined, callable_below, f"{prefix}result")


def _check_indices(graph: Graph, node: Node, location: str) -> list[BrokenRule]:
    problems: list[BrokenRule] = []
    if not 0 <= node.op < len(graph.ops):
        problems.append(("G4", location, f"op {node.op} is not in the table"))
    if not 0 <= node.scope < len(graph.scopes):
        problems.append(("G4", location, f"scope {node.scope} is not in the table"))
    if node.context is not None and not 0 <= node.context < len(graph.contexts):
        problems.append(("G4", location, f"context {node.context} is not in the table"))
    return problems


def _check_node(node: Node, location: str) -> list[BrokenRule]:
    problems: list[BrokenRule] = []
    if not node.unpack and len(node.outputs) > 1:
        problems.append(("G8", location, "several outputs without unpack"))
    if node.kwargs and len({keyword for keyword, _ in node.kwargs}) != len(node.kwargs):
        problems.append(("G8", location, "duplicate keyword argument"))
    if node.cost.flops < 0 or node.cost.bytes < 0:
        problems.append(("G8", location, "a cost is negative"))
    return problems


def _is_sound(argument: Argument, defined: set[str]) -> bool:
    """Whether an argument is a defined value, or one without a rule."""
    return argument.name in defined if type(argument) is ValueArg else type(argument) in _PLAIN


def _check_argument(
    argument: Argument, defined: set[str], callable_below: int, location: str, depth: int = 0
) -> Iterator[BrokenRule]:
    if depth > limits.NESTING_DEPTH:
        yield "L2", location, f"arguments are nested deeper than {limits.NESTING_DEPTH}"
    elif isinstance(argument, ValueArg):
        if argument.name not in defined:
            yield "G3", location, f"uses {argument.name[:80]!r}, which is not defined before it"
    elif isinstance(argument, (ListArg, TupleArg, DictArg, SliceArg)):
        if isinstance(argument, DictArg) and len({key for key, _ in argument.items}) != len(argument.items):
            yield "G8", location, "duplicate key in a dict"
        for child in child_arguments(argument):
            if depth == limits.NESTING_DEPTH or not _is_sound(child, defined):
                yield from _check_argument(child, defined, callable_below, location, depth + 1)
    elif isinstance(argument, SubgraphArg):
        if not 0 <= argument.index < callable_below:
            yield "G6", location, f"calls subgraph {argument.index}, which is not defined before it"
    elif (
        isinstance(argument, (DtypeArg, LayoutArg, MemoryFormatArg, DeviceArg))
        and argument.name is not None
        and not WORD_PATTERN.fullmatch(argument.name)
    ):
        yield "G13", location, f"{argument.name[:80]!r} is not the name of a dtype, device, layout or memory format"
