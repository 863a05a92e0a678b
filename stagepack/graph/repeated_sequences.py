"""Repeated parts of a sequence of numbers.

By the intervals of its suffix array with longest common prefixes, which are the inner nodes of its suffix tree (Abouelhoda, Kurtz,
Ohlebusch, 2004, doi:10.1016/S1570-8667(03)00065-0).
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Parts of a sequence that are equal: their length, and where they begin, ascending. None overlaps the next."""

    length: int
    starts: tuple[int, ...]


def repeated_subsequences(sequence: Sequence[int], sizes: Sequence[int], least: int) -> list[Repeated]:
    """The repeated parts that are worth a region, best first; different ones may overlap.

    Args:
        sequence: the items, as numbers.
        sizes: how much each item is worth.
        least: what a repeat must save, see `worth`.
    """
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    order = _suffixes(sequence)
    found: list[tuple[int, int, int, int]] = []
    for common, low, high, gap in _intervals(order, _common_prefixes(sequence, order)):
        length = min(common, gap)
        first = order[low]
        saved = folding_gain(total[first + length] - total[first], high - low + 1)
        if saved >= least:
            found.append((-saved, length, low, high))
    return [
        Repeated(length=length, starts=tuple(sorted(order[low : high + 1]))) for _, length, low, high in sorted(found)
    ]


def folding_gain(size: int, count: int) -> int:
    """What it saves to write a part of so many nodes once and to call it, where a call counts as two nodes."""
    return (count - 1) * size - 2 * count


def _suffixes(sequence: Sequence[int]) -> list[int]:
    """The suffix array, by prefix doubling (Manber, Myers, 1990)."""
    count, step = len(sequence), 1
    keys: Sequence[int] = sequence
    while True:
        order = sorted(range(count), key=keys.__getitem__)
        rank, number = [0] * count, 0
        for place, start in enumerate(order):
            number += place > 0 and keys[start] != keys[order[place - 1]]
            rank[start] = number
        if number == count - 1 or step >= count:
            return order
        after = [*rank[step:], *([-1] * step)]
        keys = [one * (count + 1) + other + 1 for one, other in zip(rank, after, strict=True)]
        step *= 2


def _common_prefixes(sequence: Sequence[int], order: Sequence[int]) -> list[int]:
    """How many items each suffix shares with the one before it in the order (Kasai et al., 2001)."""
    rank = [0] * len(order)
    for place, start in enumerate(order):
        rank[start] = place
    common, shared = [0] * len(order), 0
    for start, place in enumerate(rank):
        if place == 0:
            shared = 0
            continue
        other = order[place - 1]
        longest = len(order) - max(start, other)
        while shared < longest and sequence[start + shared] == sequence[other + shared]:
            shared += 1
        common[place] = shared
        shared = max(0, shared - 1)
    return common


def _intervals(order: Sequence[int], common: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (length, first and last place in the order, smallest distance of two starts) of each repeated part."""
    stack = [_Interval(0, 0, [], len(order) + 1)]
    for place in range(1, len(order) + 1):
        shared = common[place] if place < len(order) else 0
        closed = _Interval(len(order), place - 1, [order[place - 1]], len(order) + 1)
        while stack[-1].length > shared:
            top = stack.pop()
            top.take(closed)
            yield top.length, top.low, place - 1, top.gap
            closed = top
        if stack[-1].length < shared:
            stack.append(_Interval(shared, closed.low, [], len(order) + 1))
        stack[-1].take(closed)


@dataclass(slots=True)
class _Interval:
    length: int
    low: int
    starts: list[int]  # ascending
    gap: int

    def take(self, other: "_Interval") -> None:
        """Add the starts of another, those of the smaller one into the larger."""
        few, many = sorted((self.starts, other.starts), key=len)
        self.gap = min(self.gap, other.gap)
        for start in few:
            at = bisect.bisect(many, start)
            for beside in many[max(0, at - 1) : at + 1]:
                self.gap = min(self.gap, abs(start - beside))
            many.insert(at, start)
        self.starts, other.starts = many, []
