"""`stagepack profile`."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.command import flag, option_object, subcommand
from stagepack.cli.cost_facts import machine_text, profile_facts
from stagepack.cli.failures import fail
from stagepack.cli.output import count_of, print_json, print_line, print_table, progress
from stagepack.cli.run_options import DEVICES, INPUTS_FILE
from stagepack.cli.shared_flags import ALLOW_OPS, IMPORTS, JSON, OVERWRITE, BundleOptions, open_argument
from stagepack.format.output_file import check_output_file, is_standard_output
from stagepack.format.quantities import format_time
from stagepack.format.reader import Bundle
from stagepack_loaders.registry import TORCH_RUNTIME, import_runtime

if TYPE_CHECKING:
    from stagepack.partition.profile import Profile
    from stagepack_loaders.torch.measurement import BundleMeasurement

_DEFAULT_RUNS = 10
_MOST_RUNS = 1000
_SHOWN_OPERATORS = 8
_PICOSECONDS = 1e12  # in a second


@option_object
class _Options(BundleOptions):
    out: Path = flag("-o, --out FILE", "JSON file to write.", required=True)
    devices: tuple[str, ...] = DEVICES
    inputs_file: Path | None = INPUTS_FILE
    runs: int = flag(
        "--runs N",
        "How many runs of each stage are measured, after some that do not count.",
        type=click.IntRange(1, _MOST_RUNS),
        default=_DEFAULT_RUNS,
    )
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    overwrite: bool = OVERWRITE
    as_json: bool = JSON


@subcommand(
    "profile",
    examples=[
        "stagepack profile net.stagepack -o times.json",
        "stagepack profile net.stagepack -o times.json --inputs batch.safetensors",
        "stagepack plan net.stagepack --stages 4 --profile times.json",
    ],
)
def command(options: _Options) -> None:
    """Measure how long the operators of a bundle take.

    Each stage runs in PyTorch, several times as a whole and several times with each operator measured; the medians are written. The times
    are of the model, not of its cut: 'stagepack plan', 'recut' and 'export' with --profile use them in the place of estimates, for any
    number of stages. One stage after another is loaded, so that only one must fit into the memory of its device. Of a bundle with several
    entry points, each has a file of its own, such as times.encode.json.
    """
    bundle, out = open_argument(options.bundle_path), options.out
    entry_points = each_entry_point(bundle)
    if is_standard_output(out) and len(entry_points) > 1:
        fail("--out -: expected one entry point, whose times are written to standard output: choose it by BUNDLE#NAME")
    files = [
        out if len(entry_points) == 1 else _file_of_entry_point(out, selected.entry_point.name)
        for selected in entry_points
    ]
    for file in files:
        check_output_file(file, overwrite=options.overwrite)
    profiles = []
    with progress("importing torch") as next_step:
        import_runtime(TORCH_RUNTIME)
        from stagepack.partition.profile import write_profile  # noqa: PLC0415 - after the arguments are checked
        from stagepack_loaders.torch.measurement import measure_bundle  # noqa: PLC0415 - the same

        for selected, file in zip(entry_points, files, strict=True):
            measurement = measure_bundle(
                selected,
                options.devices,
                inputs_file=options.inputs_file,
                allow_ops=options.allow_ops,
                runs=options.runs,
                progress=next_step,
            )
            profiles.append(make_profile(selected, measurement, options.runs))
            write_profile(profiles[-1], file)
    facts = [_facts(profile, file) for profile, file in zip(profiles, files, strict=True)]
    if options.as_json:
        named = [
            {"entry_point": selected.entry_point.name} | fact
            for selected, fact in zip(entry_points, facts, strict=True)
        ]
        print_json(facts[0] if len(facts) == 1 else {"entry_points": named})
        return
    for selected, entry_point_facts in zip(entry_points, facts, strict=True):
        if len(entry_points) > 1:
            print_line(f"entry point {selected.entry_point.name}")
        _print_profile(entry_point_facts)


def _file_of_entry_point(out: Path, entry_point_name: str) -> Path:
    """The file of one of several entry points: ``times.encode.json`` for ``times.json``."""
    return out.with_name(f"{out.stem}.{entry_point_name}{out.suffix}")


def _facts(profile: "Profile", file: Path) -> dict[str, Any]:
    return profile_facts(profile) | {
        "file": str(file),
        "measured_nodes": len(profile.nodes),
        "stages": [
            {"stage": stage.stage, "device": stage.device, "seconds": stage.seconds} for stage in profile.stages
        ],
        "operators": _operator_facts(profile),
    }


def make_profile(bundle: Bundle, measurement: "BundleMeasurement", runs: int) -> "Profile":
    """Return the profile of measured times. A node that several stages compute has the mean of its times."""
    import torch  # noqa: PLC0415 - imported by now

    from stagepack.partition.profile import NodeTime, Profile, StageTime, model_digest  # noqa: PLC0415 - after the checks
    from stagepack.roads.recut import whole_graph  # noqa: PLC0415 - the same

    graph = whole_graph(bundle)
    times_of_node: defaultdict[int, list[float]] = defaultdict(list)
    for stage in measurement.stages:
        for node_number, seconds in stage.node_seconds.items():
            times_of_node[node_number].append(seconds)
    nodes = [(node_number, graph.nodes[node_number], times) for node_number, times in sorted(times_of_node.items())]
    return Profile(
        model=model_digest(graph),
        bundle=bundle.digest,
        machine=measurement.machine,
        torch=str(torch.__version__).split("+")[0],
        threads=measurement.threads,
        runs=runs,
        sizes=measurement.sizes,
        stages=tuple(
            StageTime(stage=stage.stage, device=stage.device, seconds=stage.seconds) for stage in measurement.stages
        ),
        nodes=tuple(
            NodeTime(
                node=node_number,
                op=graph.ops[node.op].name,
                module=graph.scopes[node.scope].path,
                seconds=sum(times) / len(times),
            )
            for node_number, node, times in nodes
        ),
    )


def _operator_facts(profile: "Profile") -> list[dict[str, Any]]:
    """The times of each operator, the longest first."""
    times_of_op: defaultdict[str, list[float]] = defaultdict(list)
    for node_time in profile.nodes:
        times_of_op[node_time.op].append(node_time.seconds)
    sums = sorted(((sum(times), op, len(times)) for op, times in times_of_op.items()), reverse=True)
    return [{"operator": op, "nodes": node_count, "seconds": seconds} for seconds, op, node_count in sums]


def _print_profile(facts: dict[str, Any]) -> None:
    total_seconds = sum(stage["seconds"] for stage in facts["stages"])
    stage_rows = [
        [str(stage["stage"]), stage["device"], *_time_cells(stage["seconds"], total_seconds)]
        for stage in facts["stages"]
    ]
    print_table("stages", ["#stage", "device", "#time", "#share"], stage_rows)
    operator_rows = [
        [operator["operator"], str(operator["nodes"]), *_time_cells(operator["seconds"], total_seconds)]
        for operator in facts["operators"][:_SHOWN_OPERATORS]
    ]
    print_table("operators", ["operator", "#nodes", "#time", "#share"], operator_rows)
    if facts["sizes"]:
        print_line("sizes: " + ", ".join(f"{symbol} = {size}" for symbol, size in facts["sizes"].items()))
    print_line(f"measured: {machine_text(facts)}, medians of {count_of('run', facts['runs'])}")
    print_line(
        f"wrote {facts['file']}: {count_of('node', facts['measured_nodes'])}, {format_time(total_seconds * _PICOSECONDS)} in all"
    )


def _time_cells(seconds: float, total_seconds: float) -> list[str]:
    share = seconds / total_seconds if total_seconds else 0.0
    return [format_time(seconds * _PICOSECONDS), f"{share:.0%}"]
