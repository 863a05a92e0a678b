"""The facts of a bundle that `inspect`, `export` and `recut` print, read from its manifest alone.

- The estimated costs of a cut as plain data, which `plan` prints and `report` draws.
- What `stagepack load` prints.
- The nodes, repeats and weights of one stage, which `inspect --stage` prints.
- A profile as plain data: what `profile` prints, and what `plan` and `report` say about the times that they show.
"""

# Long because a function for each fact that commands print, used by several commands.

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stagepack.cli.output import count_of, format_bytes, format_flops, format_time, print_line, print_table
from stagepack.cli.run_options import print_trace
from stagepack.format.graph import Graph, value_bytes
from stagepack.format.manifest import Edge, Plan, Stage, format_inputs
from stagepack.format.operators import needed_permissions
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, example_sizes, format_guard, format_range, format_shape
from stagepack.format.tree import output_names, value_names
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import find_repeats
from stagepack.graph.subsequences import Repeat
from stagepack_loaders.window_plan import Residency

if TYPE_CHECKING:
    from stagepack.partition.cut_options import CutOptions
    from stagepack.partition.partitioner import Partition
    from stagepack.partition.profile import DeviceProfile, MeasuredCosts, Profile

MICROBATCH_COUNTS = (1, 2, 4, 8, 16, 32)
ASSUMED_LINKS = "links of 25 GB/s, 5 µs for each value"
ASSUMED_DEVICES = f"devices of 50 TFLOP/s and 1 TB/s, 2 µs for each operator; {ASSUMED_LINKS}"
_VERIFIED_PARTS = {
    "full": "all files that were read",
    "manifest": "all but the content of weight files (--verify manifest)",
    "off": "the manifest only (--verify off)",
}


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """Return the facts of a bundle as plain data: of the selected entry point, or of all of them in the list ``entry_points``."""
    manifest = bundle.manifest
    common_facts: dict[str, Any] = {
        "path": bundle.location,
        "version": manifest.version,
        "digest": bundle.digest,
        "producer": {"stagepack": manifest.producer.stagepack, "torch": manifest.producer.torch},
        "bytes": sum(file.size for file in manifest.files),
    }
    if bundle.selected is None:
        return common_facts | {"entry_points": [_entry_point_facts(selected) for selected in each_entry_point(bundle)]}
    return common_facts | _entry_point_facts(bundle)


def each_entry_point(bundle: Bundle) -> list[Bundle]:
    """Return the bundle at its selected entry point, or if none is selected, at each."""
    if bundle.selected is not None:
        return [bundle]
    return [bundle.select(entry_point.name) for entry_point in bundle.entry_points]


def _entry_point_facts(bundle: Bundle) -> dict[str, Any]:
    input_names = [edge.name for edge in bundle.inputs]
    names_of_value: dict[str, list[str]] = {}
    for output_name, value_name in output_names(bundle.entry_point.signature.result, input_names).items():
        names_of_value.setdefault(value_name, []).append(output_name)
    return {
        "entry_point": bundle.entry_point.name,
        "symbols": {symbol.name: {"min": symbol.min, "max": symbol.max} for symbol in bundle.entry_point.symbols},
        "guards": [format_guard(guard) for guard in bundle.entry_point.guards],
        "stages": [
            {
                "stage": stage_number,
                "nodes": stage.nodes,
                "weight_bytes": stage.weight_bytes,
                "flops": stage.flops,
                "files": [stage.graph, *stage.weights],
                "onnx": onnx_facts(bundle, stage),
                "inputs": list(stage.inputs),
                "outputs": list(stage.outputs),
                "namespaces": list(stage.namespaces),
                "state": list(stage.state),
            }
            for stage_number, stage in enumerate(bundle.stages)
        ],
        "edges": [
            {
                "name": edge.name,
                "dtype": edge.dtype,
                "shape": format_shape(edge.shape),
                "producer": edge.producer,
                "consumers": list(edge.consumers),
                "result": edge.name in names_of_value,
                "outputs": names_of_value.get(edge.name, []),
            }
            for edge in bundle.edges
        ],
    }


def onnx_facts(bundle: Bundle, stage: Stage) -> dict[str, Any] | None:
    """Return the ONNX files of a stage and their sizes in bytes, or None if it has no ONNX model."""
    if stage.onnx is None:
        return None
    model_file, weight_files = stage.onnx.model, stage.onnx.weights
    return {
        "files": [model_file, *weight_files],
        "bytes": bundle.files[model_file].size,
        "own_bytes": sum(bundle.files[weight_file].size for weight_file in weight_files),
    }


