"""The placement of a bundle's stages: consecutive stages joined into one part for each device. Reads no file but the manifest."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stagepack.errors import DeviceError, OptionError
from stagepack.format.chunks import File
from stagepack.format.graph import value_bytes
from stagepack.format.manifest import EntryPoint
from stagepack.format.quantities import format_bytes, format_time
from stagepack.format.shapes import example_sizes
from stagepack.partition.costs import REFERENCE_LINK, LinkCosts
from stagepack.partition.grouping import group_stages, group_with_least_excess
from stagepack.partition.links import DEFAULT_LINKS, Link, link_costs
from stagepack.partition.part_costs import DeviceCosts, StageCosts, part_times
from stagepack.partition.shared_weights import weight_costs
from stagepack.partition.solver import CostSequence, SharedCost, split_sequence
from stagepack.partition.target_devices import TargetDevice, planned_stages, stage_times

# 512 stages over as many devices take 10 s and 0.5 GB.
_MOST_DEVICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    """Consecutive stages on a device. Times are in picoseconds, for one call at the sizes of the example.

    Attributes:
        device: the device.
        stages: the numbers of the stages.
        weight_bytes: bytes of their weights, state included; a weight that several of them use counts once.
        memory: bytes of memory: the weights, what arrives for the next call, and the activations of the stage that has most.
        computing: the time of its operators.
        receiving: the time of receiving values from other devices and from the caller.
    """

    device: TargetDevice
    stages: range
    weight_bytes: int
    memory: int
    computing: int
    receiving: int

    @property
    def time(self) -> int:
        """The time of one call."""
        return self.computing + self.receiving

    @property
    def stage_text(self) -> str:
        """The stages for people: ``stage 4``, ``stages 0 to 3``."""
        first, last = self.stages[0], self.stages[-1]
        return f"stage {first}" if first == last else f"stages {first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A device without stages, and why."""

    device: TargetDevice
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The stages of each device.

    Attributes:
        stages_per_device: the number of stages of each device, in the order of the caller; 0 for a device that is left out.
        parts: the devices that have stages, in order.
        left_out: the others.
    """

    stages_per_device: tuple[int, ...]
    parts: tuple[PlacedPart, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def bottleneck(self) -> PlacedPart:
        """The slowest part."""
        return max(self.parts, key=lambda part: part.time)

    @property
    def call_time(self) -> int:
        """The time of one call through all parts, in picoseconds."""
        return sum(part.time for part in self.parts)

    @property
    def interval(self) -> int:
        """The time from one answer to the next one when all parts work on calls of their own, in picoseconds."""
        return self.bottleneck.time

    def __str__(self) -> str:
        """Return the placement in one line."""
        parts = ", ".join(f"{part.stage_text} on {part.device}" for part in self.parts)
        without = "".join(f"; not used: {left_out.device} ({left_out.reason})" for left_out in self.left_out)
        times = f"{format_time(self.call_time)} for one call, {format_time(self.interval)} for each of many"
        return f"{parts}; estimated {times}{without}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What another device or link would give.

    Attributes:
        change: the change, in words.
        call_time: the time of one call then, in picoseconds.
        interval: the time from one answer to the next one then, in picoseconds.
    """

    change: str
    call_time: int
    interval: int


def place(
    entry_point: EntryPoint,
    devices: Sequence[TargetDevice],
    *,
    files: Iterable[File] = (),
    links: Mapping[str, Link] | None = None,
    stages_per_device: Sequence[int] | None = None,
    pipelined: bool = True,
) -> Placement:
    """Choose consecutive stages for each device.

    The slowest part is as fast as possible, and no part needs more memory than its device has. A device that makes the slowest part less
    than 1 % faster gets no stages.

    devices: in the order of the stages.
    files: those of the bundle: a weight file that several stages of a part share counts once. Without them, each stage counts it.
    links: by name: ``"device"`` between devices of one host, ``"host"`` between hosts. Others have the costs that the profile of the
    receiving device states, or `DEFAULT_LINKS`.
    stages_per_device: the number of stages of each device, in the place of the choice; 0 leaves a device out.
    pipelined: whether several calls are on their way at a time. If not, the time of one call is as short as possible.

    Raises a `DeviceError` that says which part lacks how many bytes, if the stages do not fit into the memory of the devices.
    """
    stages, costs = _problem(entry_point, devices, files, links or {})
    if stages_per_device is not None:
        counts = _checked_counts(stages_per_device, len(devices), len(entry_point.stages))
        if _most_excess(stages, costs, counts) > 0:
            raise DeviceError(f"memory: {_excess_message(stages, devices, costs, counts)}")
    else:
        found = group_stages(stages, costs, pipelined=pipelined)
        if found is None:
            nearest = group_with_least_excess(stages, costs)
            message = _excess_message(stages, devices, costs, nearest)
            raise DeviceError(f"memory: no placement fits: in the nearest one, {message}")
        counts = found
    placement = Placement(
        stages_per_device=tuple(counts), parts=tuple(_parts(stages, devices, costs, counts)), left_out=()
    )
    left_out = (
        LeftOut(device=device, reason=_reason(stages, cost, placement, pipelined=pipelined))
        for device, cost, count in zip(devices, costs, counts, strict=True)
        if not count
    )
    if stages_per_device is not None:
        left_out = (replace(device, reason="stages_per_device gives it none") for device in left_out)
    return replace(placement, left_out=tuple(left_out))


