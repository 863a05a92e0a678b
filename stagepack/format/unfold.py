"""A graph as its file holds it -> the graph (SPEC F1 to F5)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from stagepack.errors import FormatError, Problem
from stagepack.format.folded import Call, FoldedGraph, Region
from stagepack.format.graph import (
    Argument,
    DictArg,
    Graph,
    ListArg,
    ModuleCall,
    Node,
    Scope,
    SliceArg,
    TupleArg,
    Value,
    ValueArg,
    Weight,
)
from stagepack.format.renaming import names_in_region, names_in_value
from stagepack.format.shapes import Dim, Expr
from stagepack.format.template import TemplateError, fill_template, has_holes
from stagepack.format.traversal import input_names, sort_module_calls

# What a text of a region is at one call.
_Texts = Mapping[str, str]


def unfold_graph(folded: FoldedGraph, where: str = "", *, calls: bool = True) -> Graph:
    """Fill in all calls of regions. `folded` keeps the rules that `validate.check_folded` checks.

    The scopes of a folded graph stand sorted by path and type in the graph; its weights in the order of their first use, and
    after them those that no node uses; its calls of modules in the order of their nodes. Without `calls` these are left out,
    which is faster.

    Raises:
        FormatError: a hole cannot be filled (F5).
    """
    fields = {name: getattr(folded, name) for name in Graph.__struct_fields__}
    if not calls:
        fields["calls"] = ()
    if not folded.regions:
        return Graph(**fields)
    try:
        steps = list(_Steps(folded.regions, calls=calls).of(folded))
        inner = [_call(call, step.texts) for step in steps for call in step.calls] if calls else []
    except TemplateError as error:
        raise FormatError([Problem(rule="F5", where=where, message=str(error))]) from None
    scopes = sorted({*folded.scopes, *(scope for step in steps for scope in step.scopes)}, key=_order)
    number_of = {scope: number for number, scope in enumerate(scopes)}
    nodes: list[Node] = []
    for step in steps:
        numbers = [number_of[scope] for scope in step.scopes]
        nodes += (make(step.texts, numbers) for make in step.makers)
    weights = {
        weight.value: weight for weight in (*folded.weights, *(weight for step in steps for weight in step.weights))
    }
    used = dict.fromkeys(name for node in nodes for name in input_names(node) if name in weights)
    numbers = [number_of[scope] for scope in folded.scopes]
    subgraphs = tuple(
        replace(subgraph, nodes=tuple(replace(node, scope=numbers[node.scope]) for node in subgraph.nodes))
        for subgraph in folded.subgraphs
    )
    fields |= {
        "nodes": tuple(nodes),
        "scopes": tuple(scopes),
        "weights": tuple(weights[name] for name in (*used, *(name for name in weights if name not in used))),
        "subgraphs": subgraphs,
        "calls": sort_module_calls((*fields["calls"], *inner)),
    }
    return Graph(**fields)


def _order(scope: Scope) -> tuple[str, str]:
    return scope.path, scope.type


_Maker = Callable[[_Texts, list[int]], Node]


@dataclass(frozen=True, slots=True)
class _Step:
    """Nodes that follow one another: what makes them of the texts and the numbers of scopes, and what these are here."""

    makers: Sequence[_Maker]
    texts: _Texts
    scopes: list[Scope]
    weights: list[Weight] = field(default_factory=list)
    calls: Sequence[ModuleCall] = ()


class _Steps:
    """The calls of a graph, filled in."""

    def __init__(self, regions: Sequence[Region], *, calls: bool) -> None:
        self._regions = regions
        parts = regions if calls else [replace(region, calls=()) for region in regions]
        self._templates = [sorted(set(names_in_region(region))) for region in parts]
        self._makers = [[_filler(item) for item in region.nodes if isinstance(item, Node)] for region in regions]

    def of(self, folded: FoldedGraph) -> Iterator[_Step]:
        """Yield the nodes of a graph in their order."""
        makers = [_keeper(item) for item in folded.nodes if isinstance(item, Node)]
        return self._body(folded.nodes, makers, list(folded.scopes), {})

    def _body(
        self, items: Sequence[Node | Call], makers: Sequence[_Maker], scopes: list[Scope], texts: _Texts
    ) -> Iterator[_Step]:
        done = nodes = 0
        for item in items:
            if isinstance(item, Node):
                nodes += 1
                continue
            yield _Step(makers[done:nodes], texts, scopes)
            done = nodes
            yield from self._call(item.region, [texts.get(hole, hole) for hole in item.holes])
        yield _Step(makers[done:], texts, scopes)

    def _call(self, number: int, holes: list[str]) -> Iterator[_Step]:
        region = self._regions[number]
        texts = {template: fill_template(template, holes) for template in self._templates[number]}
        yield _Step([], texts, [], [_weight(weight, texts) for weight in region.weights], region.calls)
        scopes = [Scope(path=texts[scope.path], type=scope.type) for scope in region.scopes]
        yield from self._body(region.nodes, self._makers[number], scopes, texts)


def _weight(weight: Weight, texts: _Texts) -> Weight:
    return replace(
        weight,
        value=texts[weight.value],
        names=tuple(texts[name] for name in weight.names),
        base=None if weight.base is None else texts[weight.base],
    )


def _call(call: ModuleCall, texts: _Texts) -> ModuleCall:
    signature = None if call.signature is None else call.signature.renamed(texts.__getitem__)
    return replace(call, path=texts[call.path], first=texts[call.first], signature=signature)


def _keeper(node: Node) -> _Maker:
    """What makes a node of the graph itself, which has no holes."""

    def make(texts: _Texts, scopes: list[int]) -> Node:
        return replace(node, scope=scopes[node.scope])

    return make


def _filler(node: Node) -> _Maker:
    """What makes a node of a region; what has no holes is made once."""
    keys = [key for key, _ in node.kwargs]
    args = _each(map(_argument, node.args), node.args)
    kwargs = _each((_argument(argument) for _, argument in node.kwargs), [argument for _, argument in node.kwargs])
    outputs = _each(map(_value, node.outputs), node.outputs)

    def make(texts: _Texts, scopes: list[int]) -> Node:
        return Node(
            op=node.op,
            args=args(texts),
            kwargs=tuple(zip(keys, kwargs(texts), strict=True)),
            outputs=outputs(texts),
            unpack=node.unpack,
            scope=scopes[node.scope],
            context=node.context,
            cost=node.cost,
        )

    return make


# What makes a part of a node of the texts; None for what is the same at every call.
_Part = Callable[[_Texts], Any] | None


def _each(made: Iterable[_Part], kept: Sequence[Any]) -> Callable[[_Texts], tuple[Any, ...]]:
    """What makes a tuple of parts."""
    pairs = list(zip(made, kept, strict=True))
    if all(make is None for make, _ in pairs):
        same = tuple(kept)
        return lambda _: same
    return lambda texts: tuple([part if make is None else make(texts) for make, part in pairs])


def _same(parts: Iterable[_Part]) -> bool:
    return all(part is None for part in parts)


def _argument(argument: Argument) -> _Part:
    match argument:
        case ValueArg(name) if has_holes(name):
            return lambda texts: ValueArg(texts[name])
        case ListArg(items) | TupleArg(items) if not _same(made := [_argument(item) for item in items]):
            kind, each = type(argument), _each(made, items)
            return lambda texts: kind(each(texts))
        case DictArg(items) if not _same(made := [_argument(item) for _, item in items]):
            keys, each = [key for key, _ in items], _each(made, [item for _, item in items])
            return lambda texts: DictArg(tuple(zip(keys, each(texts), strict=True)))
        case SliceArg(start, stop, step) if not _same(made := [_argument(part) for part in (start, stop, step)]):
            each = _each(made, [start, stop, step])
            return lambda texts: SliceArg(*each(texts))
    return None


def _value(value: Value | None) -> _Part:
    if value is None or not any(map(has_holes, names_in_value(value))):
        return None
    known, shape, expr = value, _each(map(_dim, value.shape), value.shape), _each([_dim(value.expr)], [value.expr])
    return lambda texts: Value(name=texts[known.name], dtype=known.dtype, shape=shape(texts), expr=expr(texts)[0])


def _dim(dim: Dim | None) -> _Part:
    if isinstance(dim, str) and has_holes(dim):
        return lambda texts: texts[dim]
    if isinstance(dim, Expr) and not _same(made := [_dim(arg) for arg in dim.args]):
        op, each = dim.op, _each(made, dim.args)
        return lambda texts: Expr(op=op, args=each(texts))
    return None
