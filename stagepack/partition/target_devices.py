"""Devices that stages are placed on, and the time of each stage of a bundle on a device.

Of the bundle, the manifest is read alone: times follow from its plan, and from measured times by the numbers of the nodes. Measured times
of another cut are compared with the graphs.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagepack.errors import CutError, OptionError
from stagepack.format import limits
from stagepack.format.manifest import EntryPoint
from stagepack.format.plan import PlannedStage
from stagepack.format.quantities import parse_byte_size
from stagepack.format.reader import Bundle
from stagepack.graph.model_assembly import join_stages
from stagepack.partition.costs import LinkCosts, estimated_time, memory_time
from stagepack.partition.profile import (
    DEVICE_PROFILES,
    DeviceProfile,
    Profile,
    check_profile_model,
    find_profile,
    profile_link,
)

_PICOSECONDS = 10**12  # in a second
# The device of the estimates in a plan (see `costs.py`).
_REFERENCE = DeviceProfile(
    name="reference", flops={"float32": 50e12}, memory_bandwidth=1e12, memory=2**62, link_bandwidth=25e9
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDevice:
    """A device that stages may be placed on.

    Attributes:
        name: its name on its host, such as ``cuda:0`` or ``cpu``.
        memory: bytes of memory for stages, or a text such as ``24GB``; None for no limit, or the memory of a `DeviceProfile`.
        speed: how many times as fast it is as the times that are known, those of `profile` or of the plan: 0.000001 to 1000000.
        profile: measured times of the model on a device of its kind, or the data sheet of its kind; None for the times of the plan.
        host: the name of its host. Values between devices of two hosts take another link than those between devices of one host.

    Raises:
        OptionError: the memory or the speed is no such number, or the name is empty.
    """

    name: str
    memory: int | str | None = None
    speed: float = 1.0
    profile: Profile | DeviceProfile | None = None
    host: str = ""

    def __post_init__(self) -> None:
        """Check the values, and make the memory a number of bytes."""
        if not self.name:
            raise OptionError("devices: expected a name such as cpu or cuda:0, found an empty one")
        if isinstance(self.speed, bool) or not limits.SLOWEST_SPEED <= self.speed <= limits.FASTEST_SPEED:
            raise OptionError(f"speeds: {self}: expected a number from 0.000001 to 1000000, found {self.speed!r}")
        if self.memory is not None:
            try:
                object.__setattr__(self, "memory", parse_byte_size(self.memory))
            except ValueError as error:
                raise OptionError(f"memory: {self}: {error}") from None

    def __str__(self) -> str:
        """Return the name with its host, if the host has a name: ``a/cuda:0``."""
        return f"{self.host}/{self.name}" if self.host else self.name

    @property
    def memory_limit(self) -> int | None:
        """Bytes of memory for stages; None for no limit."""
        if isinstance(self.memory, int):
            return self.memory
        return self.profile.memory if isinstance(self.profile, DeviceProfile) else None

    @property
    def link(self) -> LinkCosts | None:
        """The link by which it receives from devices of its host, if its profile has one."""
        if isinstance(self.profile, DeviceProfile):
            return LinkCosts(per_byte=_PICOSECONDS / self.profile.link_bandwidth)
        return None if self.profile is None or self.profile.link is None else profile_link(self.profile)


def check_process_count(process_count: int, stage_count: int) -> None:
    """Refuse more processes than stages, and none."""
    if not 1 <= process_count <= stage_count:
        raise OptionError(f"expected 1 to {stage_count} processes for {stage_count} stages, found {process_count}")


def devices_of_processes(
    devices: Sequence[TargetDevice], process_count: int, *, is_auto: bool = False
) -> list[TargetDevice]:
    """Return the device of each process: those that a caller names, or, with `is_auto`, those of this machine; the CPU may be several's."""
    if is_auto:
        return [*devices, *[devices[-1]] * (process_count - len(devices))][:process_count]
    if len(devices) not in (1, process_count):
        raise OptionError(
            f"devices: expected one device, or one for each of {process_count} processes, found {len(devices)}"
        )
    return [*devices] if len(devices) == process_count else [*devices] * process_count


