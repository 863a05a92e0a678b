"""The placement of stages: the device and the process of each. Consecutive stages that have both in common are joined into one."""

import itertools
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import structs

from stagepack.errors import DeviceError, OptionError
from stagepack.format.graph import value_bytes
from stagepack.format.manifest import EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.shapes import example_sizes
from stagepack.named_adapters import with_adapters
from stagepack.partition.costs import REFERENCE_LINK
from stagepack.partition.joined_bundle import join_bundle
from stagepack.partition.links import parse_links
from stagepack.partition.placement import Placement, place
from stagepack.partition.solver import CostSequence, SharedCost, split_sequence
from stagepack.partition.target_devices import TargetDevice, described_devices
from stagepack_loaders.base import Runtime
from stagepack_loaders.options import AUTO, LoadOptions, PlacementOptions
from stagepack_loaders.registry import import_runtime, runtime_of_each_stage

Device = TypeVar("Device")
_LOGGER = logging.getLogger("stagepack")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBundle:
    """A bundle with a device for each of its stages.

    Attributes:
        bundle: the bundle, of which consecutive stages are joined.
        options: how it is loaded; `devices` and `runtime` have one for each stage.
        processes: the number of the process that runs each stage; those without stages are counted, too.
        chosen: the placement, if the caller has left it to be chosen.
    """

    bundle: Bundle
    options: LoadOptions
    processes: tuple[int, ...]
    chosen: Placement | None = None


def place_bundle(
    bundle: Bundle,
    options: LoadOptions,
    process_count: int | None = None,
    own_devices: Sequence[TargetDevice] | None = None,
) -> PlacedBundle:
    """Choose the device and the process of each stage, and join those that have both in common.

    In this process, stages are joined if the caller names several devices, but fewer than stages, or says how to place them.

    process_count: the number of processes; None for this one.
    own_devices: what ``"auto"`` chooses from, one for each process; None for the devices of this machine.
    """
    stage_count = len(bundle.stages)
    runtimes = runtime_of_each_stage(options.runtime, bundle)
    is_auto = AUTO in options.devices
    joins = is_auto or options.placement.is_given or process_count is not None or 1 < len(options.devices) < stage_count
    chosen = None
    if is_auto or options.placement.is_given:
        chosen = _place(bundle, options, process_count, own_devices)
        _LOGGER.info("%s: %s", bundle.location, chosen)
        devices: list[Any] = [part.device.name for part in chosen.parts]
        parts = [number for number, part in enumerate(chosen.parts) for _ in part.stages]
        processes = [number for number, count in enumerate(chosen.stages_per_device) for _ in range(count)]
    else:
        devices = list(options.devices)
        parts = place_stages(bundle.entry_point, range(len(devices)))
        processes = [] if process_count is None else place_stages(bundle.entry_point, range(process_count))
    if process_count is None:
        processes = [0] * stage_count
    # The number of a stage that is not joined is a key of its own.
    keys = [
        (process, part, runtime.name, -1 if joins and runtime.joins else number)
        for number, (process, part, runtime) in enumerate(zip(processes, parts, runtimes, strict=True))
    ]
    counts = [sum(1 for _ in group) for _, group in itertools.groupby(keys)]
    firsts = [0, *itertools.accumulate(counts[:-1])]
    return PlacedBundle(
        bundle=with_adapters(join_bundle(bundle, counts), options.adapters),
        options=structs.replace(
            options,
            devices=[devices[parts[number]] for number in firsts],
            runtime=[runtimes[number].name for number in firsts],
            placement=PlacementOptions(),
        ),
        processes=tuple(processes[number] for number in firsts),
        chosen=chosen,
    )


def of_processes(options: LoadOptions, process_count: int, left: Sequence[int]) -> LoadOptions:
    """Return options for those processes that are left of a number of them, with what the options say of these."""

    def left_of(values: Sequence[Any]) -> Sequence[Any]:
        return [values[process] for process in left] if len(values) == process_count > 1 else values

    given = options.placement
    return structs.replace(
        options,
        devices=left_of(options.devices),
        placement=structs.replace(
            given, memory=left_of(given.memory), speeds=left_of(given.speeds), stages_per_device=()
        ),
    )


def current_placement(bundle: Bundle, devices: Sequence[str]) -> Placement:
    """Return the placement of the stages of a bundle, whose devices these are."""
    targets = [TargetDevice(name=device) for device in devices]
    counts = [len(bundle.stored_stages(number)) for number in range(len(bundle.stages))]
    return place(bundle.stored.entry_point, targets, files=bundle.files.values(), stages_per_device=counts)


def _place(
    bundle: Bundle, options: LoadOptions, process_count: int | None, own_devices: Sequence[TargetDevice] | None
) -> Placement:
    """Choose the stages of each device."""
    given = options.placement
    if own_devices is None:
        runtime = import_runtime(runtime_of_each_stage(options.runtime, bundle)[0].name)
        targets = _target_devices(options, runtime, process_count)
    else:
        targets = list(own_devices)
    targets = described_devices(bundle, targets, memory=given.memory, speeds=given.speeds, profiles=given.profiles)
    counts = given.stages_per_device or None
    return place(
        bundle.entry_point,
        targets,
        files=bundle.files.values(),
        links=parse_links(given.links),
        stages_per_device=counts,
        # In this process, a caller of all devices waits for one call after another.
        pipelined=process_count is not None or AUTO not in options.devices,
    )


def _target_devices(options: LoadOptions, runtime: Runtime, process_count: int | None) -> list[TargetDevice]:
    """The devices to choose from: one for each process, if there are several."""
    if AUTO in options.devices:
        if len(options.devices) > 1:
            raise OptionError(f"devices: expected {AUTO!r} alone, or devices, found {options.devices}")
        targets = runtime.own_devices()
        if process_count is not None and len(targets) < process_count:  # further processes are on the CPU
            targets += [targets[-1]] * (process_count - len(targets))
        return targets[:process_count]
    if process_count is None:
        for device in options.devices:  # one that gets no stages is looked for, too
            runtime.parse_device(device)
    targets = [TargetDevice(name=str(device)) for device in options.devices]
    if process_count is None or len(targets) == process_count:
        return targets
    if len(targets) > 1:
        raise OptionError(
            f"devices: expected one device, or one for each of {process_count} processes, found {len(targets)}"
        )
    return targets * process_count


def place_stages(entry_point: EntryPoint, devices: Sequence[Device]) -> list[Device]:
    """Return the device of each stage.

    With fewer devices than stages, consecutive stages share one, so that the largest time of a device is as small as possible. The
    times of the stages are those that the plan of the bundle estimates; without a plan, in proportion to the bytes of their weights.
    """
    stages = entry_point.stages
    if not 1 <= len(devices) <= len(stages):
        raise DeviceError(f"expected 1 to {len(stages)} devices for {len(stages)} stages, found {len(devices)}")
    starts = split_sequence(_cost_sequence(entry_point), [1.0] * len(devices), [None] * len(devices))
    assert starts is not None  # there is always a split, without limits of memory
    return [devices[bisect_right(starts, stage_number)] for stage_number in range(len(stages))]


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