def equal_shares(entry_point: EntryPoint, device_count: int) -> list[int]:
    """Return the number of stages of each of several equal devices, all of which have some, so that the slowest is as fast as possible.

    The times of the stages are those that the plan of the bundle estimates; without a plan, in proportion to the bytes of their weights.
    """
    stage_count = len(entry_point.stages)
    if not 1 <= device_count <= stage_count:
        raise DeviceError(f"expected 1 to {stage_count} devices for {stage_count} stages, found {device_count}")
    starts = split_sequence(_cost_sequence(entry_point), [1.0] * device_count, [None] * device_count)
    assert starts is not None  # there is always a split, without limits of memory
    return [end - start for start, end in itertools.pairwise((0, *starts, stage_count))]


def _cost_sequence(entry_point: EntryPoint) -> CostSequence:
    """The stages as items to split between devices."""
    if entry_point.plan is None:
        times = [stage.weight_bytes for stage in entry_point.stages]
    else:
        times = [stage.picoseconds for stage in entry_point.plan.stages]
    sizes = example_sizes(entry_point.symbols)
    return CostSequence(
        times=[max(1, time) for time in times],
        transfers=[
            SharedCost(
                cost=REFERENCE_LINK.sending_time(value_bytes(edge, sizes)),
                users=edge.consumers,
                producer=-1 if edge.producer is None else edge.producer,
            )
            for edge in entry_point.edges
            if edge.consumers
        ],
        weights=[],
        working_bytes=[0] * len(times),
        split_positions=range(1, len(times)),
    )


def improvements(
    entry_point: EntryPoint,
    devices: Sequence[TargetDevice],
    placement: Placement,
    *,
    files: Iterable[File] = (),
    links: Mapping[str, Link] | None = None,
    pipelined: bool = True,
) -> list[Improvement]:
    """Return what the next better device or link would give, each alone, with the stages placed anew; for the arguments of `place`.

    Changes that make it less than 1 % faster are left out.
    """
    stages, costs = _problem(entry_point, devices, files, links or {})
    found = []
    before = placement.interval if pipelined else placement.call_time
    for change, changed_costs in _better_devices(devices, costs, placement).items():
        counts = group_stages(stages, changed_costs, pipelined=pipelined)
        if counts is None:
            continue
        all_times = zip(part_times(stages, changed_costs, counts), counts, strict=True)
        times = [max(1, round(time.total)) for time, count in all_times if count]
        improvement = Improvement(
            change=change or f"the placement {','.join(map(str, counts))}", call_time=sum(times), interval=max(times)
        )
        after = improvement.interval if pipelined else improvement.call_time
        if after * 1.01 < before:
            found.append(improvement)
            before = before if change else after
    return found


def _better_devices(
    devices: Sequence[TargetDevice], costs: Sequence[DeviceCosts], placement: Placement
) -> dict[str, list[DeviceCosts]]:
    """The costs of the devices after each change, by its description; of no change, as the caller may have chosen the placement."""
    used = [number for number, count in enumerate(placement.stages_per_device) if count]
    slowest = used[placement.parts.index(placement.bottleneck)]
    name, cost = devices[slowest], costs[slowest]
    faster = replace(cost, times=tuple(time / 2 for time in cost.times))
    return {
        "": [*costs],
        f"{name} twice as fast": [*costs[:slowest], faster, *costs[slowest + 1 :]],
        f"one more {name}": [*costs[: slowest + 1], cost, *costs[slowest + 1 :]],
        "links twice as fast": [replace(cost, near=_halved(cost.near), far=_halved(cost.far)) for cost in costs],
        "twice the memory on each device": [replace(cost, memory=2 * cost.memory) for cost in costs],
    }


def _halved(link: LinkCosts) -> LinkCosts:
    return LinkCosts(per_value=round(link.per_value / 2), per_byte=link.per_byte / 2)