def divided_cpus(devices: Sequence[TargetDevice]) -> list[TargetDevice]:
    """Return the devices of processes, each CPU with the share of one process: of its memory, and of the processors, which all use."""
    hosts = Counter(device.host for device in devices)
    cpu_hosts = Counter(device.host for device in devices if device.name == "cpu")
    return [
        replace(
            device,
            speed=device.speed / hosts[device.host],
            memory=device.memory // cpu_hosts[device.host] if isinstance(device.memory, int) else device.memory,
        )
        if device.name == "cpu"
        else device
        for device in devices
    ]


def described_devices(
    bundle: Bundle,
    devices: Sequence[TargetDevice],
    *,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profiles: Sequence[str] = (),
) -> list[TargetDevice]:
    """Return devices with what a caller says of them; without that, they stay as they are.

    memory: of each device, in order.
    speeds: of each device, in order.
    profiles: ``[DEVICE=]PROFILE`` for `find_profile`. DEVICE is the name of a device or its kind, such as ``cuda``; without it, the
    profile is that of all devices which have no other.

    Raises an `OptionError` if there are more or fewer values than devices, and a `CutError` if measured times are of another model.
    """
    for option, values in (("memory", memory), ("speeds", speeds)):
        if values and len(values) != len(devices):
            raise OptionError(f"{option}: expected {len(devices)} values, one for each device, found {len(values)}")
    if memory:
        devices = [replace(device, memory=size) for device, size in zip(devices, memory, strict=True)]
    if speeds:
        devices = [replace(device, speed=speed) for device, speed in zip(devices, speeds, strict=True)]
    chosen = _profiles(profiles, devices)
    _check_models(bundle, [profile for profile in chosen if isinstance(profile, Profile)])
    return [
        device if profile is None else replace(device, profile=profile)
        for device, profile in zip(devices, chosen, strict=True)
    ]


def _profiles(texts: Sequence[str], devices: Sequence[TargetDevice]) -> list[Profile | DeviceProfile | None]:
    """The profile of each device: of its own name, else of its kind such as cuda, else the one for all."""
    keys_of_device = [[str(device), device.name, device.name.partition(":")[0], ""] for device in devices]
    known_keys = {key for keys in keys_of_device for key in keys} - {""}
    profile_of_key: dict[str, Profile | DeviceProfile] = {}
    for text in texts:
        key, mark, profile_name = text.partition("=")
        if not mark or key not in known_keys:
            key, profile_name = "", text
        if key in profile_of_key:
            raise OptionError(
                f"profiles (--profile): expected one for {key or 'all devices'}, found two: write DEVICE=FILE, with DEVICE one of "
                f"{', '.join(sorted(known_keys))}"
            )
        profile_of_key[key] = find_profile(profile_name)
    return [next((profile_of_key[key] for key in keys if key in profile_of_key), None) for keys in keys_of_device]


def _check_models(bundle: Bundle, profiles: Sequence[Profile]) -> None:
    """Refuse measured times of another model."""
    is_known = len(bundle.entry_points) == 1  # each entry point has a profile of its own
    others = [profile for profile in profiles if not is_known or profile.bundle != bundle.digest]
    if others:
        stored = bundle.stored
        graph = join_stages(stored.entry_point, stored.graphs())
        for profile in others:
            check_profile_model(profile, graph)


