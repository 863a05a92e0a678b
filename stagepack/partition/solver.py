"""Split a row of items into consecutive parts so that the slowest part is as fast as possible.

Exact, by dynamic programming over all places to split at: about ``items ** 2 / parts`` steps of vector arithmetic. Of the
splits with the fastest slowest part the one with the least sum of squares is taken, so that the other parts are even too.
Times are in picoseconds, memory in bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_COARSE = 16
_PICOSECONDS_PER_BYTE_SENT = 40  # 25 GB/s: PCIe 4.0 x16, as it is measured
_PICOSECONDS_PER_VALUE_SENT = 5_000_000

_Vector = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCost:
    """What a part needs once when one of its items uses it.

    Attributes:
        cost: what that costs: picoseconds for what is sent, bytes for what is held.
        uses: the items that use it, ascending.
        maker: the item that makes it; a part with this item need not receive it. -1 for what comes from outside.
    """

    cost: int
    uses: tuple[int, ...]
    maker: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSequence:
    """The items, in order.

    Attributes:
        times: of each item on a device of speed 1.
        sent: what a part receives when it uses it and does not make it.
        held: what a part holds in memory when it uses it.
        working: memory in use while an item runs, beside what is held.
        places: where it may be split, ascending: before the items with these numbers.
    """

    times: Sequence[int]
    sent: Sequence[SharedCost]
    held: Sequence[SharedCost]
    working: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What the items from `start` to `end` (excluded) cost: their own time, that of receiving, and the memory."""

    time: int
    receiving: int
    held: int
    memory: int

    def time_on(self, speed: float) -> float:
        """Picoseconds on a device of that speed, what it takes to receive included."""
        return self.time / speed + self.receiving


def transfer_time(count: int) -> int:
    """How long so many bytes take from one device to another once they are under way, in picoseconds."""
    return count * _PICOSECONDS_PER_BYTE_SENT


def sending_time(count: int) -> int:
    """How long it takes to send a value of so many bytes, in picoseconds."""
    return _PICOSECONDS_PER_VALUE_SENT + transfer_time(count)


def part_cost(row: CostSequence, start: int, end: int) -> PartCost:
    """The cost of one part."""
    received = (shared for shared in row.sent if shared.maker < start)
    held = sum(shared.cost for shared in row.held if any(start <= use < end for use in shared.uses))
    return PartCost(
        time=sum(row.times[start:end]),
        receiving=sum(shared.cost for shared in received if any(start <= use < end for use in shared.uses)),
        held=held,
        memory=held + max(row.working[start:end], default=0),
    )


def split_sequence(row: CostSequence, speeds: Sequence[float], limits: Sequence[int | None]) -> list[int] | None:
    """Where to split into ``len(speeds)`` parts, none of them empty: before the items with these numbers.

    Part number i runs on a device of speed ``speeds[i]`` with ``limits[i]`` bytes of memory. None when no split fits into the
    memory. There must be at least as many places, and one, as parts.
    """
    ceilings = np.array([math.inf if limit is None else limit for limit in limits])[:, None]
    speed = np.array(speeds, dtype=np.float64)[:, None]

    def cost(parts: "_Parts") -> NDArray[np.float64]:
        return np.where(parts.memory <= ceilings, parts.time / speed + parts.receiving, np.inf)

    table = _Table(row, len(speeds))
    # The best of the splits at every 16th place alone bounds how long a part of the best split can be.
    fastest = max(speeds) * (1 + 1e-9)  # a hair more, so that rounding leaves nothing out
    coarse = _Table(replace(row, places=row.places[::_COARSE]), len(speeds))
    bound = coarse.best(cost, np.maximum)[0]
    slowest = table.best(cost, np.maximum, bound * fastest)[0]
    if slowest == math.inf:
        return None

    def unevenness(parts: "_Parts") -> NDArray[np.float64]:
        found = cost(parts)
        return np.where(found <= slowest, (found / slowest) ** 2, np.inf)

    return table.best(unevenness, np.add, slowest * fastest)[1]


