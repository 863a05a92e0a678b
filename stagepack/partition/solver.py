"""Split a sequence of items into consecutive parts so that the slowest part is as fast as possible.

Exact, by dynamic programming over all split positions: about ``items ** 2 / parts`` steps of vector arithmetic. Of the splits with the
fastest slowest part, the one with the least sum of squares is taken, so that the other parts are even too. Times are in picoseconds,
memory in bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stagepack.partition.cost_sequence import CostSequence, SharedCost

_COARSE_STEP = 16
# Rounding must leave out no split that is as good as the bound.
_ROUNDING = 1 + 1e-9

# Also of picoseconds and bytes: exact up to 2**53, and a bundle may state costs whose sums are no int64.
_Floats = NDArray[np.float64]


def split_sequence(
    sequence: CostSequence,
    speeds: Sequence[float],
    memory_limits: Sequence[int | None],
    *,
    longest_time: float | None = None,
) -> list[int] | None:
    """Find the split whose slowest part is fastest.

    sequence: the items; it has at least ``len(speeds) - 1`` split positions.
    memory_limits: bytes of memory of the device of each part; None for no limit.
    longest_time: picoseconds; splits with a slower part may be ignored. None for no bound.
    The result is the items in front of which the sequence is split, ``len(speeds) - 1`` of them; no part is empty. None when no split fits
        into the memory, or when `longest_time` excludes all splits.
    """
    fastest = max(speeds) * _ROUNDING
    cost = _time_function(speeds, memory_limits)
    has_limits = any(limit is not None for limit in memory_limits)
    if longest_time is None:
        # The best split at every 16th position bounds how long a part of the best split can be.
        coarse = replace(sequence, split_positions=sequence.split_positions[::_COARSE_STEP])
        longest_time = _PartTable(coarse, len(speeds), has_limits=has_limits).best(cost, np.maximum)[0]
    table = _PartTable(sequence, len(speeds), has_limits=has_limits)
    slowest = table.best(cost, np.maximum, longest_time * fastest)[0]
    if slowest == math.inf:
        return None

    def squared_time(parts: _Parts) -> _Floats:
        times = cost(parts)
        return np.where(times <= slowest, (times / slowest) ** 2, np.inf)

    return table.best(squared_time, np.add, slowest * fastest)[1]


def split_with_least_excess(sequence: CostSequence, memory_limits: Sequence[int | None]) -> list[int]:
    """Find the split whose part that exceeds its memory limit most exceeds it by as few bytes as possible.

    sequence: the items; it has at least ``len(memory_limits) - 1`` split positions.
    memory_limits: bytes of memory of the device of each part; None for no limit.
    The result is the items in front of which the sequence is split; no part is empty.
    """
    ceilings = _column([math.inf if limit is None else limit for limit in memory_limits])
    table = _PartTable(sequence, len(memory_limits), has_limits=True)
    return table.best(lambda parts: np.maximum(parts.memory_bytes - ceilings, 0.0), np.maximum)[1]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that begin at one split position, by where they end: vectors ``[end]``."""

    compute_times: _Floats
    receiving_times: _Floats
    memory_bytes: _Floats


# The costs of parts: a matrix ``[part number, end]``, or ``[1, end]`` when they do not depend on the number of the part.
_CostFunction = Callable[[_Parts], _Floats]


def _time_function(speeds: Sequence[float], memory_limits: Sequence[int | None]) -> _CostFunction:
    """The times of parts, infinite for parts that exceed their memory limit."""
    speed_column = _column(speeds)
    if all(limit is None for limit in memory_limits):
        return lambda parts: parts.compute_times / speed_column + parts.receiving_times
    ceilings = _column([math.inf if limit is None else limit for limit in memory_limits])

    def times(parts: _Parts) -> _Floats:
        return np.where(
            parts.memory_bytes <= ceilings, parts.compute_times / speed_column + parts.receiving_times, np.inf
        )

    return times


def _column(part_values: Sequence[float]) -> _Floats:
    """One row for each part, or a single row when all are equal."""
    return np.array(part_values[:1] if len(set(part_values)) == 1 else part_values, dtype=np.float64)[:, None]