def planned_stages(entry_point: EntryPoint) -> Sequence[PlannedStage]:
    """Return the plan of the stages; for a bundle without one, estimates from the weights and operations of each stage."""
    if entry_point.plan is not None:
        return entry_point.plan.stages
    return [
        PlannedStage(
            nodes=stage.places,
            weight_bytes=stage.weight_bytes,
            flops=stage.flops,
            bytes=stage.weight_bytes,
            picoseconds=estimated_time(-(-stage.flops // 50), memory_time(stage.weight_bytes)),
            memory=stage.weight_bytes,
        )
        for stage in entry_point.stages
    ]


def stage_times(entry_point: EntryPoint, device: TargetDevice) -> list[float]:
    """Return the time of each stage on a device, in picoseconds, without receiving."""
    stages = planned_stages(entry_point)
    if isinstance(device.profile, Profile):
        times = _measured_times(stages, device.profile)
    elif isinstance(device.profile, DeviceProfile):
        dtypes = _stage_dtypes(entry_point)
        times = [_data_sheet_time(stage, dtype, device.profile) for stage, dtype in zip(stages, dtypes, strict=True)]
    else:
        times = [float(stage.picoseconds) for stage in stages]
    return [max(1.0, time) / device.speed for time in times]


def _measured_times(stages: Sequence[PlannedStage], profile: Profile) -> list[float]:
    """The sums of the measured times of the nodes; nodes without one have their share of the estimate, scaled as the others were."""
    seconds_of_node = {node_time.node: node_time.seconds for node_time in profile.nodes}
    node_count = sum(count for stage in stages for _, count in stage.nodes)
    if not all(0 <= node_number < node_count for node_number in seconds_of_node):
        raise CutError(
            f"profile: expected times of the {node_count} nodes of this model, found one of node {max(seconds_of_node)}: "
            "measure this model with 'stagepack profile'"
        )
    if not seconds_of_node and node_count:
        raise CutError("profile: expected the time of at least one node, found none: run 'stagepack profile' again")
    # Runs are not spelled out: a manifest may state 2**60 nodes.
    runs = sorted((first, stage_number) for stage_number, stage in enumerate(stages) for first, _ in stage.nodes)
    measured, found_counts = [0.0] * len(stages), [0] * len(stages)
    for node_number, seconds in seconds_of_node.items():
        stage_number = runs[bisect.bisect_right(runs, (node_number, len(stages))) - 1][1]
        measured[stage_number] += seconds * _PICOSECONDS
        found_counts[stage_number] += 1
    missing = [
        stage.picoseconds * (1 - found_count / max(1, sum(count for _, count in stage.nodes)))
        for stage, found_count in zip(stages, found_counts, strict=True)
    ]
    estimate = sum(stage.picoseconds for stage in stages) - sum(missing)
    scale = sum(measured) / estimate if estimate else 1.0
    return [time + rest * scale for time, rest in zip(measured, missing, strict=True)]


def _stage_dtypes(entry_point: EntryPoint) -> list[str]:
    """The dtype that each stage mostly computes in, as far as its edges tell: the first floating-point one of what it returns or takes."""
    dtype_of_edge = {edge.name: edge.dtype for edge in entry_point.edges}
    known = DEVICE_PROFILES["h100"].flops
    return [
        next((dtype for name in (*stage.outputs, *stage.inputs) if (dtype := dtype_of_edge[name]) in known), "float32")
        for stage in entry_point.stages
    ]


def _data_sheet_time(stage: PlannedStage, dtype: str, device: DeviceProfile) -> float:
    """The time on a device, from the time on the reference device: launches, which stay, arithmetic, and other traffic of memory.

    Blocks of a transformer on a T4 and an H100: within 4 % of the sum over the nodes in float32, 18 % in bfloat16.
    """
    reference = _REFERENCE.flops["float32"]
    arithmetic = stage.flops / reference * _PICOSECONDS
    traffic = stage.bytes / _REFERENCE.memory_bandwidth * _PICOSECONDS
    node_count = sum(count for _, count in stage.nodes)
    launching = max(0.0, min(node_count * estimated_time(0, 1), stage.picoseconds - max(arithmetic, traffic)))
    other_traffic = max(0.0, stage.picoseconds - launching - arithmetic)
    flops = device.flops.get(dtype, device.flops["float32"])
    bandwidth = device.memory_bandwidth / _REFERENCE.memory_bandwidth
    return launching + max(arithmetic * reference / flops + other_traffic / bandwidth, traffic / bandwidth)
