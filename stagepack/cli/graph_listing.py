"""A graph as pseudocode: one function for the graph and for each region, with shapes and module paths as comments.

The text has the syntax of Python, but is not meant to run.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagepack.format.folded_graph import Hole, escape_template, fill_template, parse_template
from stagepack.format.graph import (
    Argument,
    ComplexArg,
    Context,
    DeviceArg,
    DictArg,
    DtypeArg,
    FoldedGraph,
    Graph,
    LayoutArg,
    ListArg,
    MemoryFormatArg,
    Node,
    Region,
    SliceArg,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)
from stagepack.format.shapes import format_shape
from stagepack.format.traversal import body_values
from stagepack.graph.region_functions import BodyItem, region_functions

_INDENT = "    "
# A node, or the finished line of a region call.
Statement = Node | str


def graph_lines(folded: FoldedGraph, graph: Graph, function_name: str) -> Iterator[str]:
    """Yield the lines of a graph: its subgraphs and regions first, each before those that call it.

    A region has the value names of its first call. The texts for its holes that occur in the names of weights and modules, such as the
    number of a layer, are its parameters ``at0``, ``at1``.
    """
    listing = _Listing(folded, graph)
    for subgraph_index, subgraph in enumerate(graph.subgraphs):
        yield from listing.function(f"subgraph_{subgraph_index}", subgraph.inputs, subgraph.nodes, _Spelling({}, {}))
        yield from [f"{_INDENT}return {_argument_text(subgraph.result, {})}", ""]
    for region_index, region_function in enumerate(listing.region_functions):
        yield from [f"# called {region_function.call_count} times", *listing.region(region_index), ""]
    spelling = _Spelling(listing.graph_weights, {})
    yield from listing.function(function_name, graph.inputs, listing.statements(listing.body, spelling), spelling)
    results = ", ".join(spelling.weights.get(output, output) for output in graph.outputs)
    yield f"{_INDENT}return {results or None}"


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a function spells weights, by value name, and module paths, by the path in the unfolded graph."""

    weights: Mapping[str, str]
    module_paths: Mapping[str, str]