def print_bundle(bundle: Bundle) -> None:
    """Print the facts of a bundle for people."""
    facts = bundle_facts(bundle)
    producer = f"stagepack {facts['producer']['stagepack']}, torch {facts['producer']['torch']}"
    print_line(f"{facts['path']}: format {facts['version']}, {format_bytes(facts['bytes'])}, written by {producer}")
    print_line(f"sha256: {facts['digest']}")
    for selected in each_entry_point(bundle):
        if len(bundle.entry_points) > 1:
            print_line("")
            print_line(f"entry point {selected.entry_point.name}")
        _print_entry_point(selected, _entry_point_facts(selected))


def _print_entry_point(bundle: Bundle, facts: dict[str, Any]) -> None:
    for line in size_lines(bundle):
        print_line(line)
    print_stages(bundle)
    edge_rows = [
        [edge.name, f"{edge.dtype}{format_shape(edge.shape)}", *_ends(edge, fact["outputs"])]
        for edge, fact in zip(bundle.edges, facts["edges"], strict=True)
    ]
    print_table("edges", ["name", "value", "from", "to"], edge_rows)
    onnx_rows = [
        [
            str(stage["stage"]),
            format_bytes(stage["onnx"]["bytes"]),
            format_bytes(stage["onnx"]["own_bytes"]),
            " ".join(stage["onnx"]["files"]),
        ]
        for stage in facts["stages"]
        if stage["onnx"]
    ]
    if onnx_rows:
        print_table("ONNX models", ["#stage", "#model", "#own weights", "files"], onnx_rows)
    for stage in facts["stages"]:
        if stage["state"]:
            print_line(f"stage {stage['stage']} has state: {', '.join(stage['state'])}")
        if stage["namespaces"]:
            print_line(
                f"stage {stage['stage']} runs only with --allow-ops {' --allow-ops '.join(stage['namespaces'])}: "
                "pass it only if you know and trust the bundle and the library of these operators"
            )


def size_lines(bundle: Bundle) -> Iterator[str]:
    """Yield the ranges of the dynamic sizes, and the conditions on them; nothing if all sizes are fixed."""
    if bundle.entry_point.symbols:
        ranges = ", ".join(f"{symbol.name}: {format_range(symbol)}" for symbol in bundle.entry_point.symbols)
        yield f"dynamic sizes: {ranges}"
    if bundle.entry_point.guards:
        yield f"only for sizes with {', '.join(map(format_guard, bundle.entry_point.guards))}"


def print_written(bundle: Bundle, out: str, seconds: float) -> None:
    """Print that a bundle was written, its inputs with their dynamic sizes, and its table of stages."""
    size = format_bytes(sum(file.size for file in bundle.manifest.files))
    stage_count = sum(len(selected.stages) for selected in each_entry_point(bundle))
    print_line(f"wrote {out}: {count_of('stage', stage_count)}, {size}, in {seconds:.1f} s")
    for selected in each_entry_point(bundle):
        if len(bundle.entry_points) > 1:
            print_line(f"entry point {selected.entry_point.name}")
        print_line(f"inputs: {format_inputs(selected.entry_point)}")
        for line in size_lines(selected):
            print_line(line)
        print_stages(selected)


def print_stages(bundle: Bundle) -> None:
    """Print the table of stages."""
    rows = [
        [
            str(stage_number),
            str(stage.nodes),
            format_bytes(stage.weight_bytes),
            format_flops(stage.flops),
            " ".join([stage.graph, *stage.weights]),
        ]
        for stage_number, stage in enumerate(bundle.stages)
    ]
    print_table("stages", ["#stage", "#nodes", "#weights", "#compute", "files"], rows)


def _ends(edge: Edge, outputs: list[str]) -> list[str]:
    """Return where an edge comes from and where it goes to: the result has the names that callers know."""
    source = "input" if edge.producer is None else f"stage {edge.producer}"
    targets = [f"stage {consumer}" for consumer in edge.consumers] + [f"result {name}" for name in outputs]
    return [source, ", ".join(targets) or "(unused)"]


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
        "bubble": {str(count): bubble_share(stage_times, count) for count in MICROBATCH_COUNTS},
    }


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


