"""Runs of nodes that occur in a graph several times, equal up to names."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Lengths of repeats that `repeat_interiors` leaves out one after another, at most.
_MOST_LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Equal runs of nodes.

    Attributes:
        length: the number of nodes of each run.
        starts: the numbers of their first nodes, ascending; at least two. Runs inside of runs of another repeat are listed for the
            first run of that repeat alone.
    """

    length: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpureRepeat:
    """Equal runs of nodes that are not functions of their inputs, so that they cannot be folded.

    Attributes:
        repeat: the runs.
        reason: why they are impure.
    """

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
    """The repeats of a graph.

    Attributes:
        repeats: the repeats that can be folded; one that is inside of another comes after it.
        impure: the repeats that cannot.
    """

    repeats: tuple[Repeat, ...]
    impure: tuple[ImpureRepeat, ...]


def all_starts(repeats: Sequence[Repeat]) -> list[list[int]]:
    """List the starts of all runs of each repeat, those inside of any run of a longer repeat too.

    The result is for each repeat, the numbers of the first nodes of its runs, ascending.
    """
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
    """List the positions at which a cut would divide a repeated run.

    The result is sets of nodes in front of which a cut would be inside of a run: first those inside of any run, then again without the
        longest runs, and so on.
    """
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
