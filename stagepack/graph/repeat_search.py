"""Find equal parts of a graph.

Equal are parts with the same operators, arguments, types of values, and flow of data, up to the names of values, symbols, weights and
modules. First come whole modules, the largest first; then what repeats in what is left, such as the turns of a loop over functions.
A part that writes what lies outside of it, or gives out a view of that, is no function of its inputs, and is left alone.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from stagepack.format.graph import Argument, Graph, Node, Value, ValueArg
from stagepack.format.renaming import names_in_value, rename_value
from stagepack.format.traversal import input_names, map_node_arguments, output_names, split_call_path
from stagepack.graph.aliasing import impurity_reason
from stagepack.graph.repeated_sequences import folding_gain, repeated_subsequences

_LEAST = 8  # nodes that a region must save
_LEVELS = 4  # of parts inside of parts that a cut looks at
_ROUNDS = 16  # of looking for repeats among what the last round left
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Equal parts of a graph: how many nodes each has, and the numbers of their first nodes, ascending.

    Parts that lie inside of parts of another repeat are listed for its first part alone.
    """

    length: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """Equal parts that are no functions of their inputs, and why."""

    repeat: Repeat
    reason: str

    def covers(self, repeat: Repeat) -> bool:
        """Whether each part of another repeat lies in one of these."""
        number = [bisect.bisect(self.repeat.starts, start) - 1 for start in repeat.starts]
        ends = [self.repeat.starts[place] + self.repeat.length if place >= 0 else 0 for place in number]
        return all(start + repeat.length <= end for start, end in zip(repeat.starts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatSearchResult:
    """The repeats of a graph. One that lies inside of another comes after it."""

    repeats: tuple[Repeat, ...]
    left_alone: tuple[LeftAlone, ...]


def find_repeats(graph: Graph) -> RepeatSearchResult:
    """Find the equal parts of a graph, in a time that grows little faster than the number of its nodes."""
    search = _Search(graph)
    search.run()
    return RepeatSearchResult(repeats=tuple(_outermost(search.repeats)), left_alone=tuple(search.left_alone))


def repeat_interiors(graph: Graph) -> list[set[int]]:
    """Places where a cut would go through a part that repeats: the numbers of the nodes before which it would stand.

    First come those inside of any part; then, again and again, without those of the longest parts.
    """
    repeats = find_repeats(graph).repeats
    places = list(zip(repeats, all_repeats(repeats), strict=True))
    lengths = sorted({repeat.length for repeat in repeats}, reverse=True)
    return [
        {
            start + place
            for repeat, starts in places
            if repeat.length <= longest
            for start in starts
            for place in range(1, repeat.length)
        }
        for longest in lengths[:_LEVELS]
    ]


def all_repeats(repeats: Sequence[Repeat]) -> list[list[int]]:
    """Where the parts of each repeat begin, those that lie in any part of a longer one too; the longest come first."""
    found: list[list[int]] = []
    for repeat in repeats:
        starts: set[int] = set()
        for start in repeat.starts:
            around = [
                number
                for number, other in enumerate(repeats[: len(found)])
                if other.length > repeat.length and 0 <= start - other.starts[0] < other.length
            ]
            if around:
                first = repeats[around[-1]].starts[0]
                starts.update(start - first + place for place in found[around[-1]])
            else:
                starts.add(start)
        found.append(sorted(starts))
    return found


def _outermost(repeats: Sequence[Repeat]) -> Iterator[Repeat]:
    """Yield repeats, the longest first, without the parts that lie in parts of others which are equal to an earlier one."""
    gone: dict[int, int] = {}  # the number of a node -> the length of such a part that it lies in
    for repeat in sorted(repeats, key=lambda repeat: (-repeat.length, repeat.starts)):
        starts = tuple(start for start in repeat.starts if gone.get(start, 0) <= repeat.length)
        if len(starts) > 1:
            yield Repeat(length=repeat.length, starts=starts)
            for start in starts[1:]:
                gone.update((number, gone.get(number, repeat.length)) for number in range(start, start + repeat.length))


# The number of the first node of a part, and that of the node after its last.
_Part = tuple[int, int]


def _groups(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts of one length together."""
    groups: dict[int, list[_Part]] = defaultdict(list)
    for part in parts:
        groups[part[1] - part[0]].append(part)
    return iter(groups.values())


def _modules(graph: Graph) -> set[_Part]:
    """Runs of nodes that come from one module or from modules inside of it."""
    found: set[_Part] = set()
    open_: list[tuple[str, int]] = []  # names of modules, the outermost first, and where their runs begin
    paths = [_path(scope.path) for scope in graph.scopes]
    for number in range(len(graph.nodes) + 1):
        path = paths[graph.nodes[number].scope] if number < len(graph.nodes) else []
        same = 0
        while same < min(len(path), len(open_)) and open_[same][0] == path[same]:
            same += 1
        found.update((start, number) for _, start in open_[same:])
        open_[same:] = [(name, number) for name in path[same:]]
    return found


def _path(scope: str) -> list[str]:
    path = split_call_path(scope)[0]
    return path.split(".") if path else []


class _Search:
    """The repeats found so far, and what they leave."""

    def __init__(self, graph: Graph) -> None:
        self.repeats: list[Repeat] = []
        self.left_alone: list[LeftAlone] = []
        self._graph = graph
        self._nodes = _Nodes(graph)
        self._gone = bytearray(len(graph.nodes))  # nodes of parts that are equal to an earlier one
        self._calls: dict[int, dict[int, int]] = defaultdict(
            dict
        )  # where parts begin and end -> the numbers of their repeats
        self._bodies: list[_Part] = [(0, len(graph.nodes))]

    def run(self) -> None:
        """Search whole modules, and then what they leave."""
        for parts in _groups(sorted(_modules(self._graph), key=lambda part: (part[0] - part[1], part[0]))):
            self.take(parts)
        for _ in range(_ROUNDS):
            if not self.look():
                break

    def take(self, parts: Sequence[_Part]) -> bool:
        """Take those of some parts of one length that are equal as repeats, if they are worth it."""
        groups: dict[object, list[_Part]] = defaultdict(list)
        free = [part for part in sorted(parts) if not self._gone[part[0]] and part[1] - part[0] > 1]
        for rough in self._nodes.alike(free):
            if folding_gain(rough[0][1] - rough[0][0], len(rough)) >= _LEAST:
                for part in rough:
                    groups[self._nodes.key(part)].append(part)
        return any([self._take_equal(group) for group in groups.values()])

    def look(self) -> bool:
        """Look for repeats in what is left; return whether there were some."""
        tokens: list[int] = []
        spans: list[_Part] = []
        for body, (start, end) in enumerate(self._bodies):
            number = start
            while number < end:
                within = [after for after in self._calls.get(number, ()) if start < number or after < end or body == 0]
                after = max((after for after in within if after <= end), default=0)
                repeat = self._calls[number][after] if after else 0
                tokens.append(-1 - repeat if after else self._nodes.tokens[number] + len(self._bodies))
                spans.append((number, after or number + 1))
                number = spans[-1][1]
            tokens.append(body)  # stands nowhere else
            spans.append((end, end))
        sizes = [after - number if after - number == 1 else 0 for number, after in spans]
        taken = bytearray(len(tokens))
        found = False
        for candidate in repeated_subsequences(tokens, sizes, _LEAST):
            starts = [start for start in candidate.starts if not any(taken[start : start + candidate.length])]
            parts = [(spans[start][0], spans[start + candidate.length - 1][1]) for start in starts]
            if len(parts) > 1 and self.take(parts):
                found = True
                for start in starts:
                    taken[start : start + candidate.length] = b"\1" * candidate.length
        return found

    def _take_equal(self, parts: Sequence[_Part]) -> bool:
        known = next((self._calls[first][after] for first, after in parts if after in self._calls[first]), None)
        if known is not None:  # more parts of a repeat, found where modules do not tell
            before, length = self.repeats[known].starts, self.repeats[known].length
            starts = {*before, *(first for first, _ in parts if first > before[0])}
            if len(starts) == len(before):
                return False
            parts = [(first, first + length) for first in sorted(starts)]
        start, end = parts[0]
        if folding_gain(end - start, len(parts)) < _LEAST:
            return False
        repeat = Repeat(length=end - start, starts=tuple(start for start, _ in parts))
        reason = self._nodes.effects(parts)
        if reason is not None:
            if known is None and not any(left.covers(repeat) for left in self.left_alone):
                self.left_alone.append(LeftAlone(repeat=repeat, reason=reason))
            return False
        number = len(self.repeats) if known is None else known
        for first, after in parts:
            self._calls[first][after] = number
        for first, after in parts[1:]:
            self._gone[first:after] = b"\1" * (after - first)
        if known is None:
            self._bodies.append((start, end))
            self.repeats.append(repeat)
        else:
            self.repeats[known] = repeat
        return True


class _Nodes:
    """The nodes of a graph without names, as numbers, and the names in them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[bytes, int] = {}
        self._types = dict(self._typed(graph))
        self.tokens: list[int] = []
        self._names: list[list[str]] = []
        for node in graph.nodes:
            names: list[str] = []
            key = self._key(node, names)
            self.tokens.append(self._known.setdefault(key, len(self._known)))
            self._names.append(names)
        self._last_use = {name: number for number, node in enumerate(graph.nodes) for name in input_names(node)}
        self._last_use |= dict.fromkeys(graph.outputs, len(graph.nodes))

    def alike(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """Parts of one length that begin and end with equal nodes, together."""
        groups: dict[tuple[int, int], list[_Part]] = defaultdict(list)
        for start, end in parts:
            groups[self.tokens[start], self.tokens[end - 1]].append((start, end))
        return iter(groups.values())

    def key(self, part: _Part) -> object:
        """What is the same for equal parts: the nodes, and which names are the same ones."""
        start, end = part
        seen: dict[str, int] = {}
        numbers = [seen.setdefault(name, len(seen)) for names in self._names[start:end] for name in names]
        return tuple(self.tokens[start:end]), tuple(numbers)

    def effects(self, parts: Sequence[_Part]) -> str | None:
        """Why parts that are equal are no functions of their inputs; None when they are."""
        start, end = parts[0]
        given_out: set[tuple[int, int]] = set()  # places of values that are used outside of one of the parts
        for first, after in parts:
            for number in range(first, after):
                for place, name in enumerate(output_names(self._graph.nodes[number])):
                    if self._last_use.get(name, 0) >= after:
                        given_out.add((number - first, place))
        outputs = [list(output_names(self._graph.nodes[start + number]))[place] for number, place in sorted(given_out)]
        return impurity_reason(self._graph, self._graph.nodes[start:end], outputs)

    def _typed(self, graph: Graph) -> Iterator[tuple[str, tuple[int, list[str]]]]:
        """Yield the type of each value and weight, as a number, and the names of symbols in it."""
        for value in (*graph.inputs, *(value for node in graph.nodes for value in node.outputs if value is not None)):
            symbols: list[str] = []
            key = _encode(_nameless_value(value, symbols))
            yield value.name, (self._known.setdefault(key, len(self._known)), symbols[1:])
        for weight in graph.weights:
            same = replace(weight, value="", names=("",) * len(weight.names), base=None if weight.base is None else "")
            yield weight.value, (self._known.setdefault(_encode(same), len(self._known)), [])

    def _key(self, node: Node, names: list[str]) -> bytes:
        """A node without names; `names` takes them, those of values used with the symbols of their types."""
        types: list[int] = []

        def nameless(leaf: Argument) -> Argument:
            if not isinstance(leaf, ValueArg):
                return leaf
            kind, symbols = self._types[leaf.name]
            types.append(kind)
            names.extend((leaf.name, *symbols))
            return ValueArg("")

        same = replace(
            map_node_arguments(node, nameless),
            outputs=tuple(None if value is None else _nameless_value(value, names) for value in node.outputs),
            scope=0,
        )
        return _encode((same, types, self._graph.scopes[node.scope].type))


def _nameless_value(value: Value, names: list[str]) -> Value:
    names.extend(names_in_value(value))
    return rename_value(value, lambda _: "")
