"""The estimated costs of a cut, and the profile that its times are of, as plain data and for people."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stagepack.cli.output import count_of
from stagepack.format.graph import value_bytes
from stagepack.format.manifest import Edge
from stagepack.format.plan import Plan
from stagepack.format.quantities import format_bytes, format_time
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, example_sizes, format_shape
from stagepack.format.tree import value_names

if TYPE_CHECKING:
    from stagepack.partition.cut_options import CutOptions
    from stagepack.partition.partitioner import Partition
    from stagepack.partition.profile import DeviceProfile, MeasuredCosts, Profile

_MICROBATCH_COUNTS = (1, 2, 4, 8, 16, 32)
_ASSUMED_LINKS = "links of 25 GB/s, 5 µs for each value"
REFERENCE_DEVICE = "devices of 50 TFLOP/s and 1 TB/s, 2 µs for each operator"


def cut_facts(
    plan: Plan,
    edges: Sequence[Edge],
    symbols: Sequence[Symbol],
    *,
    node_counts: Sequence[int],
    result_names: Collection[str],
) -> dict[str, Any]:
    """Return the stages and edges of a cut with their costs at the sizes of the example.

    node_counts: the number of nodes in the graph of each stage. The plan does not count nodes that several stages compute.
    """
    sizes = example_sizes(symbols)
    stage_times = [stage.time for stage in plan.stages]
    edge_facts = [_edge_facts(edge, value_bytes(edge, sizes), edge.name in result_names) for edge in edges]
    return {
        "sizes": sizes,
        "shared": plan.shared,
        "stages": [
            {
                "stage": stage_number,
                "starts_at": stage.module,
                "nodes": node_count,
                "weight_bytes": stage.weight_bytes,
                "flops": stage.flops,
                "memory": stage.memory,
                "memory_limit": stage.memory_limit,
                "received": stage.received,
                "speed": stage.speed,
                "picoseconds": round(stage.time),
            }
            for stage_number, (stage, node_count) in enumerate(zip(plan.stages, node_counts, strict=True))
        ],
        "edges": edge_facts,
        "traffic": sum(edge["bytes"] * len(edge["consumers"]) for edge in edge_facts if edge["producer"] is not None),
        "slowest_over_mean": max(stage_times) / (sum(stage_times) / len(stage_times)) if sum(stage_times) else 1.0,
        "bubble": {str(count): bubble_share(stage_times, count) for count in _MICROBATCH_COUNTS},
    }


def memory_text(stage_facts: Mapping[str, Any]) -> str:
    """Describe the memory of a stage, and its limit if there is one."""
    limit = stage_facts["memory_limit"]
    return format_bytes(stage_facts["memory"]) + ("" if limit is None else f" of {format_bytes(limit)}")


def bundle_cut_facts(bundle: Bundle, plan: Plan) -> dict[str, Any]:
    """Return the facts of the cut of a bundle, with the times of a plan of the same stages."""
    entry_point = bundle.entry_point
    return cut_facts(
        plan,
        bundle.edges,
        entry_point.symbols,
        node_counts=[stage.nodes for stage in bundle.stages],
        result_names=set(value_names(entry_point.signature.result)),
    )


def bubble_share(stage_times: Sequence[float], microbatch_count: int) -> float:
    """Return the share of the devices' time that is idle while a batch passes through the pipeline in microbatches.

    Stages work on different microbatches at the same time: the first microbatch takes the sum of the stage times, each further one the
    time of the slowest stage. For M microbatches and S even stages the share is (S - 1) / (M + S - 1), as in GPipe (Huang et al.,
    2019, arXiv:1811.06965, section 3).
    """
    batch_time = sum(stage_times) + (microbatch_count - 1) * max(stage_times)
    return 1 - sum(stage_times) * microbatch_count / (len(stage_times) * batch_time) if batch_time else 0.0


def _edge_facts(edge: Edge, byte_count: int, is_result: bool) -> dict[str, Any]:
    return {
        "name": edge.name,
        "value": f"{edge.dtype}{format_shape(edge.shape)}",
        "producer": edge.producer,
        "consumers": list(edge.consumers),
        "result": is_result,
        "bytes": byte_count,
        "skips": edge.producer is not None and any(consumer > edge.producer + 1 for consumer in edge.consumers),
    }


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


def _link_text(link: Mapping[str, float]) -> str:
    """Describe how fast values are sent."""
    latency = format_time(link["seconds_per_value"] * 1e12)
    speed = f"{1e-9 / link['seconds_per_byte']:.3g} GB/s" if link["seconds_per_byte"] else "any speed"
    return f"links of {speed}, {latency} for each value"


def assumption_lines(facts: Mapping[str, Any] | None) -> list[str]:
    """Return lines that say where the times of a cut come from."""
    if facts is None:
        return [f"assumed: {REFERENCE_DEVICE}; {_ASSUMED_LINKS}"]
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
    return [*lines, f"assumed: {_ASSUMED_LINKS}" if link is None else f"measured: {_link_text(link)}"]


def _device_line(facts: Mapping[str, Any]) -> str:
    dtypes_of_rate: dict[float, list[str]] = {}
    for dtype, rate in facts["flops"].items():
        dtypes_of_rate.setdefault(rate, []).append(dtype)
    rates = ", ".join(f"{rate / 1e12:g} TFLOP/s of {' and '.join(dtypes)}" for rate, dtypes in dtypes_of_rate.items())
    return (
        f"assumed: {facts['device']}: {rates}, {facts['memory_bandwidth'] / 1e9:g} GB/s and {format_bytes(facts['memory'])} of memory, "
        f"2 µs for each operator; links of {facts['link_bandwidth'] / 1e9:g} GB/s, 5 µs for each value"
    )