class _Listing:
    """A graph and its regions, to be listed."""

    def __init__(self, folded: FoldedGraph, graph: Graph) -> None:
        self._folded = folded
        self._graph = graph
        self.body, self.region_functions = region_functions(folded, graph)
        self.graph_weights = {weight.value: f"weights[{weight.names[0]!r}]" for weight in graph.weights}
        self._values = {value.name: value for value in body_values(graph)}

    def region(self, region_index: int) -> Iterator[str]:
        """Yield the lines of the function of a region."""
        region_function, region = self.region_functions[region_index], self._folded.regions[region_index]
        start, hole_texts = region_function.first_call.start, region_function.first_call.hole_texts
        region_weights = {
            fill_template(weight.value, hole_texts): f"weights[{_name_expression(weight.names[0])}]"
            for weight in region.weights
        }
        spelling = _Spelling(
            self.graph_weights | region_weights,
            {fill_template(scope.path, hole_texts): _named_holes(scope.path) for scope in region.scopes},
        )
        inputs = [
            self._values[value_name]
            for value_name in region_function.input_names(self._graph, start)
            if value_name not in self.graph_weights
        ]
        statements = self.statements(region_function.items, spelling)
        hole_parameters = [f"at{hole}" for hole in _listed_holes(region)]
        yield from self.function(f"region_{region_index}", inputs, statements, spelling, hole_parameters)
        yield f"{_INDENT}return {', '.join(region_function.output_names(self._graph, start))}"

    def statements(self, body: Iterable[BodyItem], spelling: _Spelling) -> Iterator[Statement]:
        """Yield the nodes of a body, and its region calls as lines."""
        for item in body:
            if isinstance(item, int):
                yield self._graph.nodes[item]
                continue
            region_function = self.region_functions[item.region]
            arguments = [
                value_name
                for value_name in region_function.input_names(self._graph, item.start)
                if value_name not in spelling.weights
            ]
            listed_holes = _listed_holes(self._folded.regions[item.region])
            arguments += [f"at{hole}={item.hole_texts[hole]!r}" for hole in listed_holes]
            outputs = region_function.output_names(self._graph, item.start)
            types = ", ".join(_type_text(self._values[value_name]) for value_name in outputs)
            yield f"{', '.join(outputs)} = region_{item.region}({', '.join(arguments)})  # {types}"

    def function(
        self,
        function_name: str,
        inputs: Sequence[Value],
        statements: Iterable[Statement],
        spelling: _Spelling,
        hole_parameters: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield the head and the body of a function, without its return statement."""
        graph = self._graph
        has_parameters = bool(inputs or hole_parameters)
        yield f"def {function_name}({'' if has_parameters else '):'}"
        yield from (f"{_INDENT}{value.name},  # {_type_text(value)}" for value in inputs)
        yield from (f"{_INDENT}{parameter}," for parameter in hole_parameters)
        if has_parameters:
            yield "):"
        open_contexts: list[int] = []
        scope_index: int | None = None
        for statement in statements:
            if isinstance(statement, str):
                yield _INDENT + statement
                open_contexts, scope_index = [], None
                continue
            contexts = _enclosing_contexts(graph.contexts, statement.context)
            pairs = zip(open_contexts, contexts, strict=False)
            shared_count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for depth in range(shared_count, len(contexts)):
                yield f"{_INDENT * (depth + 1)}with {_context_text(graph.contexts[contexts[depth]])}:"
            indent = _INDENT * (len(contexts) + 1)
            if statement.scope != scope_index or contexts != open_contexts:
                scope = graph.scopes[statement.scope]
                path = spelling.module_paths.get(scope.path, scope.path)
                yield f"{indent}# {path or 'the model'}" + (f" ({scope.type})" if scope.type else "")
            open_contexts, scope_index = contexts, statement.scope
            yield indent + _node_text(graph, statement, spelling.weights)


def _listed_holes(region: Region) -> list[int]:
    """Return the holes in the names of weights and modules; those in value names show in the values themselves."""
    templates = [weight_name for weight in region.weights for weight_name in weight.names]
    templates += [scope.path for scope in region.scopes]
    return sorted(
        {piece.text_index for template in templates for piece in parse_template(template) if isinstance(piece, Hole)}
    )


def _named_holes(template: str, spell_literal: Callable[[str], str] = str) -> str:
    """Return a template with ``{at0}`` for its hole 0, as in an f-string."""
    return "".join(
        f"{{at{piece.text_index}{f'{piece.increment:+d}' * bool(piece.increment)}}}"
        if isinstance(piece, Hole)
        else spell_literal(piece)
        for piece in parse_template(template)
    )


def _name_expression(template: str) -> str:
    """Return a template as a Python expression: an f-string if it has holes."""
    if any(isinstance(piece, Hole) for piece in parse_template(template)):
        return f"f{_named_holes(template, escape_template)!r}"
    return repr(_named_holes(template))


def _node_text(graph: Graph, node: Node, weights: Mapping[str, str]) -> str:
    """Return the line of a node."""
    arguments = [_argument_text(argument, weights) for argument in node.args]
    arguments += [f"{parameter}={_argument_text(argument, weights)}" for parameter, argument in node.kwargs]
    call = f"{graph.ops[node.op].name}({', '.join(arguments)})"
    outputs = [value for value in node.outputs if value is not None]
    if not outputs:
        return call
    targets = ", ".join("_" if value is None else value.name for value in node.outputs)
    trailing_comma = "," if node.unpack and len(node.outputs) == 1 else ""
    return f"{targets}{trailing_comma} = {call}  # {', '.join(map(_type_text, outputs))}"


def _type_text(value: Value) -> str:
    return f"{value.dtype}{format_shape(value.shape)}"


def _enclosing_contexts(contexts: Sequence[Context], context_index: int | None) -> list[int]:
    """Return a context and the contexts around it, the outermost first."""
    enclosing: list[int] = []
    while context_index is not None:
        enclosing.insert(0, context_index)
        context_index = contexts[context_index].parent
    return enclosing


def _context_text(context: Context) -> str:
    autocast = context.autocast
    if autocast is None:
        return "enable_grad()" if context.grad else "no_grad()"
    device = "device" if autocast.device is None else repr(autocast.device)
    cache = "" if autocast.cache else ", cache_enabled=False"
    return f"autocast({device}, dtype={autocast.dtype}, enabled={autocast.enabled}{cache})"


def _argument_text(argument: Argument, weights: Mapping[str, str]) -> str:
    """Return an argument as it would be written in Python."""
    match argument:
        case ValueArg(value_name):
            return weights.get(value_name, value_name)
        case ListArg(items):
            return f"[{_joined(items, weights)}]"
        case TupleArg(items):
            return f"({_joined(items, weights)}{',' if len(items) == 1 else ''})"
        case DictArg(items):
            return "{" + ", ".join(f"{key!r}: {_argument_text(item, weights)}" for key, item in items) + "}"
        case SliceArg(start, stop, step):
            return f"slice({_joined((start, stop, step), weights)})"
        case ComplexArg(real, imag):
            return repr(complex(real, imag))
        case DtypeArg(constant) | LayoutArg(constant) | MemoryFormatArg(constant):
            return constant
        case DeviceArg(device):
            return "device" if device is None else repr(device)
        case SubgraphArg(subgraph_index):
            return f"subgraph_{subgraph_index}"
        case _:
            return repr(argument)


def _joined(arguments: Sequence[Argument], weights: Mapping[str, str]) -> str:
    return ", ".join(_argument_text(argument, weights) for argument in arguments)
