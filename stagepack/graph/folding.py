"""A graph -> the form that its file holds, with equal parts as regions. Law: ``unfold(fold(g)) == g``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.msgpack import encode
from msgspec.structs import replace

from stagepack.format.folded import FoldedGraph, Region, RegionCall, trivially_folded
from stagepack.format.graph import Graph, ModuleCall, Node, Scope, Weight
from stagepack.format.renaming import (
    names_in_module_call,
    names_in_node,
    names_in_weight,
    rename_in_order,
    rename_module_call,
    rename_node,
    rename_weight,
)
from stagepack.format.traversal import input_names
from stagepack.format.unfold import unfold_graph
from stagepack.graph.repeat_search import Repeat, all_repeats, find_repeats
from stagepack.graph.template_builder import TemplateBuilder


def fold_graph(graph: Graph, places: Sequence[int] | None = None) -> FoldedGraph:
    """Fold a graph whose tables stand in the order that `unfold` gives them; of any other one nothing is folded.

    `places` says where each node stands in the whole model, of which the graph is a stage; -1 for one that stands nowhere.
    """
    repeats = find_repeats(graph).repeats
    if not repeats:
        return trivially_folded(graph)
    folded = _Folding(graph, repeats, range(len(graph.nodes)) if places is None else places).folded()
    return folded if unfold_graph(folded) == graph else trivially_folded(graph)


@dataclass(slots=True)
class _Places:
    """A region on its way: its places in the graph, and its holes."""

    repeat: Repeat
    starts: list[int]  # of all places, those inside of calls of other regions too
    number: int = 0
    holes: TemplateBuilder = field(default_factory=TemplateBuilder)

    @property
    def first(self) -> int:
        """The place that is written out."""
        return self.repeat.starts[0]

    def texts(self, start: int) -> tuple[str, ...]:
        """The texts of the call at a place."""
        place = self.starts.index(start)
        return tuple(texts[place] for texts in self.holes.texts)


class _Folding:
    """A graph and its repeats, the longest first, on their way to regions."""

    def __init__(self, graph: Graph, repeats: Sequence[Repeat], numbers: Sequence[int]) -> None:
        self.graph = graph
        self.weights = {weight.value: weight for weight in graph.weights}
        self.declared: set[str] = set()
        self.begins = _begins(graph.calls, numbers)
        self.called: set[str] = set()  # paths of calls of modules that regions hold
        self.places = [_Places(*pair) for pair in zip(repeats, all_repeats(repeats), strict=True)]
        # Where calls stand that are written out: in the graph, and in the first place of each region.
        self.calls: dict[int, list[_Places]] = {}
        for places in self.places:
            for start in places.repeat.starts:
                self.calls.setdefault(start, []).append(places)

    def folded(self) -> FoldedGraph:
        """The folded graph."""
        regions = []
        for number, places in enumerate(reversed(self.places)):
            places.number = number
            regions.append(self._region(places))
        graph = self.graph
        nodes = []
        for start, inner in self._items(0, len(graph.nodes), None):
            nodes.append(graph.nodes[start] if inner is None else RegionCall(inner.number, inner.texts(start)))
        kept = {node.scope for node in nodes if isinstance(node, Node)}
        kept.update(node.scope for subgraph in graph.subgraphs for node in subgraph.nodes)
        at = {scope: number for number, scope in enumerate(sorted(kept))}
        subgraphs = (
            replace(body, nodes=tuple(replace(node, scope=at[node.scope]) for node in body.nodes))
            for body in graph.subgraphs
        )
        return replace(
            trivially_folded(graph),
            nodes=tuple(replace(node, scope=at[node.scope]) if isinstance(node, Node) else node for node in nodes),
            weights=tuple(weight for weight in graph.weights if weight.value not in self.declared),
            scopes=tuple(graph.scopes[scope] for scope in at),
            subgraphs=tuple(subgraphs),
            calls=tuple(call for call in graph.calls if call.path not in self.called),
            regions=tuple(regions),
        )

    def _items(self, start: int, end: int, body: _Places | None = None) -> Iterator[tuple[int, _Places | None]]:
        """Yield what the nodes of a body become: the number of a node, or that of the first node of a call and its region."""
        number = start
        while number < end:
            inner = [
                places
                for places in self.calls.get(number, [])
                if body is None or places.repeat.length < body.repeat.length
            ]
            yield number, (inner[0] if inner else None)
            number += inner[0].repeat.length if inner else 1

    def _region(self, places: _Places) -> Region:
        graph, first = self.graph, places.first
        weights = self._own_weights(places)
        template_of = places.holes.template
        scopes: dict[Scope, int] = {}
        nodes: list[Node | RegionCall] = []
        for number, inner in self._items(first, first + places.repeat.length, places):
            here = [number - first + start for start in places.starts]
            if inner is not None:
                columns = zip(*(inner.texts(place) for place in here), strict=True)
                nodes.append(RegionCall(inner.number, tuple(map(template_of, columns))))
                continue
            found = [graph.nodes[place] for place in here]
            paths = tuple(graph.scopes[node.scope].path for node in found)
            scope = Scope(path=template_of(paths), type=graph.scopes[found[0].scope].type)
            rename = rename_in_order([template_of(column) for column in zip(*map(names_in_node, found), strict=True)])
            nodes.append(replace(rename_node(found[0], rename), scope=scopes.setdefault(scope, len(scopes))))
        declared = []
        for column in weights:
            rename = rename_in_order([template_of(texts) for texts in zip(*map(names_in_weight, column), strict=True)])
            declared.append(rename_weight(column[0], rename))
        calls = []
        for same in self._own_calls(places):
            rename = rename_in_order(
                [template_of(texts) for texts in zip(*map(names_in_module_call, same), strict=True)]
            )
            calls.append(rename_module_call(same[0], rename))
        return Region(nodes=tuple(nodes), weights=tuple(declared), scopes=tuple(scopes), calls=tuple(calls))

    def _own_calls(self, places: _Places) -> list[tuple[ModuleCall, ...]]:
        """The calls of modules that each place has for itself and that are equal but for names; for each of them, that of every place."""
        found: dict[tuple[str, ...], tuple[ModuleCall, ...]] = {}
        for node in range(places.repeat.length):
            for column in zip(*(self.begins[start + node] for start in places.starts), strict=False):
                paths = tuple(call.path for call in column)
                if len(set(paths)) == len(paths) and len(set(map(_nameless, column))) == 1:
                    found[paths] = column
        columns = [column for paths, column in found.items() if self.called.isdisjoint(paths)]
        self.called.update(call.path for column in columns for call in column)
        return columns

    def _own_weights(self, places: _Places) -> list[tuple[Weight, ...]]:
        """The weights that each place has for itself: for each of them, that of every place."""
        rows = []
        for start in places.starts:
            used = (
                name for node in self.graph.nodes[start : start + places.repeat.length] for name in input_names(node)
            )
            rows.append([name for name in dict.fromkeys(used) if name in self.weights])
        columns = [
            column
            for column in zip(*rows, strict=True)
            if len(set(column)) == len(column) and self.declared.isdisjoint(column)
        ]
        self.declared.update(*columns)
        return [tuple(self.weights[name] for name in column) for column in columns]


def _begins(calls: Iterable[ModuleCall], numbers: Sequence[int]) -> list[list[ModuleCall]]:
    """The calls of modules that begin at each node, the innermost first."""
    at: dict[int, list[ModuleCall]] = {}
    for call in calls:
        at.setdefault(int(call.first), []).insert(0, call)
    return [at.get(number, []) for number in numbers]


def _nameless(call: ModuleCall) -> bytes:
    return encode(rename_module_call(call, lambda _: ""))
