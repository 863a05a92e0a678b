"""`stagepack plan`."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from stagepack.capture.transformers.model_folders import check_source_path
from stagepack.cli.command import argument, either, flag, is_given, only_with, option_object, subcommand
from stagepack.cli.cost_facts import assumption_lines, bundle_cut_facts, cost_facts, cut_facts, memory_text
from stagepack.cli.failures import fail, shown_warnings
from stagepack.cli.output import count_of, print_json, print_line, print_table, progress
from stagepack.cli.placement_facts import PlacementFlags, plan_placement, print_placement
from stagepack.cli.shared_flags import DIGEST, DTYPE, OVERWRITE, CutFlags, Dtype, ExampleFlags, open_argument
from stagepack.cli.stage_diagram import graphviz_lines, mermaid_lines
from stagepack.format.graph import Graph
from stagepack.format.output_file import check_output_file
from stagepack.format.plan import Plan
from stagepack.format.quantities import format_bytes, format_flops, format_time
from stagepack.format.shapes import Symbol
from stagepack.partition.costs import estimated_operators
from stagepack.remote.url import is_bundle

if TYPE_CHECKING:
    from stagepack.partition.cut_options import CutOptions
    from stagepack.partition.partitioner import Partition


@option_object
class _ShownCutFlags(CutFlags):
    shows_times = True

    memory_sizes: tuple[str, ...] = only_with(
        flag(
            "--memory SIZE",
            "Memory of the device of each stage, or of each --device, in order, such as 24GiB, 24GB or a number of bytes. Repeatable.",
            default_text="unlimited",
        ),
        "--stages",
        "--device",
    )
    speeds: tuple[float, ...] = only_with(
        flag(
            "--speed FACTOR",
            "Relative speed of the device of each stage, or of each --device, in order: 2 is twice as fast as 1. Repeatable.",
            default_text="1",
        ),
        "--stages",
        "--device",
    )
    profile_names: tuple[str, ...] = flag(
        "--profile [D=]DEVICE|FILE",
        "Device that the times are of: a10, a100, b200, h100, h200, l4, l40s, mi300x, t4 or v100, whose memory is also a limit unless "
        "--memory is given; or a file of 'stagepack profile' with measured times of the model's operators. With --device, D says which of "
        "them it is for, by its name or its kind, such as cuda:0 or cuda, and the option is repeatable.",
        default_text="a device of 50 TFLOP/s",
    )


@option_object
class _Options:
    source: str = argument("SOURCE|BUNDLE")
    digest: str | None = DIGEST
    example: ExampleFlags
    dtype: Dtype | None = DTYPE
    cut: _ShownCutFlags
    placement: PlacementFlags
    out: Path | None = flag(
        "-o, --out FILE", "Write the plan as JSON, to edit and pass to --plan.", default_text="not written"
    )
    overwrite: bool = only_with(OVERWRITE, "--out")
    output_format: Literal["dot", "mermaid", "json"] | None = either(
        flag("--dot", "Print the graph of the stages in the DOT language of Graphviz.", flag_value="dot"),
        flag("--mermaid", "Print the graph of the stages as a Mermaid flowchart.", flag_value="mermaid"),
        flag("--json", "Print JSON instead of text.", flag_value="json"),
    )


@subcommand(
    "plan",
    examples=[
        "stagepack plan net.py:make_model --stages 4",
        "stagepack plan net.stagepack --stages 2 --memory 24GiB --memory 80GiB",
        "stagepack plan net.stagepack --stages 4 -o plan.json",
        "stagepack plan net.stagepack --stages 4 --profile h100",
        "stagepack plan net.stagepack --stages 4 --profile times.json",
        "stagepack plan net.stagepack --device a/cuda:0 --device b/cuda:0",
        "stagepack plan net.stagepack --dot | dot -Tsvg > stages.svg",
    ],
)
def command(options: _Options) -> None:
    """Show how a model or a bundle would be cut.

    SOURCE is a model, as for 'stagepack export', whose code runs. A BUNDLE needs no torch; without a cut option, its own cut is shown.

    For each stage, the table shows its weights, memory, compute, the bytes that it receives, and its time. Memory, received bytes and
    time are estimates for one call with inputs of the example's sizes. With --profile, the time is estimated for a device, or measured.

    With --device, the stages of a BUNDLE stay as they are: the table shows which consecutive ones each device would run, so that the
    slowest device is as fast as possible, and what a better device or link would give.
    """
    source, out = options.source, options.out
    if options.placement.devices:
        _show_placement(options)
        return
    if out is not None:
        check_output_file(out, overwrite=options.overwrite)
    if is_bundle(source) and (options.example.is_used or options.dtype is not None):
        raise click.UsageError(
            f"{ExampleFlags.NAMES}, and --dtype, are for a SOURCE: a bundle contains its example inputs and weights"
        )
    if options.digest is not None and not is_bundle(source):
        raise click.UsageError(f"--digest: expected a bundle, found the model {source}: leave it out")
    with shown_warnings():
        plan, facts = _plan_bundle(options) if is_bundle(source) else _plan_source(options)
    if out is not None:
        from stagepack.partition.cut_options import write_plan  # noqa: PLC0415 - only this option needs it

        write_plan(plan, out)
    match options.output_format:
        case "json":
            print_json(facts)
        case None:
            _print_plan(facts)
        case diagram:
            for line in graphviz_lines(facts) if diagram == "dot" else mermaid_lines(facts):
                print_line(line)


def _show_placement(options: _Options) -> None:
    """Show the placement of the stages of a bundle on devices."""
    if not is_bundle(options.source):
        raise click.UsageError(
            f"--device places the stages of a bundle, found the model {options.source}: export it first"
        )
    others = {
        "--stages, --split-at and --plan": options.cut.has_way,
        "--shared": is_given("weight_sharing"),
        "--out": options.out is not None,
        "--dot and --mermaid": options.output_format not in (None, "json"),
        ExampleFlags.NAMES: options.example.is_used,
        "--dtype": options.dtype is not None,
    }
    for flags, is_used in others.items():
        if is_used:
            raise click.UsageError(f"--device cannot be used with {flags}: the stages stay as they are")
    cut = options.cut
    bundle = open_argument(options.source, *(["torch"] if options.placement.is_auto else []))
    devices = options.placement.target_devices(bundle, cut.memory_sizes, cut.speeds, cut.profile_names)
    is_described = bool(cut.memory_sizes or cut.speeds or cut.profile_names)
    facts = plan_placement(bundle, devices, options.placement, is_described=is_described)
    if options.output_format == "json":
        print_json(facts)
    else:
        print_placement(facts)


def _plan_bundle(options: _Options) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a bundle, cut again if there is a cut option, and the facts of its cut."""
    bundle = open_argument(options.source)
    own_plan = bundle.entry_point.plan
    options.cut.check_recut()
    if not options.cut.has_way and not options.cut.profile_names:
        if own_plan is None:
            fail(f"{bundle.location}: the bundle contains no plan: pass a cut option, such as --stages 4")
        graphs = [bundle.graph(stage_number) for stage_number in range(len(bundle.stages))]
        return own_plan, bundle_cut_facts(bundle, own_plan) | _graph_facts(graphs, None)
    from stagepack.roads.recut import plan_bundle  # noqa: PLC0415 - numpy, only to make a new plan

    cut_options = options.cut.cut_options()
    if cut_options.profile is not None and not cut_options.has_way and own_plan is not None:
        cut_options = replace(cut_options, plan=own_plan)
    return _new_plan(plan_bundle(bundle, cut_options), bundle.entry_point.symbols, cut_options)


