"""Runs of nodes that occur in a graph several times, equal up to names.

- Find equal runs of nodes in a graph. Runs are equal when they have the same operators, arguments, types of values, and data flow, up to
  the names of values, symbols, weights and modules. Whole modules are compared first, the largest first; then repeats are searched in the
  nodes that remain, such as the iterations of a loop over functions. A run that is impure is not a function of its inputs, and cannot be
  folded.
- Repeated subsequences of a sequence of integers. Found by the intervals of its suffix array with longest common prefixes, which are the
  internal nodes of its suffix tree (Abouelhoda, Kurtz, Ohlebusch, 2004, doi:10.1016/S1570-8667(03)00065-0).
- The names in all runs of a region -> one template, and the texts with which a call fills its holes.
- The nodes of a graph as numbers that are equal for nodes which differ in names alone.
"""

# Long because the search for repeated runs is one algorithm in four steps.

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from stagepack.format.aliasing import impurity_reason
from stagepack.format.folded_graph import Hole, escape_template, names_in_value, rename_value
from stagepack.format.graph import Argument, Graph, Node, Value, ValueArg
from stagepack.format.traversal import map_node_arguments, split_call_path
from stagepack.graph.analysis import GraphAnalysis

# Lengths of repeats that `repeat_interiors` leaves out one after another, at most.
_MOST_LEVELS = 4
_encode = msgspec.msgpack.Encoder().encode
# Nodes that a region must save.
_LEAST_GAIN = 8
# Searches of what the search before left.
_MOST_ROUNDS = 16
# A run of nodes: the number of its first node, and of the node after its last.
_Span = tuple[int, int]
_PIECE = re.compile(r"[0-9]+|[^\W\d_]+|[\W_]+")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Equal runs of nodes."""

    length: int  # the number of nodes of each run
    # The numbers of their first nodes, ascending; at least two. Runs inside of runs of another repeat are listed for the first run of
    # that repeat alone.
    starts: tuple[int, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedSubsequence:
    """Equal parts of a sequence that do not overlap."""

    length: int  # the number of items of each part
    starts: tuple[int, ...]  # the indices of their first items, ascending


def repeated_subsequences(sequence: Sequence[int], sizes: Sequence[int], least_gain: int) -> list[RepeatedSubsequence]:
    """Find the repeated subsequences that are worth a region."""
    size_before = [0]
    for size in sizes:
        size_before.append(size_before[-1] + size)
    order = _suffix_array(sequence)
    candidates: list[tuple[int, int, int, int]] = []
    for common_length, low, high, least_distance in _intervals(order, _common_prefixes(sequence, order)):
        length = min(common_length, least_distance)
        start = order[low]
        gain = folding_gain(size_before[start + length] - size_before[start], high - low + 1)
        if gain >= least_gain:
            candidates.append((-gain, length, low, high))
    return [
        RepeatedSubsequence(length=length, starts=tuple(sorted(order[low : high + 1])))
        for _, length, low, high in sorted(candidates)
    ]


def folding_gain(node_count: int, run_count: int) -> int:
    """Compute how many nodes it saves to store equal runs once and to call them, where a call counts as two nodes."""
    return (run_count - 1) * node_count - 2 * run_count


def _suffix_array(sequence: Sequence[int]) -> list[int]:
    """The starts of all suffixes in lexicographic order, by prefix doubling (Manber, Myers, 1990)."""
    length, step = len(sequence), 1
    keys: Sequence[int] = sequence
    while True:
        order = sorted(range(length), key=keys.__getitem__)
        ranks, rank = [0] * length, 0
        for index, start in enumerate(order):
            rank += index > 0 and keys[start] != keys[order[index - 1]]
            ranks[start] = rank
        if rank == length - 1 or step >= length:
            return order
        later_ranks = [*ranks[step:], *([-1] * step)]
        keys = [rank * (length + 1) + later_rank + 1 for rank, later_rank in zip(ranks, later_ranks, strict=True)]
        step *= 2


def _common_prefixes(sequence: Sequence[int], order: Sequence[int]) -> list[int]:
    """How many items each suffix shares with the one before it in the order (Kasai et al., 2001)."""
    ranks = [0] * len(order)
    for index, start in enumerate(order):
        ranks[start] = index
    prefix_lengths, shared = [0] * len(order), 0
    for start, rank in enumerate(ranks):
        if rank == 0:
            shared = 0
            continue
        previous_start = order[rank - 1]
        longest = len(order) - max(start, previous_start)
        while shared < longest and sequence[start + shared] == sequence[previous_start + shared]:
            shared += 1
        prefix_lengths[rank] = shared
        shared = max(0, shared - 1)
    return prefix_lengths


def _intervals(order: Sequence[int], prefix_lengths: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (length, first and last index in the order, least distance of two starts) of each repeated subsequence."""
    stack = [_Interval(0, 0, [], len(order) + 1)]
    for index in range(1, len(order) + 1):
        shared = prefix_lengths[index] if index < len(order) else 0
        closed = _Interval(len(order), index - 1, [order[index - 1]], len(order) + 1)
        while stack[-1].length > shared:
            top = stack.pop()
            top.absorb(closed)
            yield top.length, top.low, index - 1, top.least_distance
            closed = top
        if stack[-1].length < shared:
            stack.append(_Interval(shared, closed.low, [], len(order) + 1))
        stack[-1].absorb(closed)


