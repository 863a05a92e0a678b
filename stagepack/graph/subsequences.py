"""Repeated subsequences of a sequence of integers.

Found by the intervals of its suffix array with longest common prefixes, which are the internal nodes of its suffix tree (Abouelhoda, Kurtz,
Ohlebusch, 2004, doi:10.1016/S1570-8667(03)00065-0).
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Equal runs of nodes, or of other items of a sequence, that do not overlap."""

    length: int  # the number of nodes of each run
    # The numbers of their first nodes, ascending; at least two. Runs inside of runs of another repeat are listed for the first run of
    # that repeat alone.
    starts: tuple[int, ...]


def repeated_subsequences(sequence: Sequence[int], sizes: Sequence[int], least_gain: int) -> list[Repeat]:
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
        Repeat(length=length, starts=tuple(sorted(order[low : high + 1])))
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