def split_with_least_excess(row: CostSequence, limits: Sequence[int | None]) -> list[int]:
    """Where to split so that the part that exceeds its memory most exceeds it by as few bytes as possible."""
    ceilings = np.array([math.inf if limit is None else limit for limit in limits])[:, None]
    return _Table(row, len(limits)).best(lambda parts: np.maximum(parts.memory - ceilings, 0.0), np.maximum)[1]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that begin at one place, by where they end."""

    time: _Vector
    receiving: _Vector
    memory: _Vector


class _Table:
    """All parts of a row."""

    def __init__(self, row: CostSequence, parts: int) -> None:
        self.row = row
        self.parts = parts
        self.ends = np.array([0, *row.places, len(row.times)], dtype=np.int64)
        self.times = np.concatenate([[0], np.cumsum(np.array(row.times, dtype=np.int64))])[
            self.ends
        ]  # up to each place

    def best(
        self,
        cost: Callable[[_Parts], NDArray[np.float64]],
        join: Callable[..., NDArray[np.float64]],
        longest: float = math.inf,
    ) -> tuple[float, list[int]]:
        """The least total cost of a split, and where it splits; `join` adds the cost of one part to that of the parts after it.

        `cost` gives a matrix: the part's number by where it ends. Parts whose items take more than `longest` picoseconds are not
        looked at, but that every part may have one item.
        """
        last = len(self.ends) - 1
        least = np.full((self.parts + 1, last + 1), np.inf)  # of the parts from a number on that begin at a place
        least[self.parts, last] = 0.0
        choice = np.zeros((self.parts, last + 1), dtype=np.int64)
        for place, parts in self._from_the_end(longest):
            total = join(cost(parts), least[1:, place + 1 : place + 1 + len(parts.time)])
            ends = total.argmin(axis=1)
            least[:-1, place] = total[np.arange(self.parts), ends]
            choice[:, place] = ends + place + 1
        places = [0]
        for part in range(self.parts - 1):
            places.append(int(choice[part, places[-1]]))
        return float(least[0, 0]), [int(self.ends[place]) for place in places[1:]]

    def _from_the_end(self, longest: float) -> Iterator[tuple[int, _Parts]]:
        """Yield, for each place but the end from the last to the first, its number and the parts that begin there."""
        row = self.row
        items = len(row.times)
        sent, held = _NextUse(row.sent, items), _NextUse(row.held, items)
        working = np.array(row.working, dtype=np.int64)
        place = len(self.ends) - 2
        for item in reversed(range(items)):
            sent.step(item)
            held.step(item)
            if self.ends[place] == item:
                count = max(1, int(np.searchsorted(self.times[place + 1 :], self.times[place] + longest, side="right")))
                ends = self.ends[place + 1 : place + 1 + count]
                within = ends - item - 1
                reach = slice(item, ends[-1])
                memory = np.cumsum(held.costs[reach]) + np.maximum.accumulate(working[reach])
                time = self.times[place + 1 : place + 1 + count] - self.times[place]
                yield place, _Parts(time, np.cumsum(sent.costs[reach])[within], memory[within])
                place -= 1


class _NextUse:
    """Costs by the item that causes them next, seen from an item that moves from the end to the begin."""

    def __init__(self, shared: Sequence[SharedCost], count: int) -> None:
        self.costs = np.zeros(count, dtype=np.int64)
        self._used: list[list[int]] = [[] for _ in range(count)]
        self._made: list[list[int]] = [[] for _ in range(count)]
        self._sizes = [entry.cost for entry in shared]
        self._next: list[int | None] = [None] * len(shared)
        for number, entry in enumerate(shared):
            for use in entry.uses:
                self._used[use].append(number)
            if entry.maker >= 0:
                self._made[entry.maker].append(number)

    def step(self, item: int) -> None:
        """Move to the item before: what it uses is used there next, and what it makes is not needed before it."""
        for number in self._used[item]:
            self._forget(number)
            self._next[number] = item
            self.costs[item] += self._sizes[number]
        for number in self._made[item]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        known = self._next[number]
        if known is not None:
            self.costs[known] -= self._sizes[number]
            self._next[number] = None