@dataclass(slots=True)
class _Interval:
    """Suffixes next to one another in the order that share a prefix."""

    length: int  # of the prefix
    low: int  # the index of the first suffix in the order
    starts: list[int]  # of the suffixes, ascending
    least_distance: int  # of two starts

    def absorb(self, nested: "_Interval") -> None:
        """Move the starts of a nested interval here; the shorter list is merged into the longer."""
        shorter, longer = sorted((self.starts, nested.starts), key=len)
        self.least_distance = min(self.least_distance, nested.least_distance)
        for start in shorter:
            index = bisect.bisect(longer, start)
            for neighbor in longer[max(0, index - 1) : index + 1]:
                self.least_distance = min(self.least_distance, abs(start - neighbor))
            longer.insert(index, start)
        self.starts, nested.starts = longer, []


class NodeTokens:
    """Nodes as numbers.

    Names are those of values, symbols, weights and scopes. Everything else counts: operators, arguments, the types of the values that
    are used and defined, and the classes of the modules that the nodes came from.

    Attributes:
        tokens: the number of each node; equal numbers mean equal nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._token_of_encoding: dict[bytes, int] = {}
        self._types = dict(self._value_types())
        # For each node, its names in the order of `_encode_node`.
        self._node_names: list[list[str]] = []
        self.tokens: list[int] = []
        for node in graph.nodes:
            node_names: list[str] = []
            self.tokens.append(self._token(self._encode_node(node, node_names)))
            self._node_names.append(node_names)

    def equality_key(self, start: int, end: int) -> object:
        """Return a key that is equal for runs of nodes that are equal up to names."""
        index_of: dict[str, int] = {}
        run_names = itertools.chain.from_iterable(self._node_names[start:end])
        indices = [index_of.setdefault(run_name, len(index_of)) for run_name in run_names]
        return tuple(self.tokens[start:end]), tuple(indices)

    def _token(self, encoding: bytes) -> int:
        return self._token_of_encoding.setdefault(encoding, len(self._token_of_encoding))

    def _value_types(self) -> Iterator[tuple[str, tuple[int, list[str]]]]:
        """Yield each value and weight with the token of its type, and the names of the symbols in it."""
        node_values = (value for node in self._graph.nodes for value in node.outputs if value is not None)
        for value in (*self._graph.inputs, *node_values):
            value_names: list[str] = []
            token = self._token(_encode(_without_names(value, value_names)))
            yield value.name, (token, value_names[1:])
        for weight in self._graph.weights:
            base = None if weight.base is None else ""
            nameless = replace(weight, value="", names=("",) * len(weight.names), base=base)
            yield weight.value, (self._token(_encode(nameless)), [])

    def _encode_node(self, node: Node, node_names: list[str]) -> bytes:
        """Encode a node without its names, which are appended to `node_names`: of values used, with the symbols of their types, first."""
        used_types: list[int] = []

        def without_name(leaf: Argument) -> Argument:
            if not isinstance(leaf, ValueArg):
                return leaf
            type_token, symbols = self._types[leaf.name]
            used_types.append(type_token)
            node_names.extend((leaf.name, *symbols))
            return ValueArg("")

        nameless = map_node_arguments(node, without_name)
        outputs = tuple([None if value is None else _without_names(value, node_names) for value in node.outputs])
        nameless = replace(nameless, outputs=outputs, scope=0)
        return _encode((nameless, used_types, self._graph.scopes[node.scope].type))


def _without_names(value: Value, removed_names: list[str]) -> Value:
    """A value without its names, which are appended to `removed_names`, its own name first."""
    removed_names.extend(names_in_value(value))
    return rename_value(value, lambda _: "")


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
    for node_number in range(len(graph.nodes) + 1):
        path = paths[graph.nodes[node_number].scope] if node_number < len(graph.nodes) else []
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


class TemplateBuilder:
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
