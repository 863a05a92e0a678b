"""`stages=N`: cut into N consecutive stages so that the slowest is as fast as possible."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from stagepack.errors import CutError, ExportWarning, warn_caller
from stagepack.format.dtypes import format_bytes
from stagepack.partition.activation_memory import activation_bytes
from stagepack.partition.cost_sequence import CostSequence, PartCost, SharedCost, part_cost
from stagepack.partition.costed_graph import CostedGraph
from stagepack.partition.node_order import NodeOrder, execution_order
from stagepack.partition.solver import split_sequence, split_with_least_excess

# How much slower the slowest stage may be so that no repeat is cut.
_WHOLE_REPEATS_SLOWDOWN = 1.05


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

    Of all cuts that split no colocation group, the one whose slowest stage is fastest; the time of a stage is that of its nodes on
    a device of its speed, and of receiving its inputs. Repeats are not cut when the slowest stage is at most a twentieth slower for
    it. When there are fewer positions to cut at than requested, the last stages are empty, and their positions are the end of the graph; an
    `ExportWarning` says so.

    memory: bytes of memory of the device of each stage; empty for no limits.
    speeds: speed of the device of each stage, relative to the others; empty for equal speeds.
    """
    if stage_count < 1:
        raise CutError(f"stages: expected at least 1, found {stage_count}")
    _check_devices("memory", memory, stage_count)
    _check_devices("speeds", speeds, stage_count)
    if not costed.graph.nodes:
        _warn_of_empty_stages(stage_count, 0, 0)
        return [0] * (stage_count - 1)
    sequence = cost_sequence(costed, execution_order(costed.graph) if order is None else order)
    filled_count = min(stage_count, len(sequence.split_positions) + 1)
    _warn_of_empty_stages(stage_count, filled_count, len(sequence.times))
    stage_speeds = list(speeds or [1.0] * stage_count)[:filled_count]
    limits: list[int | None] = [*memory[:filled_count]] or [None] * filled_count
    starts = split_sequence(sequence, stage_speeds, limits)
    if starts is None:
        raise CutError(_memory_message(sequence, limits))
    starts = _split_between_repeats(sequence, stage_speeds, limits, starts, repeat_interiors)
    return starts + [len(costed.graph.nodes)] * (stage_count - filled_count)


def _warn_of_empty_stages(stage_count: int, filled_count: int, node_count: int) -> None:
    """Warn if the model has too few positions to cut at for a number of stages."""
    if filled_count >= max(stage_count, 1) or stage_count == 1:
        return
    reason = (
        f"the model has only {node_count} operators"
        if filled_count == node_count
        else "the model has no other positions to cut at, because operators that use memory which calls write stay in one stage"
    )
    warn_caller(
        ExportWarning(
            f"stages: {stage_count} were asked for, and the last {stage_count - filled_count} are empty: {reason}: "
            f"{max(filled_count, 1)} would be enough",
        )
    )


def _check_devices(option: str, device_values: Sequence[float], stage_count: int) -> None:
    if device_values and len(device_values) != stage_count:
        raise CutError(f"{option}: expected {stage_count} numbers, one for each stage, found {len(device_values)}")
    if any(value <= 0 for value in device_values):
        raise CutError(f"{option}: expected numbers above 0, found {list(device_values)}")


def _split_between_repeats(
    sequence: CostSequence,
    speeds: Sequence[float],
    limits: Sequence[int | None],
    best_starts: list[int],
    repeat_interiors: Sequence[Collection[int]],
) -> list[int]:
    """A split that cuts no repeat when one is nearly as fast as the best split, else the best split."""
    longest_time = _slowest_time(sequence, best_starts, speeds) * _WHOLE_REPEATS_SLOWDOWN
    for interiors in repeat_interiors:
        positions = [position for position in sequence.split_positions if position not in interiors]
        if len(positions) < len(speeds) - 1:
            continue
        starts = split_sequence(replace(sequence, split_positions=positions), speeds, limits, longest_time=longest_time)
        if starts is not None and _slowest_time(sequence, starts, speeds) <= longest_time:
            return starts
    return best_starts


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
    users = {
        value_name: sorted(positions[node_number] for node_number in node_numbers)
        for value_name, node_numbers in analysis.users.items()
    }
    transfers = [
        SharedCost(
            cost=costs.link.sending_time(costs.value_bytes[value_name]),
            users=users[value_name],
            producer=positions[analysis.producers[value_name]] if value_name in analysis.producers else -1,
        )
        for value_name in analysis.values
        if value_name in costed.sent_values and value_name in users
    ]
    stored_bytes: dict[str, int] = {}
    stored_users: dict[str, set[int]] = {}
    for weight in analysis.graph.weights:
        stored_bytes[weight.stored] = costs.weight_bytes[weight.value]
        stored_users.setdefault(weight.stored, set()).update(users.get(weight.value, ()))
    inside_groups: set[int] = set()
    for group in analysis.colocation_groups:
        group_positions = [positions[node_number] for node_number in group.nodes]
        inside_groups.update(range(min(group_positions) + 1, max(group_positions) + 1))
    return CostSequence(
        times=[costs.node_times[node_number] for node_number in order.node_numbers],
        transfers=transfers,
        weights=[
            SharedCost(cost=stored_bytes[tensor_name], users=sorted(weight_users))
            for tensor_name, weight_users in stored_users.items()
            if weight_users
        ],
        working_bytes=activation_bytes(analysis, costs, order),
        split_positions=[position for position in range(1, len(positions)) if position not in inside_groups],
    )
