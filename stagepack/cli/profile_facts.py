"""A profile as plain data: what `profile` prints, and what `plan` and `report` say about the times that they show."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stagepack.cli.cut_facts import ASSUMED_DEVICES, ASSUMED_LINKS
from stagepack.cli.output import count_of
from stagepack.cli.quantities import format_bytes, format_time

if TYPE_CHECKING:
    from stagepack.partition.costs import MeasuredCosts
    from stagepack.partition.cut_options import CutOptions
    from stagepack.partition.device_profile import DeviceProfile
    from stagepack.partition.partitioner import Partition
    from stagepack.partition.profile import Profile


def profile_facts(profile: "Profile") -> dict[str, Any]:
    """Return where and how the times of a profile were measured."""
    return {
        "machine": profile.machine,
        "devices": list(dict.fromkeys(stage.device for stage in profile.stages)),
        "torch": profile.torch,
        "threads": profile.threads,
        "runs": profile.runs,
        "sizes": profile.sizes,
        "link": None if profile.link is None else msgspec.to_builtins(profile.link),
    }


def cost_facts(cut_options: "CutOptions", partition: "Partition") -> dict[str, Any] | None:
    """Return the facts of the profile that the times of a cut are of; None without a profile."""
    profile = cut_options.profile
    if partition.measured is not None:
        return measured_facts(cast("Profile", profile), partition.measured)
    return None if profile is None else device_facts(cast("DeviceProfile", profile))


def device_facts(device: "DeviceProfile") -> dict[str, Any]:
    """Return the speeds of a device."""
    return {
        "device": device.name,
        "flops": dict(device.flops),
        "memory_bandwidth": device.memory_bandwidth,
        "memory": device.memory,
        "link_bandwidth": device.link_bandwidth,
    }


def measured_facts(profile: "Profile", measured: "MeasuredCosts") -> dict[str, Any]:
    """Return the facts of a profile that the times of a cut are of."""
    return profile_facts(profile) | {
        "measured_nodes": measured.measured_count,
        "nodes": len(measured.costs.node_times),
        "scale": measured.scale,
    }


def machine_text(facts: Mapping[str, Any]) -> str:
    """Describe where times were measured."""
    devices = ", ".join(facts["devices"])
    return f"{devices} of {facts['machine']}, torch {facts['torch']}, {count_of('thread', facts['threads'])}"


def link_text(link: Mapping[str, float]) -> str:
    """Describe how fast values are sent."""
    latency = format_time(link["seconds_per_value"] * 1e12)
    speed = f"{1e-9 / link['seconds_per_byte']:.3g} GB/s" if link["seconds_per_byte"] else "any speed"
    return f"links of {speed}, {latency} for each value"


def assumption_lines(facts: Mapping[str, Any] | None) -> list[str]:
    """Return lines that say where the times of a cut come from."""
    if facts is None:
        return [f"assumed: {ASSUMED_DEVICES}"]
    if "device" in facts:
        return [_device_line(facts)]
    missing_count = facts["nodes"] - facts["measured_nodes"]
    sizes = "".join(f", {symbol} = {size}" for symbol, size in facts["sizes"].items())
    lines = [f"measured: {machine_text(facts)}{sizes}"]
    if missing_count:
        lines.append(
            f"not measured: {missing_count} of {count_of('node', facts['nodes'])}; "
            f"their times are estimates times {facts['scale']:.4g}, as the others took"
        )
    link = facts["link"]
    return [*lines, f"assumed: {ASSUMED_LINKS}" if link is None else f"measured: {link_text(link)}"]


def _device_line(facts: Mapping[str, Any]) -> str:
    dtypes_of_rate: dict[float, list[str]] = {}
    for dtype, rate in facts["flops"].items():
        dtypes_of_rate.setdefault(rate, []).append(dtype)
    rates = ", ".join(f"{rate / 1e12:g} TFLOP/s of {' and '.join(dtypes)}" for rate, dtypes in dtypes_of_rate.items())
    return (
        f"assumed: {facts['device']}: {rates}, {facts['memory_bandwidth'] / 1e9:g} GB/s and {format_bytes(facts['memory'])} of memory, "
        f"2 µs for each operator; links of {facts['link_bandwidth'] / 1e9:g} GB/s, 5 µs for each value"
    )
