"""Runs of nodes that occur in a graph several times, equal up to names.

Runs are equal when they have the same operators, arguments, types of values, and data flow, up to the names of values, symbols, weights
and modules. Whole modules are compared first, the largest first; then repeats are searched in the nodes that remain, such as the
iterations of a loop over functions. A run that is impure is not a function of its inputs, and cannot be folded.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagepack.format.aliasing import impurity_reason
from stagepack.format.graph import Graph
from stagepack.format.rules import split_call_path
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.node_tokens import NodeTokens
from stagepack.graph.subsequences import Repeat, folding_gain, repeated_subsequences

# Lengths of repeats that `repeat_interiors` leaves out one after another, at most.
_MOST_LEVELS = 4
# Nodes that a region must save.
_LEAST_GAIN = 8
# Searches of what the search before left.
_MOST_ROUNDS = 16
# A run of nodes: the number of its first node, and of the node after its last.
_Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpureRepeat:
    """Equal runs of nodes that are not functions of their inputs, so that they cannot be folded."""

    repeat: Repeat
    reason: str

    def covers(self, repeat: Repeat) -> bool:
        """Tell whether each run of another repeat is inside of a run of this one."""
        starts, length = self.repeat.starts, self.repeat.length
        indices = [bisect.bisect(starts, start) - 1 for start in repeat.starts]
        ends = [starts[index] + length if index >= 0 else 0 for index in indices]
        return all(start + repeat.length <= end for start, end in zip(repeat.starts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatSearchResult:
    """The repeats of a graph."""

    repeats: tuple[Repeat, ...]  # the repeats that can be folded; one that is inside of another comes after it
    impure: tuple[ImpureRepeat, ...]


def all_starts(repeats: Sequence[Repeat]) -> list[list[int]]:
    """List the first nodes of all runs of each repeat, ascending, also of those inside of any run of a longer repeat."""
    starts_of: list[list[int]] = []
    for repeat in repeats:
        starts: set[int] = set()
        for start in repeat.starts:
            enclosing = [
                index
                for index, longer in enumerate(repeats[: len(starts_of)])
                if longer.length > repeat.length and 0 <= start - longer.starts[0] < longer.length
            ]
            if enclosing:
                offset = start - repeats[enclosing[-1]].starts[0]
                starts.update(enclosing_start + offset for enclosing_start in starts_of[enclosing[-1]])
            else:
                starts.add(start)
        starts_of.append(sorted(starts))
    return starts_of


def repeat_interiors(repeats: Sequence[Repeat]) -> list[set[int]]:
    """List the nodes in front of which a cut would divide a repeated run: of any run, then again without the longest runs, and so on."""
    starts_of = all_starts(repeats)
    lengths = sorted({repeat.length for repeat in repeats}, reverse=True)
    return [
        {
            start + offset
            for repeat, starts in zip(repeats, starts_of, strict=True)
            if repeat.length <= longest
            for start in starts
            for offset in range(1, repeat.length)
        }
        for longest in lengths[:_MOST_LEVELS]
    ]


def without_nested_copies(repeats: Sequence[Repeat]) -> Iterator[Repeat]:
    """Yield repeats, the longest first, without the runs inside of runs that are equal to an earlier one."""
    # For each node, the length of the longest yielded run that has it and is not the first of its repeat.
    enclosing_lengths: dict[int, int] = {}
    for repeat in sorted(repeats, key=lambda repeat: (-repeat.length, repeat.starts)):
        starts = tuple(start for start in repeat.starts if enclosing_lengths.get(start, 0) <= repeat.length)
        if len(starts) > 1:
            yield Repeat(length=repeat.length, starts=starts)
            for start in starts[1:]:
                for node_number in range(start, start + repeat.length):
                    enclosing_lengths.setdefault(node_number, repeat.length)


def find_repeats(analysis: GraphAnalysis) -> RepeatSearchResult:
    """Find the equal runs of nodes that save at least eight nodes when they are stored once, in a little more than linear time."""
    search = _RepeatSearch(analysis)
    search.run()
    return RepeatSearchResult(repeats=tuple(without_nested_copies(search.repeats)), impure=tuple(search.impure))


def _module_spans(graph: Graph) -> set[_Span]:
    """Runs of nodes that come from one module or from modules inside of it."""
    spans: set[_Span] = set()
    # The modules around the current node, the outermost first, with the first node of each run.
    enclosing: list[tuple[str, int]] = []
    paths = [_module_path(scope.path) for scope in graph.scopes]
    scopes = [None, *(node.scope for node in graph.nodes), None]
    for node_number, (before, scope) in enumerate(itertools.pairwise(scopes)):
        if scope == before:
            continue
        path = [] if scope is None else paths[scope]
        common = 0
        while common < min(len(path), len(enclosing)) and enclosing[common][0] == path[common]:
            common += 1
        spans.update((start, node_number) for _, start in enclosing[common:])
        enclosing[common:] = [(component, node_number) for component in path[common:]]
    return spans


def _module_path(scope_path: str) -> list[str]:
    module = split_call_path(scope_path)[0]
    return module.split(".") if module else []


class _RepeatSearch:
    """The repeats that were found so far, and the nodes that remain."""

    def __init__(self, analysis: GraphAnalysis) -> None:
        self.repeats: list[Repeat] = []
        self.impure: list[ImpureRepeat] = []
        self._analysis = analysis
        self._tokens = NodeTokens(analysis.graph)
        node_count = len(analysis.graph.nodes)
        # Nodes of runs that are equal to an earlier one.
        self._is_copy = bytearray(node_count)
        # For the first node of a run and the node after its last, the index of its repeat.
        self._repeat_at: dict[int, dict[int, int]] = defaultdict(dict)
        # The runs that are searched: the whole graph, and the first run of each repeat.
        self._bodies: list[_Span] = [(0, node_count)]

    def run(self) -> None:
        """Compare whole modules, then search what they leave."""
        modules_by_length: dict[int, list[_Span]] = defaultdict(list)
        for span in _module_spans(self._analysis.graph):
            modules_by_length[span[1] - span[0]].append(span)
        for _, spans in sorted(modules_by_length.items(), reverse=True):
            self._add_equal_spans(spans)
        for _ in range(_MOST_ROUNDS):
            if not self._search_bodies():
                break

    def _add_equal_spans(self, spans: Sequence[_Span]) -> bool:
        """Add repeats of those of some runs of one length that are equal; return whether there were some."""
        by_ends: dict[tuple[int, int], list[_Span]] = defaultdict(list)
        for start, end in sorted(spans):
            if not self._is_copy[start] and end - start > 1:
                # Comparing first and last nodes is cheap, and tells most runs apart.
                by_ends[self._tokens.tokens[start], self._tokens.tokens[end - 1]].append((start, end))
        equal_spans: dict[object, list[_Span]] = defaultdict(list)
        for candidates in by_ends.values():
            start, end = candidates[0]
            if folding_gain(end - start, len(candidates)) >= _LEAST_GAIN:
                for span in candidates:
                    equal_spans[self._tokens.equality_key(*span)].append(span)
        return any([self._add_repeat(equal) for equal in equal_spans.values()])

    def _search_bodies(self) -> bool:
        """Search repeated sequences of nodes and of known runs; return whether there were some."""
        tokens, spans = self._body_items()
        sizes = [end - start if end - start == 1 else 0 for start, end in spans]
        is_taken = bytearray(len(tokens))
        has_found = False
        for candidate in repeated_subsequences(tokens, sizes, _LEAST_GAIN):
            starts = [start for start in candidate.starts if not any(is_taken[start : start + candidate.length])]
            node_spans = [(spans[start][0], spans[start + candidate.length - 1][1]) for start in starts]
            if len(node_spans) > 1 and self._add_equal_spans(node_spans):
                has_found = True
                for start in starts:
                    is_taken[start : start + candidate.length] = b"\1" * candidate.length
        return has_found

    def _body_items(self) -> tuple[list[int], list[_Span]]:
        """All bodies as one sequence of tokens, with the nodes of each; a known run is one item, and a unique item ends each body."""
        tokens: list[int] = []
        spans: list[_Span] = []
        for body_index, (body_start, body_end) in enumerate(self._bodies):
            node_number = body_start
            while node_number < body_end:
                repeat_ends = self._repeat_at.get(node_number, {})
                # A body is not an item of itself.
                inside = [
                    end
                    for end in repeat_ends
                    if end <= body_end and (body_start < node_number or end < body_end or body_index == 0)
                ]
                if inside:
                    tokens.append(-1 - repeat_ends[max(inside)])
                    spans.append((node_number, max(inside)))
                else:
                    tokens.append(self._tokens.tokens[node_number] + len(self._bodies))
                    spans.append((node_number, node_number + 1))
                node_number = spans[-1][1]
            tokens.append(body_index)
            spans.append((body_end, body_end))
        return tokens, spans

    def _add_repeat(self, spans: Sequence[_Span]) -> bool:
        """Add a repeat of equal runs, or add the runs to a known repeat; return whether something was added."""
        known = next((self._repeat_at[start][end] for start, end in spans if end in self._repeat_at[start]), None)
        if known is not None:
            known_starts, length = self.repeats[known].starts, self.repeats[known].length
            starts = {*known_starts, *(start for start, _ in spans if start > known_starts[0])}
            if len(starts) == len(known_starts):
                return False
            spans = [(start, start + length) for start in sorted(starts)]
        first_start, first_end = spans[0]
        if folding_gain(first_end - first_start, len(spans)) < _LEAST_GAIN:
            return False
        repeat = Repeat(length=first_end - first_start, starts=tuple(start for start, _ in spans))
        reason = self._impurity_reason(repeat)
        if reason is not None:
            if known is None and not any(impure.covers(repeat) for impure in self.impure):
                self.impure.append(ImpureRepeat(repeat=repeat, reason=reason))
            return False
        repeat_index = len(self.repeats) if known is None else known
        for start, end in spans:
            self._repeat_at[start][end] = repeat_index
        for start, end in spans[1:]:
            self._is_copy[start:end] = b"\1" * (end - start)
        if known is None:
            self._bodies.append((first_start, first_end))
            self.repeats.append(repeat)
        else:
            self.repeats[known] = repeat
        return True

    def _impurity_reason(self, repeat: Repeat) -> str | None:
        """Why the runs are impure; None when they are functions of their inputs."""
        analysis = self._analysis
        # Node in the run and output of the node, for the values that are used outside of one of the runs.
        outputs = {
            (offset, output_index)
            for start in repeat.starts
            for offset in range(repeat.length)
            for output_index, value_name in enumerate(analysis.node_outputs[start + offset])
            if analysis.last_uses.get(value_name, 0) >= start + repeat.length
        }
        first = repeat.starts[0]
        output_names = [analysis.node_outputs[first + offset][index] for offset, index in sorted(outputs)]
        return impurity_reason(analysis.graph, analysis.graph.nodes[first : first + repeat.length], output_names)
