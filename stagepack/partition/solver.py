"""Split a sequence of items into consecutive parts so that the slowest part is as fast as possible.

Exact, by dynamic programming over all split positions: about ``items ** 2 / parts`` steps of vector arithmetic. Of the splits with the
fastest slowest part, the one with the least sum of squares is taken, so that the other parts are even too. Times are in picoseconds,
memory in bytes.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stagepack.errors import CutError
from stagepack.format.quantities import format_bytes
from stagepack.partition.assignment import NodeOrder, execution_order
from stagepack.partition.recipes import CostedGraph, activation_bytes

_COARSE_STEP = 16
# Rounding must leave out no split that is as good as the bound.
_ROUNDING = 1 + 1e-9
# Also of picoseconds and bytes: exact up to 2**53, and a bundle may state costs whose sums are no int64.
_Floats = NDArray[np.float64]
# How much slower the slowest stage may be so that no repeat is cut.
_WHOLE_REPEATS_SLOWDOWN = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCost:
    """A cost that a part has once, however many of its items use what causes it."""

    # Picoseconds for a value that is received, bytes for a weight that is held.
    cost: int
    users: Sequence[int]
    # The item that produces it, since a part with this item need not receive it; -1 for an input from outside.
    producer: int = -1

    def is_used(self, start: int, end: int) -> bool:
        """Tell whether a part has the cost, apart from its producer."""
        first_user = bisect.bisect_left(self.users, start)
        return first_user < len(self.users) and self.users[first_user] < end


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSequence:
    """Items in order, with their costs."""

    times: Sequence[int]
    transfers: Sequence[SharedCost]
    weights: Sequence[SharedCost]
    # Memory in use while an item runs, besides the weights.
    working_bytes: Sequence[int]
    split_positions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The cost of consecutive items."""

    # On a device of speed 1.
    compute_time: int
    receiving_time: int
    weight_bytes: int
    # `weight_bytes` and the most working memory of an item.
    memory_bytes: int

    def time_at(self, speed: float) -> float:
        """Return the time on a device, including the time of receiving."""
        return self.compute_time / speed + self.receiving_time


def part_cost(sequence: CostSequence, start: int, end: int) -> PartCost:
    """Compute the cost of consecutive items."""
    received = (value for value in sequence.transfers if value.producer < start)
    weight_bytes = sum(weight.cost for weight in sequence.weights if weight.is_used(start, end))
    return PartCost(
        compute_time=sum(sequence.times[start:end]),
        receiving_time=sum(value.cost for value in received if value.is_used(start, end)),
        weight_bytes=weight_bytes,
        memory_bytes=weight_bytes + max(sequence.working_bytes[start:end], default=0),
    )


