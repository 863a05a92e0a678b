"""A graph -> the form that its file holds, with equal runs of nodes as regions. Law: ``unfold_graph(fold_graph(g)) == g``."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.msgpack import encode
from msgspec.structs import replace

from stagepack.format.folded_graph import (
    Hole,
    Rename,
    escape_template,
    names_in,
    rename_module_call,
    rename_node,
    rename_weight,
    trivially_folded,
    unfold_graph,
)
from stagepack.format.graph import FoldedGraph, Graph, ModuleCall, Node, Region, RegionCall, Scope, Weight
from stagepack.format.traversal import subgraphs_with_scopes
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import all_starts, find_repeats
from stagepack.graph.subsequences import Repeat

_Item = TypeVar("_Item")
_PIECE = re.compile(r"[0-9]+|[^\W\d_]+|[\W_]+")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


def fold_graph(graph: Graph, positions: Sequence[int] | None = None) -> FoldedGraph:
    """Fold a graph.

    positions: of the nodes of a stage in the whole model, -1 for a node that is in no other stage; None for a whole model.
    """
    analysis = GraphAnalysis(graph)
    repeats = find_repeats(analysis).repeats
    if not repeats:
        return trivially_folded(graph)
    folded = _Folding(analysis, repeats, range(len(graph.nodes)) if positions is None else positions).fold()
    return folded if unfold_graph(folded) == graph else trivially_folded(graph)


def outline_graph(graph: Graph) -> FoldedGraph:
    """Find the regions of a graph that no file stores, as `folded_functions` takes them: with the names of their first runs.

    Templates, and unfolding them for comparison, took half of the time of `fold_graph`.
    """
    analysis = GraphAnalysis(graph)
    repeats = find_repeats(analysis).repeats
    return _Folding(analysis, repeats, ()).outline() if repeats else trivially_folded(graph)


class _TemplateBuilder:
    """The holes of a region while its templates are made.

    Law: ``fill_template(builder.template(names), [texts[run] for texts in builder.hole_texts]) == names[run]``.

    Attributes:
        hole_texts: for each hole, its text in each run.
    """

    def __init__(self) -> None:
        self.hole_texts: list[tuple[str, ...]] = []
        self._templates: dict[tuple[str, ...], str] = {}
        self._text_holes: dict[tuple[str, ...], int] = {}
        # For holes with integers: their differences from the first -> the hole, and its first integer.
        self._integer_holes: dict[tuple[int, ...], tuple[int, int]] = {}

    def template(self, run_names: tuple[str, ...]) -> str:
        """Return a template for names that differ from run to run; equal names have equal templates."""
        if run_names not in self._templates:
            self._templates[run_names] = self._make_template(run_names)
        return self._templates[run_names]

    def _make_template(self, run_names: tuple[str, ...]) -> str:
        if len(set(run_names)) == 1:
            return escape_template(run_names[0])
        pieces = [_PIECE.findall(run_name) for run_name in run_names]
        is_complete = all("".join(parts) == run_name for parts, run_name in zip(pieces, run_names, strict=True))
        if not is_complete or len({len(parts) for parts in pieces}) > 1:
            return str(self._hole(run_names))
        return "".join(
            escape_template(column[0]) if len(set(column)) == 1 else str(self._hole(column))
            for column in zip(*pieces, strict=True)
        )

    def _hole(self, run_texts: tuple[str, ...]) -> Hole:
        """A hole for these texts; integers that grow alike from run to run share one."""
        if not all(map(_INTEGER.fullmatch, run_texts)):
            if run_texts not in self._text_holes:
                self._text_holes[run_texts] = self._new_hole(run_texts)
            return Hole(self._text_holes[run_texts])
        integers = list(map(int, run_texts))
        differences = tuple(integer - integers[0] for integer in integers)
        if differences not in self._integer_holes:
            self._integer_holes[differences] = (self._new_hole(run_texts), integers[0])
        hole_index, first_integer = self._integer_holes[differences]
        return Hole(hole_index, integers[0] - first_integer)

    def _new_hole(self, run_texts: tuple[str, ...]) -> int:
        self.hole_texts.append(run_texts)
        return len(self.hole_texts) - 1


@dataclass(slots=True)
class _RegionRuns:
    """The runs of nodes of a region."""

    repeat: Repeat  # the runs that are written out, or called from what is written out
    starts: list[int]  # the first nodes of all runs, those inside of calls of other regions too
    region_index: int = 0  # the index of the region in the folded graph
    templates: _TemplateBuilder = field(default_factory=_TemplateBuilder)  # the templates of its names

    def hole_texts(self, start: int) -> tuple[str, ...]:
        """The texts for the holes in the call of a run."""
        run_index = self.starts.index(start)
        return tuple(run_texts[run_index] for run_texts in self.templates.hole_texts)

    def template_of(self, items: Sequence[_Item], rename_item: Callable[[_Item, Rename], _Item]) -> _Item:
        """The item of all runs, with templates in the place of names."""
        names_of_runs = zip(*(names_in(item, rename_item) for item in items), strict=True)
        templates = iter([self.templates.template(run_names) for run_names in names_of_runs])
        return rename_item(items[0], lambda _: next(templates))


class _Folding:
    """A graph and its repeats, the longest first, while they become regions."""

    def __init__(self, analysis: GraphAnalysis, repeats: Sequence[Repeat], positions: Sequence[int]) -> None:
        graph = analysis.graph
        self._analysis = analysis
        self._weights = {weight.value: weight for weight in graph.weights}
        self._module_calls = _module_calls_by_first_node(graph.calls, positions)
        # Weights and paths of module calls that regions declare.
        self._declared_weights: set[str] = set()
        self._declared_calls: set[str] = set()
        starts_of = all_starts(repeats)
        self._runs = [
            _RegionRuns(repeat=repeat, starts=starts) for repeat, starts in zip(repeats, starts_of, strict=True)
        ]
        # The calls that are written out, in the graph and in the first run of each region, by their first node; longest first.
        self._calls_at: dict[int, list[_RegionRuns]] = {}
        for runs in self._runs:
            for start in runs.repeat.starts:
                self._calls_at.setdefault(start, []).append(runs)

    def fold(self) -> FoldedGraph:
        """The folded graph."""
        graph = self._analysis.graph
        regions = []
        for region_index, runs in enumerate(reversed(self._runs)):
            runs.region_index = region_index
            regions.append(self._region(runs))
        nodes = [
            graph.nodes[start] if called is None else RegionCall(called.region_index, called.hole_texts(start))
            for start, called in self._body_items(0, len(graph.nodes), None)
        ]
        kept_scopes = {node.scope for node in nodes if isinstance(node, Node)}
        kept_scopes.update(node.scope for subgraph in graph.subgraphs for node in subgraph.nodes)
        new_scopes = {scope: new_scope for new_scope, scope in enumerate(sorted(kept_scopes))}
        return replace(
            trivially_folded(graph),
            nodes=tuple(
                replace(node, scope=new_scopes[node.scope]) if isinstance(node, Node) else node for node in nodes
            ),
            weights=tuple(weight for weight in graph.weights if weight.value not in self._declared_weights),
            scopes=tuple(graph.scopes[scope] for scope in new_scopes),
            subgraphs=subgraphs_with_scopes(graph.subgraphs, new_scopes),
            calls=tuple(call for call in graph.calls if call.path not in self._declared_calls),
            regions=tuple(regions),
        )

    def outline(self) -> FoldedGraph:
        """The nodes and the calls of the graph and of each region, without templates and texts."""
        nodes = self._analysis.graph.nodes
        for region_index, runs in enumerate(reversed(self._runs)):
            runs.region_index = region_index

        def items(start: int, end: int, body: _RegionRuns | None) -> tuple[Node | RegionCall, ...]:
            return tuple(
                nodes[first] if called is None else RegionCall(called.region_index, ())
                for first, called in self._body_items(start, end, body)
            )

        firsts = [(runs, runs.repeat.starts[0]) for runs in reversed(self._runs)]
        regions = tuple(Region(nodes=items(first, first + runs.repeat.length, runs)) for runs, first in firsts)
        return replace(trivially_folded(self._analysis.graph), nodes=items(0, len(nodes), None), regions=regions)

    def _body_items(self, start: int, end: int, body: _RegionRuns | None) -> Iterator[tuple[int, _RegionRuns | None]]:
        """Yield the items of a body: a node's number, or the first node of a call with the region that is called.

        `body` is the region whose first run is from `start` to `end` (excluded), None for the graph.
        """
        node_number = start
        while node_number < end:
            calls = self._calls_at.get(node_number, [])
            shorter = (runs for runs in calls if body is None or runs.repeat.length < body.repeat.length)
            called = next(shorter, None)
            yield node_number, called
            node_number += 1 if called is None else called.repeat.length

    def _region(self, runs: _RegionRuns) -> Region:
        graph, first = self._analysis.graph, runs.repeat.starts[0]
        scopes: dict[Scope, int] = {}
        nodes: list[Node | RegionCall] = []
        for node_number, called in self._body_items(first, first + runs.repeat.length, runs):
            run_nodes = [node_number - first + start for start in runs.starts]
            if called is not None:
                columns = zip(*(called.hole_texts(node) for node in run_nodes), strict=True)
                nodes.append(RegionCall(called.region_index, tuple(map(runs.templates.template, columns))))
                continue
            equal_nodes = [graph.nodes[node] for node in run_nodes]
            paths = tuple(graph.scopes[node.scope].path for node in equal_nodes)
            scope = Scope(path=runs.templates.template(paths), type=graph.scopes[equal_nodes[0].scope].type)
            template_node = runs.template_of(equal_nodes, rename_node)
            nodes.append(replace(template_node, scope=scopes.setdefault(scope, len(scopes))))
        weights = tuple([runs.template_of(column, rename_weight) for column in self._own_weights(runs)])
        calls = tuple([runs.template_of(column, rename_module_call) for column in self._own_module_calls(runs)])
        return Region(nodes=tuple(nodes), weights=weights, scopes=tuple(scopes), calls=calls)

    def _own_module_calls(self, runs: _RegionRuns) -> list[tuple[ModuleCall, ...]]:
        """The module calls that each run has for itself and that are equal up to names: for each, the call of every run."""
        columns_by_paths: dict[tuple[str, ...], tuple[ModuleCall, ...]] = {}
        for offset in range(runs.repeat.length):
            for column in zip(*(self._module_calls[start + offset] for start in runs.starts), strict=False):
                paths = tuple(call.path for call in column)
                nameless = {encode(rename_module_call(call, lambda _: "")) for call in column}
                if len(set(paths)) == len(paths) and len(nameless) == 1:
                    columns_by_paths[paths] = column
        columns = [column for paths, column in columns_by_paths.items() if self._declared_calls.isdisjoint(paths)]
        self._declared_calls.update(call.path for column in columns for call in column)
        return columns

    def _own_weights(self, runs: _RegionRuns) -> list[tuple[Weight, ...]]:
        """The weights that each run has for itself: for each, the weight of every run."""
        rows = []
        for start in runs.starts:
            used_names = self._analysis.used_by(range(start, start + runs.repeat.length))
            rows.append([value_name for value_name in used_names if value_name in self._weights])
        columns = [
            column
            for column in zip(*rows, strict=True)
            if len(set(column)) == len(column) and self._declared_weights.isdisjoint(column)
        ]
        self._declared_weights.update(*columns)
        return [tuple(self._weights[value_name] for value_name in column) for column in columns]


def _module_calls_by_first_node(calls: Iterable[ModuleCall], positions: Sequence[int]) -> list[list[ModuleCall]]:
    """The module calls that begin at each node, the innermost first."""
    calls_at: dict[int, list[ModuleCall]] = {}
    for call in calls:
        calls_at.setdefault(int(call.first), []).insert(0, call)
    return [calls_at.get(position, []) for position in positions]
