"""A graph as its file holds it -> the graph (SPEC F1 to F5)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from stagepack.errors import FormatError, Problem
from stagepack.format.folded import FoldedGraph, Region, RegionCall
from stagepack.format.graph import Argument, Graph, ModuleCall, Node, Scope, Value, ValueArg, Weight
from stagepack.format.renaming import names_in_region, names_in_value, rename_module_call, rename_value, rename_weight
from stagepack.format.template import TemplateError, fill_template, has_holes
from stagepack.format.traversal import input_names, leaf_arguments, map_arguments, sort_module_calls

_T = TypeVar("_T")
# What a text of a region is at one call.
_Texts = Mapping[str, str]


def unfold_graph(folded: FoldedGraph, where: str = "", *, module_calls: bool = True) -> Graph:
    """Fill in all calls of regions. `folded` keeps the rules that `validate.check_folded` checks.

    The scopes of a folded graph stand sorted by path and type in the graph; its weights in the order of their first use, and
    after them those that no node uses; its calls of modules in the order of their nodes. Without `module_calls` these are left out,
    which is faster.

    Raises:
        FormatError: a hole cannot be filled (F5).
    """
    fields = {name: getattr(folded, name) for name in Graph.__struct_fields__}
    if not module_calls:
        fields["calls"] = ()
    if not folded.regions:
        return Graph(**fields)
    try:
        steps = list(_Steps(folded.regions, module_calls=module_calls).of(folded))
        inner = (
            [rename_module_call(call, step.texts.__getitem__) for step in steps for call in step.calls]
            if module_calls
            else []
        )
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

    def __init__(self, regions: Sequence[Region], *, module_calls: bool) -> None:
        self._regions = regions
        parts = regions if module_calls else [replace(region, calls=()) for region in regions]
        self._templates = [sorted(set(names_in_region(region))) for region in parts]
        self._makers = [[_filler(item) for item in region.nodes if isinstance(item, Node)] for region in regions]

    def of(self, folded: FoldedGraph) -> Iterator[_Step]:
        """Yield the nodes of a graph in their order."""
        makers = [_keeper(item) for item in folded.nodes if isinstance(item, Node)]
        return self._body(folded.nodes, makers, list(folded.scopes), {})

    def _body(
        self, items: Sequence[Node | RegionCall], makers: Sequence[_Maker], scopes: list[Scope], texts: _Texts
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
        yield _Step(
            [], texts, [], [rename_weight(weight, texts.__getitem__) for weight in region.weights], region.calls
        )
        scopes = [Scope(path=texts[scope.path], type=scope.type) for scope in region.scopes]
        yield from self._body(region.nodes, self._makers[number], scopes, texts)


def _keeper(node: Node) -> _Maker:
    """What makes a node of the graph itself, which has no holes."""

    def make(texts: _Texts, scopes: list[int]) -> Node:
        return replace(node, scope=scopes[node.scope])

    return make


def _filler(node: Node) -> _Maker:
    """What makes a node of a region; what has no holes is made once."""
    keys = [key for key, _ in node.kwargs]
    fill_args = _each_filled(node.args, _argument_filler)
    fill_kwargs = _each_filled([argument for _, argument in node.kwargs], _argument_filler)
    fill_outputs = _each_filled(node.outputs, _value_filler)

    def make(texts: _Texts, scopes: list[int]) -> Node:
        return Node(
            op=node.op,
            args=fill_args(texts),
            kwargs=tuple(zip(keys, fill_kwargs(texts), strict=True)),
            outputs=fill_outputs(texts),
            unpack=node.unpack,
            scope=scopes[node.scope],
            context=node.context,
            cost=node.cost,
        )

    return make


def _each_filled(
    items: Sequence[_T], filler_of: Callable[[_T], Callable[[_Texts], _T] | None]
) -> Callable[[_Texts], tuple[_T, ...]]:
    """What makes a tuple of the texts; `filler_of` gives None for an item without holes."""
    pairs = [(item, filler_of(item)) for item in items]
    if all(fill is None for _, fill in pairs):
        same = tuple(items)
        return lambda _: same
    return lambda texts: tuple([item if fill is None else fill(texts) for item, fill in pairs])


def _argument_filler(argument: Argument) -> Callable[[_Texts], Argument] | None:
    if isinstance(argument, ValueArg):  # a container would do this too, in twice the time
        name = argument.name
        return (lambda texts: ValueArg(texts[name])) if has_holes(name) else None
    if not any(isinstance(leaf, ValueArg) and has_holes(leaf.name) for leaf in leaf_arguments(argument)):
        return None

    def fill(texts: _Texts) -> Argument:
        return map_arguments(argument, lambda leaf: ValueArg(texts[leaf.name]) if isinstance(leaf, ValueArg) else leaf)

    return fill


def _value_filler(value: Value | None) -> Callable[[_Texts], Value] | None:
    if value is None or not any(map(has_holes, names_in_value(value))):
        return None
    template = value
    return lambda texts: rename_value(template, texts.__getitem__)