def print_facts(facts: dict[str, Any], inputs_file: Path | None, outputs_file: Path | None) -> None:
    """Print what was loaded, and what it answered.

    inputs_file: the file of the inputs that were run; None for the example.
    """
    in_processes = any("process" in stage for stage in facts["stages"])
    rows = [
        [
            str(stage["stage"]),
            *([f"{stage['process']} on {stage['host']}"] if in_processes else []),
            stage["runtime"],
            stage["device"],
            format_bytes(stage["bytes_read"]),
            f"{stage['seconds']:.3f} s",
            " ".join(stage["files"]),
        ]
        for stage in facts["stages"]
    ]
    columns = ["#stage", *(["process"] if in_processes else []), "runtime", "device", "#read", "#time", "files"]
    print_table("loaded stages", columns, rows)
    print_line(f"verified: {_verified_text(facts)}")
    for stage in facts["stages"]:
        if "residency" in stage:
            print_line(f"stage {stage['stage']}: {Residency(**stage['residency'])}")
    outputs = count_of("output", facts.get("outputs", 0))
    if "difference" in facts:
        print_line(f"ran the example: {outputs}, largest difference {facts['difference']:g}")
    elif inputs_file is not None:
        print_line(f"ran {inputs_file}: {outputs}")
    phases: dict[str, float] = facts["start"]
    goal = "first answer" if "first call" in phases else "loaded"
    durations = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items())
    print_line(f"{goal} after {sum(phases.values()):.3f} s: {durations}")
    if "all_weights" in facts:
        print_line(f"all weights after {facts['all_weights']:.3f} s")
    if outputs_file:
        print_line(f"wrote {outputs_file}")
    if "trace" in facts:
        print_trace(facts["trace"])


def _verified_text(facts: dict[str, Any]) -> str:
    """Say what was compared with its digest, and when."""
    unchanged_bytes = sum(stage.get("bytes_unchanged", 0) for stage in facts["stages"])
    earlier = (
        f"; {format_bytes(unchanged_bytes)} of weights earlier, and they are unchanged since" if unchanged_bytes else ""
    )
    return _VERIFIED_PARTS[facts["verify"]] + earlier


def stage_graph_facts(graph: Graph, stage_number: int) -> dict[str, Any]:
    """Return the facts of the graph of a stage as plain data."""
    search_result = find_repeats(GraphAnalysis(graph))
    return {
        "stage": stage_number,
        "nodes": [
            {
                "node": node_index,
                "op": graph.ops[node.op].name,
                "makes": {
                    value.name: f"{value.dtype}{format_shape(value.shape)}"
                    for value in node.outputs
                    if value is not None
                },
                "module": graph.scopes[node.scope].path,
                "flops": node.cost.flops,
            }
            for node_index, node in enumerate(graph.nodes)
        ],
        "repeats": [
            *(_repeat_facts(graph, repeat, None) for repeat in search_result.repeats),
            *(_repeat_facts(graph, impure.repeat, impure.reason) for impure in search_result.impure),
        ],
        "weights": [
            {
                "name": weight.names[0],
                "also": list(weight.names[1:]),
                "kind": weight.kind,
                "dtype": weight.dtype,
                "shape": list(weight.shape),
            }
            for weight in graph.weights
        ],
        "allow_ops": sorted(needed_permissions([graph])),
    }


def _repeat_facts(graph: Graph, repeat: Repeat, reason: str | None) -> dict[str, Any]:
    """Return the facts of a repeat; `reason` says why it is not folded, None that it is."""
    return {
        "times": len(repeat.starts),
        "nodes": repeat.length,
        "first": graph.scopes[graph.nodes[repeat.starts[0]].scope].path,
        "starts": list(repeat.starts),
        "left_alone": None if reason is None else f"not folded: {reason}",
    }


def print_stage_graph(facts: dict[str, Any]) -> None:
    """Print the facts of the graph of a stage for people."""
    node_rows = [
        [
            str(node["node"]),
            node["op"],
            ", ".join(f"{value_name} {value_type}" for value_name, value_type in node["makes"].items()),
            format_flops(node["flops"]),
            node["module"],
        ]
        for node in facts["nodes"]
    ]
    print_table(f"nodes of stage {facts['stage']}", ["#node", "operator", "outputs", "#compute", "module"], node_rows)
    if facts["repeats"]:
        repeat_rows = [
            [
                str(repeat["times"]),
                str(repeat["nodes"]),
                repeat["first"],
                repeat["left_alone"] or "folded into a region",
            ]
            for repeat in facts["repeats"]
        ]
        print_table("repeats", ["#times", "#nodes", "first module", "storage"], repeat_rows)
    weight_rows = [
        [weight["name"], weight["kind"], f"{weight['dtype']}{format_shape(weight['shape'])}"]
        for weight in facts["weights"]
    ]
    print_table("weights", ["name", "kind", "value"], weight_rows)
    if facts["allow_ops"]:
        print_line(
            f"stage {facts['stage']} runs only with --allow-ops {' --allow-ops '.join(facts['allow_ops'])}: "
            "pass it only if you know and trust the bundle and the library of these operators"
        )


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
