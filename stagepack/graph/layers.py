"""The layers of a model that follow one another, such as the layers of a transformer, and the places between them.

A layer is a call of a module whose path ends with a number, a child of ``nn.ModuleList`` or ``nn.Sequential``, that uses what the call of
the child before it gave; of modules without a list, such as ``block1`` and ``block2``, those that have modules inside. Modules that run
side by side, such as experts, are no layers, nor are those without a weight matrix, such as an activation. In a model without such
modules, the calls of one module are layers, else repeated runs of nodes.
"""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stagepack.format.rules import split_call_path
from stagepack.format.traversal import sort_module_calls
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.node_tokens import NodeTokens
from stagepack.graph.repeats import all_starts, find_repeats


class _Run(NamedTuple):
    """Consecutive nodes: a call of a module, or a run without a name."""

    first: int
    end: int
    path: str = ""
    type: str = ""


_DIGITS = "0123456789"
# Runs that follow one another, each using what the one before it gave.
_Chain = list[_Run]


class Border(NamedTuple):
    """Where a cut between two consecutive layers may be."""

    start: int  # the first node of the first layer
    end: int  # the node after the last one of the second layer
    node_numbers: Sequence[int]  # the nodes in front of which a cut divides neither layer, the most natural one first


def layer_borders(analysis: GraphAnalysis) -> list[Border] | None:
    """Find the borders between the layers of a model, in order; None for a model without layers."""
    modules = _ModuleLayers(analysis)
    layers = modules.numbered_layers() or modules.repeated_calls()
    if layers:
        return [modules.border(before, after) for before, after in itertools.pairwise(layers)]
    return _repeat_borders(analysis) or None


class _ModuleLayers:
    """The calls of the modules of a model."""

    def __init__(self, analysis: GraphAnalysis) -> None:
        self._analysis = analysis
        self._tokens: NodeTokens | None = None
        calls = (
            _Run(int(call.first), int(call.first) + call.nodes, split_call_path(call.path)[0], call.type)
            for call in sort_module_calls(analysis.graph.calls)
        )
        # No rule of the format says that a call ends before the model does.
        self._calls = [call for call in calls if call.end <= len(analysis.graph.nodes)]
        # The paths of modules with calls of modules inside.
        self._composites = {prefix for call in self._calls for prefix in _prefixes(call.path.rpartition(".")[0])}
        self._matrix_nodes = _nodes_with_matrices(analysis)

    def numbered_layers(self) -> _Chain:
        """The calls of numbered modules that are layers, in order; the outermost ones, but no groups of layers."""
        chains = self._numbered_chains()
        member_paths = {member.path for chain in chains for member in chain}
        # By the path of the innermost layer around them.
        inner_chains: dict[str | None, list[_Chain]] = defaultdict(list)
        for chain in chains:
            prefixes = _prefixes(chain[0].path.rpartition(".")[0])
            inner_chains[next((prefix for prefix in prefixes if prefix in member_paths), None)].append(chain)

        def divided(chain: _Chain) -> Iterator[_Run]:
            type_counts = Counter(member.type for member in chain)
            groups: dict[_Run, list[_Chain]] = {}
            for member in chain if not self._has_equal_runs(chain) else ():
                inside = [inner for inner in inner_chains[member.path] if self._is_inside(inner, member)]
                if self._is_group(member, inside, any_types=type_counts[member.type] == 1):
                    groups[member] = _not_interleaved(inside)
            for member in chain:
                if member not in groups:
                    # Beside an encoder of several layers, an output layer is none.
                    yield from [member] if not groups or member.path in self._composites else []
                elif type_counts[member.type] == 1:
                    yield from itertools.chain.from_iterable(map(divided, groups[member]))
                else:
                    # A bottleneck of a stage of a ResNet is a layer, though it has numbered convolutions inside.
                    yield from itertools.chain.from_iterable(groups[member])

        return sorted(itertools.chain.from_iterable(map(divided, _not_interleaved(inner_chains[None]))))

    def _numbered_chains(self) -> list[_Chain]:
        """The chains of modules with a number, but those of modules without others inside, in a module that is side by side with others."""
        children: dict[str, list[_Run]] = defaultdict(list)
        for call in self._calls:
            name = call.path.rpartition(".")[2]
            if name.isdecimal() or (name[-1:].isdecimal() and call.path in self._composites):
                # `layers.` is no `layers`.
                children[call.path.rstrip(_DIGITS)].append(call)
        chains: list[_Chain] = []
        side_paths: set[str] = set()
        for calls in children.values():
            found = [chain for chain in self._chains(calls) if len(chain) > 1 or _is_list(chain)]
            chains += found
            side_paths |= {call.path for call in calls} - {member.path for chain in found for member in chain}
        return [
            chain
            for chain in chains
            if chain[0].path in self._composites or side_paths.isdisjoint(_prefixes(chain[0].path))
        ]

    def repeated_calls(self) -> _Chain:
        """The calls of modules that are called several times in a row, in order, such as a layer that is shared by all depths."""
        calls: dict[str, list[_Run]] = defaultdict(list)
        for call in self._calls:
            calls[call.path].append(call)
        chains = [chain for same in calls.values() if len(same) > 1 for chain in self._chains(same)]
        outermost: list[_Chain] = []
        for chain in sorted(chains, key=lambda chain: (chain[0].first, -chain[-1].end)):
            if not outermost or chain[0].first >= outermost[-1][-1].end:
                outermost.append(chain)
        return [*itertools.chain.from_iterable(outermost)]

    def border(self, before: _Run, after: _Run) -> Border:
        """The border between two layers, in which no module that stands between them is divided."""
        start = bisect.bisect_left(self._calls, before.end, key=lambda call: call.first)
        stop = bisect.bisect_left(self._calls, after.first, key=lambda call: call.first)
        between = [call for call in self._calls[start:stop] if call.end <= after.first]
        divided = {node_number for call in between for node_number in range(call.first + 1, call.end)}
        places = [number for number in range(after.first, before.end - 1, -1) if number not in divided]
        return Border(before.first, after.end, places)

    def _chains(self, calls: Iterable[_Run]) -> Iterator[_Chain]:
        """Divide the calls of sibling modules into chains. A module without siblings is a chain if it has modules inside."""
        calls = [call for call in calls if self._matrix_nodes[call.end] > self._matrix_nodes[call.first]]
        composites = [call for call in calls if call.path in self._composites]
        if len(composites) > 1:
            calls = composites
        for chain in _linked(self._analysis, calls):
            if len(chain) > 1 or (len(calls) == 1 and composites):
                yield chain

    def _is_inside(self, chain: _Chain, member: _Run) -> bool:
        """Whether a call has the calls of a chain inside, which are children of a list, and have modules inside themselves."""
        is_enclosed = member.first <= chain[0].first and chain[-1].end <= member.end
        return is_enclosed and len(chain) > 1 and _is_list(chain) and chain[0].path in self._composites

    def _has_equal_runs(self, chain: _Chain) -> bool:
        """Whether two members of a chain have equal nodes."""
        if len({member.end - member.first for member in chain}) == len(chain):
            return False
        if self._tokens is None:
            self._tokens = NodeTokens(self._analysis.graph)
        keys = {self._tokens.equality_key(member.first, member.end) for member in chain}
        return len(keys) < len(chain)

    def _is_group(self, member: _Run, inside: Sequence[_Chain], *, any_types: bool) -> bool:
        """Whether a module is mainly a sequence of layers, such as a stage of a ResNet, and no layer."""
        if not inside:
            return False
        has_one_type = all(len({inner.type for inner in chain}) == 1 for chain in inside)
        covered = max(chain[-1].end for chain in inside) - min(chain[0].first for chain in inside)
        return (any_types or has_one_type) and 2 * covered >= member.end - member.first


