"""The placement of a bundle's stages on devices that the command line names: as plain data and for people."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.command import PlacementCounts, flag, only_with, option_object
from stagepack.cli.cost_facts import REFERENCE_DEVICE, device_facts, machine_text, profile_facts
from stagepack.cli.output import print_line, print_table
from stagepack.format.quantities import format_bytes, format_time
from stagepack.format.reader import Bundle
from stagepack.format.shapes import example_sizes

if TYPE_CHECKING:
    from stagepack.partition.links import Link
    from stagepack.partition.placement import PlacedPart
    from stagepack.partition.target_devices import TargetDevice

_PICOSECONDS = 1e12  # in a second
# The devices of this machine.
_AUTO = "auto"


@option_object
class PlacementFlags:
    """The options that say on which devices the stages of a bundle are placed."""

    devices: tuple[str, ...] = flag(
        "--device [HOST/]DEVICE",
        "Show which consecutive stages of the bundle this device would run, beside the other devices, in order; such as cuda:0, cpu or "
        "worker/cuda:0. auto: all devices of this machine with the memory that is free. Repeatable.",
        default_text="the cut itself is shown",
    )
    links: tuple[str, ...] = only_with(
        flag(
            "--link NAME=BANDWIDTH[,rtt=TIME]",
            "Link between the devices of one host (device) or between hosts (host), such as host=25GB/s,rtt=0.1ms. Repeatable.",
            default_text="device=25GB/s,rtt=0.01ms and host=1.25GB/s,rtt=0.1ms, or what the profile of a device says",
        ),
        "--device",
    )
    stages_per_device: tuple[int, ...] | None = only_with(
        flag(
            "--placement COUNTS",
            "Number of stages of each --device, in the place of the best choice; 0 leaves a device out.",
            default_text="the best choice",
            type=PlacementCounts(),
            multiple=False,
        ),
        "--device",
    )
    one_at_a_time: bool = only_with(
        flag(
            "--one-at-a-time",
            "Make one call as short as possible, where no other call is on its way meanwhile, as --device auto does without --processes.",
        ),
        "--device",
    )
    processes: int | None = only_with(
        flag(
            "--processes N",
            "Place the stages on N processes of one machine, as 'stagepack load --processes N' does: each --device is that of one process, "
            "or one is that of all.",
            default_text="all devices in one process",
            type=click.IntRange(1),
        ),
        "--device",
    )

    @property
    def is_auto(self) -> bool:
        """Whether the devices are those of this machine, which torch knows."""
        return _AUTO in self.devices

    @property
    def pipelined(self) -> bool:
        """Whether several calls are on their way at a time."""
        return not self.one_at_a_time and (self.processes is not None or not self.is_auto)

    def link_of_name(self) -> "dict[str, Link]":
        """Return the links of `--link`."""
        from stagepack.partition.links import parse_links  # noqa: PLC0415 - numpy, after the checks

        return parse_links(self.links)

    def target_devices(
        self, bundle: Bundle, memory: Sequence[str], speeds: Sequence[float], profiles: Sequence[str]
    ) -> "list[TargetDevice]":
        """Return the devices with their memory, their speeds and their profiles, which are those of other options."""
        from stagepack.partition.target_devices import (  # noqa: PLC0415 - as above
            TargetDevice,
            check_process_count,
            described_devices,
            devices_of_processes,
            divided_cpus,
        )

        if self.is_auto:
            if len(self.devices) > 1:
                raise click.UsageError("--device auto cannot be used with another --device")
            from stagepack_loaders.torch.own_devices import own_devices  # noqa: PLC0415 - torch, only for this

            devices = own_devices()
        else:
            names = (text.rpartition("/")[::2] for text in self.devices)
            devices = [TargetDevice(name=name, host=host) for host, name in names]
        if self.processes is not None:
            check_process_count(self.processes, len(bundle.stages))
            devices = devices_of_processes(devices, self.processes, is_auto=self.is_auto)
            devices = divided_cpus(devices) if self.is_auto else devices
        return described_devices(bundle, devices, memory=memory, speeds=speeds, profiles=profiles)


def plan_placement(
    bundle: Bundle, devices: "list[TargetDevice]", options: PlacementFlags, *, is_described: bool
) -> dict[str, Any]:
    """Return the facts of the placement of the stages of a bundle; `is_described`: the caller says more of the devices than their names."""
    from stagepack.partition.links import DEFAULT_LINKS, link_costs, link_text  # noqa: PLC0415 - numpy, after the checks
    from stagepack.partition.placement import equal_shares, improvements, place  # noqa: PLC0415 - the same

    links, files, pipelined = options.link_of_name(), bundle.files.values(), options.pipelined
    entry_point = bundle.entry_point
    counts: Sequence[int] | None = options.stages_per_device
    if not (is_described or options.is_auto or options.links or options.one_at_a_time or counts):
        counts = equal_shares(entry_point, len(devices))  # as `stagepack.load` does then
    placement = place(
        entry_point,
        devices,
        files=files,
        links=links,
        stages_per_device=counts,
        pipelined=pipelined,
    )
    better = improvements(entry_point, devices, placement, files=files, links=links, pipelined=pipelined)
    return {
        "sizes": example_sizes(entry_point.symbols),
        "stages_per_device": placement.stages_per_device,
        "parts": [_part_facts(part) for part in placement.parts],
        "left_out": [{"device": str(device.device), "reason": device.reason} for device in placement.left_out],
        "bottleneck": placement.parts.index(placement.bottleneck),
        "call_picoseconds": placement.call_time,
        "interval_picoseconds": placement.interval,
        "improvements": [
            {"change": change.change, "call_picoseconds": change.call_time, "interval_picoseconds": change.interval}
            for change in better
        ],
        "links": {link_name: link_text(costs) for link_name, costs in (dict(DEFAULT_LINKS) | link_costs(links)).items()}
        | {
            f"device to {device}": link_text(device.link)
            for device in devices
            if device.link is not None and "device" not in links
        },
    }


def _part_facts(part: "PlacedPart") -> dict[str, Any]:
    from stagepack.partition.profile import Profile  # noqa: PLC0415 - imported by now

    profile = part.device.profile
    return {
        "device": part.device.name,
        "host": part.device.host,
        "stages": list(part.stages),
        "weight_bytes": part.weight_bytes,
        "memory": part.memory,
        "memory_limit": part.device.memory_limit,
        "speed": part.device.speed,
        "computing_picoseconds": part.computing,
        "receiving_picoseconds": part.receiving,
        "picoseconds": part.time,
        "profile": None
        if profile is None
        else profile_facts(profile)
        if isinstance(profile, Profile)
        else device_facts(profile),
    }


def _device_name(part: Mapping[str, Any]) -> str:
    return f"{part['host']}/{part['device']}" if part["host"] else str(part["device"])


def print_placement(facts: Mapping[str, Any]) -> None:
    """Print the facts of a placement."""
    parts = facts["parts"]
    rows = [
        [
            _device_name(part),
            str(part["stages"][0]) + (f"-{part['stages'][-1]}" if len(part["stages"]) > 1 else ""),
            format_bytes(part["weight_bytes"]),
            format_bytes(part["memory"])
            + ("" if part["memory_limit"] is None else f" of {format_bytes(part['memory_limit'])}"),
            format_time(part["computing_picoseconds"]),
            format_time(part["receiving_picoseconds"]),
            format_time(part["picoseconds"]),
        ]
        for part in parts
    ]
    print_table("placement", ["device", "#stages", "#weights", "#memory", "#computing", "#receiving", "#time"], rows)
    for device in facts["left_out"]:
        print_line(f"not used: {device['device']}: {device['reason']}")
    slowest = parts[facts["bottleneck"]]
    print_line(f"bottleneck: {_device_name(slowest)}, {format_time(slowest['picoseconds'])} of each call")
    print_line(f"expected: {_times_text(facts)}")
    for change in facts["improvements"]:
        print_line(f"with {change['change']}: {_times_text(change)}")
    print_line("by hand: --placement " + ",".join(map(str, facts["stages_per_device"])))
    if facts["sizes"]:
        print_line("example sizes: " + ", ".join(f"{symbol} = {size}" for symbol, size in facts["sizes"].items()))
    for source, names in _sources_of_times(parts).items():
        print_line(f"{source} ({', '.join(names)})")
    print_line("links: " + "; ".join(f"{link_name}={text}" for link_name, text in facts["links"].items()))


def _times_text(times: Mapping[str, Any]) -> str:
    """The time of one call, and how many calls come out of a filled pipeline."""
    rate = _PICOSECONDS / times["interval_picoseconds"]
    calls = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{format_time(times['call_picoseconds'])} for one call, {calls} calls/s when all parts work at a time"


def _sources_of_times(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Where the times come from, with the devices for which they do."""
    sources: dict[str, list[str]] = {}
    for part in parts:
        profile = part["profile"]
        if profile is None:
            source = f"assumed: {REFERENCE_DEVICE}"
        elif "device" in profile:
            source = f"assumed: the speed of {profile['device']}"
        else:
            source = f"measured: {machine_text(profile)}"
        if part["speed"] != 1:
            source += f", at speed {part['speed']:g}"
        sources.setdefault(source, []).append(_device_name(part))
    return sources