class _PartTable:
    """All parts of a sequence."""

    def __init__(self, sequence: CostSequence, part_count: int, *, has_limits: bool) -> None:
        self._sequence = sequence
        self._part_count = part_count
        self._has_limits = has_limits
        self._ends = np.array([0, *sequence.split_positions, len(sequence.times)], dtype=np.int64)
        # The time of all items in front of each split position.
        self._times_before = np.concatenate([[0], np.cumsum(np.array(sequence.times, dtype=np.float64))])[self._ends]

    def best(
        self, cost: _CostFunction, combine: Callable[..., _Floats], longest_time: float = math.inf
    ) -> tuple[float, list[int]]:
        """Find the split with the least total cost.

        longest_time: parts whose items take more picoseconds than this are ignored, except parts of one item.
        """
        end_count = len(self._ends)
        # [part number, start]: the least cost of this part and all parts after it; the last row is the end of the sequence.
        least_costs = np.full((self._part_count + 1, end_count), np.inf)
        least_costs[self._part_count, end_count - 1] = 0.0
        best_ends = np.zeros((self._part_count, end_count), dtype=np.int64)
        rows = np.arange(self._part_count)
        for start, parts in self._parts_from_the_end(longest_time):
            later_costs = least_costs[1:, start + 1 : start + 1 + len(parts.compute_times)]
            totals = combine(cost(parts), later_costs)
            best = totals.argmin(axis=1)
            least_costs[:-1, start] = totals[rows, best]
            best_ends[:, start] = best + start + 1
        starts = [0]
        for part_number in range(self._part_count - 1):
            starts.append(int(best_ends[part_number, starts[-1]]))
        return float(least_costs[0, 0]), [int(self._ends[start]) for start in starts[1:]]

    def _parts_from_the_end(self, longest_time: float) -> Iterator[tuple[int, _Parts]]:
        """Yield the index of each split position from the last to the first, with the parts that begin there."""
        item_count = len(self._sequence.times)
        transfers = _NextUseCosts(self._sequence.transfers, item_count)
        weights = _NextUseCosts(self._sequence.weights if self._has_limits else (), item_count)
        working_bytes = np.array(self._sequence.working_bytes, dtype=np.float64)
        no_memory = np.zeros(len(self._ends), dtype=np.float64)
        # For each split position, the one after the last at which a part that begins there may end.
        stops = np.searchsorted(self._times_before, self._times_before + longest_time, side="right")
        start = len(self._ends) - 2
        for item in reversed(range(item_count)):
            transfers.step_back(item)
            weights.step_back(item)
            if self._ends[start] != item:
                continue
            ends = slice(start + 1, max(start + 2, int(stops[start])))
            last_items = self._ends[ends] - item - 1
            items = slice(item, item + int(last_items[-1]) + 1)
            memory_bytes = no_memory[ends]
            if self._has_limits:
                working_peaks = np.maximum.accumulate(working_bytes[items])
                memory_bytes = (np.cumsum(weights.costs[items]) + working_peaks)[last_items]
            yield (
                start,
                _Parts(
                    self._times_before[ends] - self._times_before[start],
                    np.cumsum(transfers.costs[items])[last_items],
                    memory_bytes,
                ),
            )
            start -= 1


class _NextUseCosts:
    """Shared costs at the items that use them next, seen from an item that moves from the end of the sequence to its start."""

    def __init__(self, shared_costs: Sequence[SharedCost], item_count: int) -> None:
        self.costs = np.zeros(item_count, dtype=np.float64)
        self._used_at: list[list[int]] = [[] for _ in range(item_count)]
        self._produced_at: list[list[int]] = [[] for _ in range(item_count)]
        self._costs_by_index = [shared_cost.cost for shared_cost in shared_costs]
        self._next_users: list[int | None] = [None] * len(shared_costs)
        for index, shared_cost in enumerate(shared_costs):
            for user in shared_cost.users:
                self._used_at[user].append(index)
            if shared_cost.producer >= 0:
                self._produced_at[shared_cost.producer].append(index)

    def step_back(self, item: int) -> None:
        """Move to an item: its uses come next, and what it produces need not be received."""
        for index in self._used_at[item]:
            self._remove(index)
            self._next_users[index] = item
            self.costs[item] += self._costs_by_index[index]
        for index in self._produced_at[item]:
            self._remove(index)

    def _remove(self, index: int) -> None:
        next_user = self._next_users[index]
        if next_user is not None:
            self.costs[next_user] -= self._costs_by_index[index]
            self._next_users[index] = None