def _problem(
    entry_point: EntryPoint, devices: Sequence[TargetDevice], files: Iterable[File], links: Mapping[str, Link]
) -> tuple[StageCosts, list[DeviceCosts]]:
    """The stages and the devices with their costs."""
    if not 1 <= len(devices) <= _MOST_DEVICES:
        raise OptionError(f"devices: expected 1 to {_MOST_DEVICES} devices, found {len(devices)}")
    given_links = link_costs(links)
    plan = planned_stages(entry_point)
    sizes = example_sizes(entry_point.symbols)
    values = [
        SharedCost(
            cost=value_bytes(edge, sizes),
            users=edge.consumers,
            producer=-1 if edge.producer is None else edge.producer,
        )
        for edge in entry_point.edges
        if edge.consumers
    ]
    stages = StageCosts(
        values=tuple(values),
        weights=tuple(weight_costs(entry_point, files)),
        working_bytes=tuple(max(0, stage.memory - stage.weight_bytes) for stage in plan),
        caller_host=devices[0].host,
    )
    costs = [
        DeviceCosts(
            times=tuple(stage_times(entry_point, device)),
            memory=math.inf if device.memory_limit is None else device.memory_limit,
            host=device.host,
            near=given_links.get("device") or device.link or DEFAULT_LINKS["device"],
            far=given_links.get("host") or DEFAULT_LINKS["host"],
        )
        for device in devices
    ]
    return stages, costs


def _checked_counts(counts: Sequence[int], device_count: int, stage_count: int) -> list[int]:
    """The numbers of stages that a caller gives to the devices."""
    if isinstance(counts, str) or not all(type(count) is int and count >= 0 for count in counts):
        raise OptionError(f"stages_per_device (--placement): expected numbers of stages from 0 up, found {counts!r}")
    if len(counts) != device_count:
        raise OptionError(
            f"stages_per_device (--placement): expected {device_count} numbers, one for each device, found {len(counts)}: {[*counts]}"
        )
    if sum(counts) != stage_count:
        raise OptionError(
            f"stages_per_device (--placement): expected numbers with the sum {stage_count}, the number of stages, found {[*counts]} "
            f"with the sum {sum(counts)}"
        )
    return [*counts]


def _bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The first stage of each part, and the one after its last."""
    return list(itertools.pairwise((0, *itertools.accumulate(counts))))


def _parts(
    stages: StageCosts, devices: Sequence[TargetDevice], costs: Sequence[DeviceCosts], counts: Sequence[int]
) -> Iterator[PlacedPart]:
    times = part_times(stages, costs, counts)
    for device, time, (start, end) in zip(devices, times, _bounds(counts), strict=True):
        if end > start:
            yield PlacedPart(
                device=device,
                stages=range(start, end),
                weight_bytes=stages.weight_bytes(start, end),
                memory=stages.memory_bytes(start, end),
                computing=max(1, round(time.computing)),
                receiving=round(time.receiving),
            )


def _reason(stages: StageCosts, cost: DeviceCosts, placement: Placement, *, pipelined: bool) -> str:
    """Why a device has no stages."""
    stage_count = len(stages.working_bytes)
    least_bytes = stages.least_memory()
    if least_bytes > cost.memory:
        return f"no stage fits: the smallest needs {format_bytes(least_bytes)}, it has {format_bytes(int(cost.memory))}"
    if len(placement.parts) == stage_count:
        return "each stage has a device of its own without it"
    if not pipelined:
        return "one call would not be faster with it"
    if min(cost.times) > placement.interval:
        return f"each stage takes it {format_time(min(cost.times))} or more, longer than the slowest part takes"
    return "the slowest part would be less than 1 % faster with it"


def _excess(stages: StageCosts, cost: DeviceCosts, start: int, end: int) -> float:
    return stages.memory_bytes(start, end) - cost.memory if end > start else -math.inf


def _most_excess(stages: StageCosts, costs: Sequence[DeviceCosts], counts: Sequence[int]) -> float:
    """By how many bytes the part that exceeds its memory most exceeds it."""
    return max(_excess(stages, cost, *bounds) for cost, bounds in zip(costs, _bounds(counts), strict=True))


def _excess_message(
    stages: StageCosts, devices: Sequence[TargetDevice], costs: Sequence[DeviceCosts], counts: Sequence[int]
) -> str:
    """Which part lacks how many bytes, and what helps."""
    parts = zip(
        _parts(stages, devices, costs, counts),
        [cost for cost, count in zip(costs, counts, strict=True) if count],
        strict=True,
    )
    part, cost = max(parts, key=lambda entry: entry[0].memory - entry[1].memory)
    lacking = part.memory - int(cost.memory)
    need = "needs" if len(part.stages) == 1 else "need"
    rest = part.memory - part.weight_bytes
    cure = (
        f"give {part.device} more memory, or add a device"
        if len(part.stages) > 1
        else f"give {part.device} more memory, leave it out, or cut the bundle into more stages ('stagepack recut')"
    )
    return (
        f"{part.stage_text} {need} {format_bytes(part.memory)} ({format_bytes(part.weight_bytes)} of weights, {format_bytes(rest)} for "
        f"activations and what arrives at the example's sizes), and {part.device} has {format_bytes(int(cost.memory))}, "
        f"{format_bytes(lacking)} too little: {cure}"
    )
