"""The placement of stages: the device and the process of each. Consecutive stages that have both in common are joined into one."""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import structs

from stagepack.errors import DeviceError, OptionError, named_errors
from stagepack.format.manifest import EntryPoint
from stagepack.format.quantities import format_bytes
from stagepack.format.reader import Bundle
from stagepack.format.rules import format_names
from stagepack.named_adapters import with_adapters
from stagepack.partition.joined_bundle import join_bundle
from stagepack.partition.links import parse_links
from stagepack.partition.placement import PlacedPart, Placement, equal_shares, place
from stagepack.partition.shared_weights import most_weight_bytes
from stagepack.partition.target_devices import TargetDevice, described_devices, devices_of_processes, divided_cpus
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
    own_devices: the device of each process as a whole, with its host; None for the devices of this machine.
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


def check_joint_memory(bundle: Bundle, options_of_name: Mapping[str, LoadOptions]) -> None:
    """Refuse entry points, each with its options, that do not fit together into the memory of a device; what they share counts once."""
    parts_of_device: dict[tuple[int, TargetDevice], dict[str, PlacedPart]] = {}
    for name, options in options_of_name.items():
        selected = bundle.select(name)
        with named_errors(selected.location):
            chosen = place_bundle(selected, options).chosen
        used = [] if chosen is None else [number for number, count in enumerate(chosen.stages_per_device) if count]
        for number, part in zip(used, () if chosen is None else chosen.parts, strict=True):
            parts_of_device.setdefault((number, part.device), {})[name] = part
    for (_, device), parts in parts_of_device.items():
        needed = sum(part.memory for part in parts.values()) - _repeated_bytes(bundle, parts)
        if device.memory_limit is not None and needed > device.memory_limit:
            raise DeviceError(
                f"memory: the entry points {format_names(list(parts))} need {format_bytes(needed)} together, and {device} has "
                f"{format_bytes(device.memory_limit)}: give it more memory, or load fewer of them"
            )


def _repeated_bytes(bundle: Bundle, parts: Mapping[str, PlacedPart]) -> int:
    """The bytes of the weight files that several entry points read, which are in memory once, as often as they count again."""
    readers = Counter(
        file_name
        for name, part in parts.items()
        for file_name in {file for number in part.stages for file in bundle.select(name).stages[number].weights}
    )
    return sum((count - 1) * most_weight_bytes(bundle.files[file_name]) for file_name, count in readers.items())


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
    given, is_auto = options.placement, AUTO in options.devices
    targets = list(own_devices or target_devices(bundle, options, process_count))
    if is_auto and process_count is not None:
        targets = divided_cpus(targets)
    targets = described_devices(bundle, targets, memory=given.memory, speeds=given.speeds, profiles=given.profiles)
    return place(
        bundle.entry_point,
        targets,
        files=bundle.files.values(),
        links=parse_links(given.links),
        stages_per_device=given.stages_per_device or None,
        # In this process, a caller of all devices waits for one call after another.
        pipelined=process_count is not None or not is_auto,
    )


def target_devices(bundle: Bundle, options: LoadOptions, process_count: int | None) -> list[TargetDevice]:
    """Return the devices to choose from: one for each process, if there are several, each as a whole."""
    runtime = import_runtime(runtime_of_each_stage(options.runtime, bundle)[0].name)
    is_auto = AUTO in options.devices
    if is_auto:
        if len(options.devices) > 1:
            raise OptionError(f"devices: expected {AUTO!r} alone, or devices, found {options.devices}")
        targets = runtime.own_devices()
    else:
        if process_count is None:
            for device in options.devices:  # one that gets no stages is looked for, too
                runtime.parse_device(device)
        targets = [TargetDevice(name=str(device)) for device in options.devices]
    return targets if process_count is None else devices_of_processes(targets, process_count, is_auto=is_auto)


def place_stages(entry_point: EntryPoint, devices: Sequence[Device]) -> list[Device]:
    """Return the device of each stage.

    With fewer devices than stages, consecutive stages share one, so that the largest time of a device is as small as possible. The
    times of the stages are those that the plan of the bundle estimates; without a plan, in proportion to the bytes of their weights.
    """
    counts = equal_shares(entry_point, len(devices))
    return [device for device, count in zip(devices, counts, strict=True) for _ in range(count)]