def _prefixes(path: str) -> Iterator[str]:
    """Yield a path and the paths of the modules around it, the longest first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _is_list(chain: _Chain) -> bool:
    """Whether the members of a chain are children of a list of modules."""
    return chain[0].path.rpartition(".")[2].isdecimal()


def _nodes_with_matrices(analysis: GraphAnalysis) -> list[int]:
    """For each node, how many nodes in front of it use a weight of two dimensions or more."""
    matrices = {weight.value for weight in analysis.graph.weights if len(weight.shape) > 1}
    uses = (not matrices.isdisjoint(used_names) for used_names in analysis.node_inputs)
    return [0, *itertools.accumulate(map(int, uses))]


def _linked(analysis: GraphAnalysis, runs: Sequence[_Run]) -> Iterator[_Chain]:
    """Divide runs in order into chains."""
    chain: _Chain = []
    for run in runs:
        if chain and not _depends(analysis, chain[-1], run):
            yield chain
            chain = []
        chain.append(run)
    if chain:
        yield chain


def _depends(analysis: GraphAnalysis, earlier: _Run, later: _Run) -> bool:
    """Whether a run begins after another one, and uses what follows from it."""
    if later.first < earlier.end:
        return False
    reached = set(analysis.defined_by(range(earlier.first, earlier.end)))
    for node_number in range(earlier.end, later.end):
        if not reached.isdisjoint(analysis.node_inputs[node_number]):
            if node_number >= later.first:
                return True
            reached.update(analysis.node_outputs[node_number])
    return False


def _not_interleaved(chains: Iterable[_Chain]) -> list[_Chain]:
    """The chains without those that run alternately with another one, which is longer, or begins earlier."""
    kept: list[_Chain] = []
    for chain in sorted(chains, key=lambda chain: (-len(chain), chain[0])):
        if all(_in_one_gap(chain, other) or (len(chain) > 1 and _in_one_gap(other, chain)) for other in kept):
            kept.append(chain)
    return kept


def _in_one_gap(chain: _Chain, other: _Chain) -> bool:
    """Whether all of a chain is before, after, or between two consecutive members of another one; a single run is not between."""
    index = bisect.bisect_right(other, chain[0])
    if len(chain) == 1 and 0 < index < len(other):
        return False
    return (index == 0 or other[index - 1].end <= chain[0].first) and (
        index == len(other) or chain[-1].end <= other[index].first
    )


def _repeat_borders(analysis: GraphAnalysis) -> list[Border]:
    """The borders between repeated runs of nodes. A run may begin anywhere in an iteration, so that a cut may be moved by half of it."""
    found = find_repeats(analysis)
    repeats = [(repeat.length, starts) for repeat, starts in zip(found.repeats, all_starts(found.repeats), strict=True)]
    repeats += [(impure.repeat.length, list(impure.repeat.starts)) for impure in found.impure]
    chains = [
        chain
        for length, starts in repeats
        for chain in _linked(analysis, [_Run(start, start + length) for start in starts])
        if len(chain) > 1
    ]
    kept: list[_Chain] = []
    for chain in sorted(chains, key=lambda chain: (-sum(run.end - run.first for run in chain), chain)):
        if all(chain[-1].end <= other[0].first or other[-1].end <= chain[0].first for other in kept):
            kept.append(chain)
    runs = sorted(itertools.chain.from_iterable(kept))
    borders: list[Border] = []
    for before, after in itertools.pairwise(runs):
        reach = min(before.end - before.first, after.end - after.first) // 2
        near = range(after.first - reach, after.first + reach)
        places = sorted(near, key=lambda number: abs(number - after.first)) or [after.first]
        borders.append(Border(before.first, after.end, places))
    return borders