def _plan_source(options: _Options) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a model, and the facts of its cut."""
    source = options.source
    check_source_path(source)
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with progress("importing torch") as next_step, contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.source import ModelSource  # noqa: PLC0415 - torch, slow to import
        from stagepack.roads.capture_writer import plan_capture  # noqa: PLC0415 - the same

        cut_options = options.cut.cut_options()
        next_step("capturing the model")
        captures = ModelSource.of(source, dtype=options.dtype).captures(options.example.example())
        if len(captures) > 1:
            fail(f"{source}: expected one entry point, found {', '.join(captures)}: export it, and plan the bundle")
        next_step("planning")
        (capture,) = captures.values()
        partition, symbols = plan_capture(capture, cut_options)
    return _new_plan(partition, symbols, cut_options)


def _new_plan(
    partition: "Partition", symbols: tuple[Symbol, ...], cut_options: "CutOptions"
) -> tuple[Plan, dict[str, Any]]:
    graphs = [stage.graph for stage in partition.cut.stages]
    facts = cut_facts(
        partition.profiled_plan,
        partition.cut.edges,
        symbols,
        node_counts=[len(graph.nodes) for graph in graphs],
        result_names=set(partition.cut.outputs),
    )
    return partition.profiled_plan, facts | _graph_facts(graphs, cost_facts(cut_options, partition))


def _graph_facts(graphs: Sequence[Graph], profile_facts: dict[str, Any] | None) -> dict[str, Any]:
    return {"estimated_operators": estimated_operators(graphs), "profile": profile_facts}


def _print_plan(facts: dict[str, Any]) -> None:
    stage_rows = [
        [
            str(stage["stage"]),
            str(stage["nodes"]),
            format_bytes(stage["weight_bytes"]),
            memory_text(stage),
            format_flops(stage["flops"]),
            format_bytes(stage["received"]),
            format_time(stage["picoseconds"]),
            stage["starts_at"] or "(the model)",
        ]
        for stage in facts["stages"]
    ]
    columns = ["#stage", "#nodes", "#weights", "#memory", "#compute", "#received", "#time", "starts at"]
    print_table("stages", columns, stage_rows)
    edge_rows = [
        [
            edge["name"],
            edge["value"],
            str(edge["producer"]),
            ", ".join(map(str, edge["consumers"])) + (" (skip)" if edge["skips"] else ""),
            format_bytes(edge["bytes"]),
        ]
        for edge in facts["edges"]
        if edge["producer"] is not None and edge["consumers"]
    ]
    if edge_rows:
        print_table("edges between stages", ["name", "value", "#from", "to", "#size"], edge_rows)
    print_line(f"balance: slowest stage {facts['slowest_over_mean']:.2f} times the mean")
    print_line(f"transfer: {format_bytes(facts['traffic'])} between stages in one call")
    bubble = ", ".join(f"{count}: {share:.0%}" for count, share in facts["bubble"].items())
    print_line(f"bubble by number of microbatches: {bubble}")
    if facts["sizes"]:
        print_line("example sizes: " + ", ".join(f"{symbol} = {size}" for symbol, size in facts["sizes"].items()))
    for line in assumption_lines(facts["profile"]):
        print_line(line)
    if facts["estimated_operators"]:
        operators = ", ".join(
            f"{operator} ({count_of('node', node_count)})"
            for operator, node_count in facts["estimated_operators"].items()
        )
        print_line(f"operators without a cost formula, estimated from shapes: {operators}")