def split_sequence(
    sequence: CostSequence,
    speeds: Sequence[float],
    memory_limits: Sequence[int | None],
    *,
    longest_time: float | None = None,
) -> list[int] | None:
    """Find the items in front of which a sequence is split so that the slowest part is fastest; None if no split fits into the memory.

    It has at least ``len(speeds) - 1`` split positions. Splits with a part that takes longer than `longest_time` may be ignored.
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
    """Find the split whose part that exceeds its memory limit most exceeds it by as few bytes as possible."""
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
        """Find the split with the least total cost, and this cost. Longer parts are ignored, except parts of one item."""
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


def balance_stages(
    costed: CostedGraph,
    stage_count: int,
    *,
    order: NodeOrder | None = None,
    memory: Sequence[int] = (),
    speeds: Sequence[float] = (),
    repeat_interiors: Sequence[Collection[int]] = (),
) -> list[int]:
    """Choose where to cut a model into consecutive stages.

    Of all cuts that split no colocation group, the one whose slowest stage is fastest; a stage takes the time of its nodes on a device of
    its speed, and the time of receiving its inputs. Repeats are not cut when the slowest stage is at most a twentieth slower for it.
    """
    if stage_count < 1:
        raise CutError(f"stages: expected at least 1, found {stage_count}")
    _check_devices("memory", memory, stage_count)
    _check_devices("speeds", speeds, stage_count)
    node_count = len(costed.graph.nodes)
    order = execution_order(costed.graph) if order is None else order
    sequence = cost_sequence(costed, order)
    most = len(sequence.split_positions) + 1
    if stage_count > most:
        reason = ", and those that use memory which calls write stay in one stage" if most < node_count else ""
        raise CutError(
            f"stages: expected at most {most}, found {stage_count}: the model has {node_count} operators{reason}"
        )
    if not node_count:
        return []
    stage_speeds = list(speeds or [1.0] * stage_count)
    limits: list[int | None] = [*memory] or [None] * stage_count
    starts = split_sequence(sequence, stage_speeds, limits)
    if starts is None:
        raise CutError(_memory_message(sequence, limits))
    starts = _split_between_repeats(sequence, stage_speeds, limits, starts, repeat_interiors)
    working = [position for position, node in enumerate(order.node_numbers) if node not in costed.size_nodes]
    return _split_without_idle_parts(sequence, stage_speeds, limits, starts, working)


def _split_without_idle_parts(
    sequence: CostSequence,
    speeds: Sequence[float],
    limits: Sequence[int | None],
    best: list[int],
    working: Sequence[int],
) -> list[int]:
    """The best split, or the best one that leaves no part without one of the working items, if there is one: other items take no time."""
    ends = itertools.pairwise([0, *best, len(sequence.times)])
    if all(bisect.bisect_left(working, start) < bisect.bisect_left(working, end) for start, end in ends):
        return best
    positions = sorted({item + 1 for item in working[:-1]}.intersection(sequence.split_positions))
    enough = len(positions) >= len(speeds) - 1
    return (enough and split_sequence(replace(sequence, split_positions=positions), speeds, limits)) or best


def _check_devices(option: str, device_values: Sequence[float], stage_count: int) -> None:
    if device_values and len(device_values) != stage_count:
        raise CutError(f"{option}: expected {stage_count} numbers, one for each stage, found {len(device_values)}")
    if any(value <= 0 for value in device_values):
        raise CutError(f"{option}: expected numbers above 0, found {list(device_values)}")


def _split_between_repeats(
    sequence: CostSequence,
    speeds: Sequence[float],
    limits: Sequence[int | None],
    best: list[int],
    repeat_interiors: Sequence[Collection[int]],
) -> list[int]:
    """A split that cuts no repeat when one is nearly as fast as the best split, else the best split."""
    longest_time = _slowest_time(sequence, best, speeds) * _WHOLE_REPEATS_SLOWDOWN
    for interiors in repeat_interiors:
        positions = [position for position in sequence.split_positions if position not in interiors]
        if len(positions) < len(speeds) - 1:
            continue
        starts = split_sequence(replace(sequence, split_positions=positions), speeds, limits, longest_time=longest_time)
        if starts is not None and _slowest_time(sequence, starts, speeds) <= longest_time:
            return starts
    return best


def _slowest_time(sequence: CostSequence, starts: Sequence[int], speeds: Sequence[float]) -> float:
    """The time of the slowest stage, in picoseconds."""
    return max(part.time_at(speed) for part, speed in zip(_part_costs(sequence, starts), speeds, strict=True))


def _part_costs(sequence: CostSequence, starts: Sequence[int]) -> list[PartCost]:
    ends = itertools.pairwise([0, *starts, len(sequence.times)])
    return [part_cost(sequence, start, end) for start, end in ends]


def _memory_message(sequence: CostSequence, limits: Sequence[int | None]) -> str:
    """Which stage lacks how many bytes, in the cut that lacks least."""
    starts = split_with_least_excess(sequence, limits)
    parts = _part_costs(sequence, starts)
    limited = [
        (part, limit, stage_number)
        for stage_number, (part, limit) in enumerate(zip(parts, limits, strict=True))
        if limit
    ]
    part, limit, stage_number = max(limited, key=lambda entry: entry[0].memory_bytes - entry[1])
    activations = part.memory_bytes - part.weight_bytes
    bounds = [0, *starts, len(sequence.times)]
    is_divisible = any(
        bounds[stage_number] < position < bounds[stage_number + 1] for position in sequence.split_positions
    )
    cure = "give more memory, or more stages" if is_divisible else "give more memory: it cannot be cut further"
    return (
        f"memory: no cut fits: in the nearest one, stage {stage_number} needs {format_bytes(part.memory_bytes)} "
        f"({format_bytes(part.weight_bytes)} of weights, {format_bytes(activations)} for activations at the example's sizes), and its "
        f"device has {format_bytes(limit)}, {format_bytes(part.memory_bytes - limit)} too little: {cure}"
    )


def cost_sequence(costed: CostedGraph, order: NodeOrder) -> CostSequence:
    """Describe the nodes of a graph as items to split, so that no split divides a colocation group."""
    analysis, costs, positions = costed.analysis, costed.costs, order.positions
    receivers: dict[str, list[int]] = {}
    for position, node_number in enumerate(order.node_numbers):
        for value_name in costed.received_names[node_number]:
            receivers.setdefault(value_name, []).append(position)
    transfers = [
        SharedCost(
            cost=costs.link.sending_time(costs.value_bytes[value_name]),
            users=receivers[value_name],
            producer=positions[analysis.producers[value_name]] if value_name in analysis.producers else -1,
        )
        for value_name in analysis.values
        if value_name in costed.sent_values and value_name in receivers
    ]
    stored_bytes = {weight.stored: costs.weight_bytes[weight.value] for weight in analysis.graph.weights}
    users_of: dict[str, set[int]] = {}
    for weight in analysis.graph.weights:
        weight_users = map(positions.__getitem__, analysis.users.get(weight.value, ()))
        users_of.setdefault(weight.stored, set()).update(weight_users)
    inside_groups: set[int] = set()
    for group in analysis.colocation_groups:
        group_positions = [positions[node_number] for node_number in group.nodes]
        inside_groups.update(range(min(group_positions) + 1, max(group_positions) + 1))
    return CostSequence(
        times=[costs.node_times[node_number] for node_number in order.node_numbers],
        transfers=transfers,
        weights=[
            SharedCost(cost=stored_bytes[tensor], users=sorted(users)) for tensor, users in users_of.items() if users
        ],
        working_bytes=activation_bytes(analysis, costs, order),
        split_positions=[position for position in range(1, len(positions)) if position not in inside_groups],
    )
