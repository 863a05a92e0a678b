"""A graph as code to be read: a function a graph, with shapes, and the modules that nodes came from, as comments.

It looks like Python and is not meant to run.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

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

_INDENT = "    "


def code(graph: Graph, name: str) -> Iterator[str]:
    """Yield the lines of a graph: its subgraphs first, those that others call before them."""
    weights = {weight.value: f"weights[{weight.names[0]!r}]" for weight in graph.weights}
    for number, subgraph in enumerate(graph.subgraphs):
        yield from _function(graph, f"subgraph_{number}", subgraph.inputs, subgraph.nodes, {})
        yield f"{_INDENT}return {_text(subgraph.result, {})}"
        yield ""
    yield from _function(graph, name, graph.inputs, graph.nodes, weights)
    yield f"{_INDENT}return {', '.join(weights.get(output, output) for output in graph.outputs) or None}"


def _function(
    graph: Graph, name: str, inputs: Sequence[Value], nodes: Sequence[Node], weights: Mapping[str, str]
) -> Iterator[str]:
    yield f"def {name}({'' if inputs else '):'}"
    for value in inputs:
        yield f"{_INDENT}{value.name},  # {_type(value)}"
    if inputs:
        yield "):"
    regions: list[int] = []
    scope: int | None = None
    for node in nodes:
        chain = _chain(graph.contexts, node.context)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(regions, chain, strict=False)))
        for depth in range(shared, len(chain)):
            yield f"{_INDENT * (depth + 1)}with {_region(graph.contexts[chain[depth]])}:"
        indent = _INDENT * (len(chain) + 1)
        if node.scope != scope or chain != regions:
            found = graph.scopes[node.scope]
            yield f"{indent}# {found.path or 'the model'}" + (f" ({found.type})" if found.type else "")
        regions, scope = chain, node.scope
        yield indent + _call(graph, node, weights)


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
