"""A graph as code to be read: a function a graph and a region, with shapes, and the modules that nodes came from, as comments.

It looks like Python and is not meant to run.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagepack.format.folded import FoldedGraph, Region
from stagepack.format.graph import (
    Argument,
    ComplexArg,
    Context,
    DeviceArg,
    DictArg,
    DtypeArg,
    Graph,
    LayoutArg,
    ListArg,
    MemoryFormatArg,
    Node,
    SliceArg,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)
from stagepack.format.shapes import format_shape
from stagepack.format.template import Hole, escape_template, fill_template, parse_template
from stagepack.graph.region_functions import BodyItem, region_functions

_INDENT = "    "


def code(folded: FoldedGraph, graph: Graph, name: str) -> Iterator[str]:
    """Yield the lines of a graph: its subgraphs and regions first, those that others call before them.

    `graph` is the unfolded one. A region has the names of its first place, and takes what its calls have for themselves, such as the
    number of a layer, as `at0`, `at1`.
    """
    printed = _Printed(folded, graph)
    for number, subgraph in enumerate(graph.subgraphs):
        body = printed.function(f"subgraph_{number}", subgraph.inputs, subgraph.nodes, _Names({}, {}))
        yield from [*body, f"{_INDENT}return {_text(subgraph.result, {})}", ""]
    for number, region in enumerate(printed.regions):
        yield from [f"# {region.calls} times", *printed.region(number), ""]
    names = _Names(printed.weights, {})
    yield from printed.function(name, graph.inputs, printed.steps(printed.items, names), names)
    yield f"{_INDENT}return {', '.join(names.weights.get(output, output) for output in graph.outputs) or None}"


@dataclass(frozen=True, slots=True)
class _Names:
    """How weights and the paths of modules are written in a function."""

    weights: Mapping[str, str]
    paths: Mapping[str, str]


class _Printed:
    """A graph and its regions, to be printed."""

    def __init__(self, folded: FoldedGraph, graph: Graph) -> None:
        self.folded = folded
        self.graph = graph
        self.items, self.regions = region_functions(folded, graph)
        self.weights = {weight.value: f"weights[{weight.names[0]!r}]" for weight in graph.weights}
        made = (value for node in graph.nodes for value in node.outputs if value is not None)
        self.types = {value.name: value for value in (*graph.inputs, *made)}

    def region(self, number: int) -> Iterator[str]:
        """Yield the function of a region."""
        region, held = self.regions[number], self.folded.regions[number]
        start, texts = region.first.start, region.first.texts
        own = {fill_template(weight.value, texts): f"weights[{_formatted(weight.names[0])}]" for weight in held.weights}
        names = _Names(
            self.weights | own, {fill_template(scope.path, texts): _holes(scope.path) for scope in held.scopes}
        )
        given = [self.types[name] for name in region.taken(self.graph, start) if name not in self.weights]
        steps = self.steps(region.items, names)
        yield from self.function(f"region_{number}", given, steps, names, [f"at{hole}" for hole in _shown(held)])
        yield f"{_INDENT}return {', '.join(region.given(self.graph, start))}"

    def steps(self, items: Iterable[BodyItem], names: _Names) -> Iterator[Node | str]:
        """Yield nodes, and calls of regions as text."""
        for item in items:
            if isinstance(item, int):
                yield self.graph.nodes[item]
                continue
            region = self.regions[item.region]
            given = [name for name in region.taken(self.graph, item.start) if name not in names.weights]
            given += [f"at{hole}={item.texts[hole]!r}" for hole in _shown(self.folded.regions[item.region])]
            made = region.given(self.graph, item.start)
            types = ", ".join(_type(self.types[name]) for name in made)
            yield f"{', '.join(made)} = region_{item.region}({', '.join(given)})  # {types}"

    def function(
        self, name: str, inputs: Sequence[Value], steps: Iterable[Node | str], names: _Names, places: Sequence[str] = ()
    ) -> Iterator[str]:
        """Yield the head of a function and its steps."""
        graph = self.graph
        yield f"def {name}({'' if inputs or places else '):'}"
        yield from (f"{_INDENT}{value.name},  # {_type(value)}" for value in inputs)
        yield from (f"{_INDENT}{place}," for place in places)
        if inputs or places:
            yield "):"
        regions: list[int] = []
        scope: int | None = None
        for node in steps:
            if isinstance(node, str):
                yield _INDENT + node
                regions, scope = [], None
                continue
            chain = _chain(graph.contexts, node.context)
            shared = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(regions, chain, strict=False))
            )
            for depth in range(shared, len(chain)):
                yield f"{_INDENT * (depth + 1)}with {_region(graph.contexts[chain[depth]])}:"
            indent = _INDENT * (len(chain) + 1)
            if node.scope != scope or chain != regions:
                found = graph.scopes[node.scope]
                path = names.paths.get(found.path, found.path)
                yield f"{indent}# {path or 'the model'}" + (f" ({found.type})" if found.type else "")
            regions, scope = chain, node.scope
            yield indent + _call(graph, node, names.weights)


def _shown(region: Region) -> list[int]:
    """The holes of a region that weights and modules have: those of values are seen from the values themselves."""
    texts = [name for weight in region.weights for name in weight.names] + [scope.path for scope in region.scopes]
    return sorted({part.text_index for text in texts for part in parse_template(text) if isinstance(part, Hole)})


def _holes(template: str, literal: Callable[[str], str] = str) -> str:
    """A template with names for its holes; `literal` writes what stands between them."""
    return "".join(
        f"{{at{part.text_index}{f'{part.increment:+d}' * bool(part.increment)}}}"
        if isinstance(part, Hole)
        else literal(part)
        for part in parse_template(template)
    )


def _formatted(template: str) -> str:
    """The text of Python for a template."""
    if any(isinstance(part, Hole) for part in parse_template(template)):
        return f"f{_holes(template, escape_template)!r}"
    return repr(_holes(template))


def _call(graph: Graph, node: Node, weights: Mapping[str, str]) -> str:
    given = [_text(argument, weights) for argument in node.args]
    given += [f"{name}={_text(argument, weights)}" for name, argument in node.kwargs]
    call = f"{graph.ops[node.op].name}({', '.join(given)})"
    made = [value for value in node.outputs if value is not None]
    if not made:
        return call
    names = ", ".join("_" if value is None else value.name for value in node.outputs)
    return f"{names}{',' if node.unpack and len(node.outputs) == 1 else ''} = {call}  # {', '.join(map(_type, made))}"


def _type(value: Value) -> str:
    return f"{value.dtype}{format_shape(value.shape)}"


def _chain(contexts: Sequence[Context], index: int | None) -> list[int]:
    """The regions that a node lies in, the outermost first."""
    chain: list[int] = []
    while index is not None:
        chain.insert(0, index)
        index = contexts[index].parent
    return chain


def _region(context: Context) -> str:
    if context.autocast is not None:
        region = context.autocast
        device = "device" if region.device is None else repr(region.device)
        cache = "" if region.cache else ", cache_enabled=False"
        return f"autocast({device}, dtype={region.dtype}, enabled={region.enabled}{cache})"
    return "enable_grad()" if context.grad else "no_grad()"


def _text(argument: Argument, weights: Mapping[str, str]) -> str:
    """An argument as it would stand in Python."""
    match argument:
        case ValueArg(name):
            return weights.get(name, name)
        case ListArg(items):
            return f"[{', '.join(_text(item, weights) for item in items)}]"
        case TupleArg(items):
            return f"({', '.join(_text(item, weights) for item in items)}{',' if len(items) == 1 else ''})"
        case DictArg(items):
            return "{" + ", ".join(f"{key!r}: {_text(item, weights)}" for key, item in items) + "}"
        case SliceArg(start, stop, step):
            return f"slice({', '.join(_text(part, weights) for part in (start, stop, step))})"
        case ComplexArg(real, imag):
            return repr(complex(real, imag))
        case DtypeArg(name) | LayoutArg(name) | MemoryFormatArg(name):
            return name
        case DeviceArg(name):
            return "device" if name is None else repr(name)
        case SubgraphArg(index):
            return f"subgraph_{index}"
        case _:
            return repr(argument)
