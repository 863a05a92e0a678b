"""`stagepack plan`."""

import contextlib
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from stagepack.capture.model_folders import check_source_path
from stagepack.cli.bundle_facts import assumption_lines, cost_facts, cut_facts
from stagepack.cli.command import subcommand
from stagepack.cli.cut_option_flags import cut_option_flags
from stagepack.cli.example_flags import example_flags
from stagepack.cli.failures import fail, shown_warnings
from stagepack.cli.output import (
    count_of,
    format_bytes,
    format_flops,
    format_time,
    print_json,
    print_line,
    print_table,
    progress,
)
from stagepack.cli.path_options import PathType, digest_option, is_bundle, open_argument
from stagepack.cli.run_options import dtype_option
from stagepack.cli.stage_diagram import graphviz_lines, mermaid_lines
from stagepack.format.graph import Graph
from stagepack.format.manifest import Edge, Plan
from stagepack.format.output_file import check_output_file
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.tree import value_names
from stagepack.partition.operator_costs import estimated_operators

if TYPE_CHECKING:
    from stagepack.capture.stated_inputs import ExampleArguments
    from stagepack.partition.cut_options import CutOptions
    from stagepack.partition.partitioner import Partition


class _PlannedCut(NamedTuple):
    """A cut as it is shown.

    Attributes:
        plan: the stages with their times.
        edges: the edges between the stages.
        symbols: the symbols of the model.
        graphs: the graphs of the stages.
        result_names: the names of the values that the model returns.
        profile: facts about the profile that the times are of, if there is one.
    """

    plan: Plan
    edges: tuple[Edge, ...]
    symbols: tuple[Symbol, ...]
    graphs: list[Graph]
    result_names: Collection[str]
    profile: dict[str, Any] | None


@subcommand(
    "plan",
    examples=[
        "stagepack plan net.py:make_model --stages 4",
        "stagepack plan net.stagepack --stages 2 --memory 24GiB --memory 80GiB",
        "stagepack plan net.stagepack --stages 4 -o plan.json",
        "stagepack plan net.stagepack --stages 4 --profile h100",
        "stagepack plan net.stagepack --stages 4 --profile times.json",
        "stagepack plan net.stagepack --dot | dot -Tsvg > stages.svg",
    ],
)
@click.argument("source", metavar="SOURCE|BUNDLE")
@digest_option
@example_flags
@dtype_option
@partial(cut_option_flags, shows_times=True)
@click.option(
    "-o",
    "--out",
    type=PathType(Path),
    metavar="FILE",
    show_default="not written",
    help="Write the plan as JSON, to edit and pass to --plan.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@click.option(
    "--dot", "output_format", flag_value="dot", help="Print the graph of the stages in the DOT language of Graphviz."
)
@click.option(
    "--mermaid", "output_format", flag_value="mermaid", help="Print the graph of the stages as a Mermaid flowchart."
)
@click.option("--json", "output_format", flag_value="json", help="Print JSON instead of text.")
def command(
    source: str,
    make_cut_options: "Callable[[], CutOptions] | None",
    make_example: "Callable[[], ExampleArguments] | None",
    dtype: str | None,
    out: Path | None,
    overwrite: bool,
    output_format: str | None,
) -> None:
    """Show how a model or a bundle would be cut.

    SOURCE is a model, as for 'stagepack export', whose code runs. A BUNDLE needs no torch; without a cut option, its own cut is shown.

    For each stage, the table shows its weights, memory, compute, the bytes that it receives, and its time. Memory, received bytes and
    time are estimates for one call with inputs of the example's sizes; with --profile, the time is that of a device, or measured.
    """
    if out is not None:
        check_output_file(out, overwrite=overwrite)
    if is_bundle(source):
        if make_example is not None or dtype is not None:
            raise click.UsageError(
                "--inputs, --input, --dynamic and --dtype are for a SOURCE: a bundle contains its example inputs and weights"
            )
        with shown_warnings():
            planned = _plan_bundle(open_argument(source), make_cut_options)
    else:
        check_source_path(source)
        with shown_warnings():
            planned = _plan_source(source, make_cut_options, make_example, dtype)
    if out is not None:
        from stagepack.partition.cut_options import write_plan  # noqa: PLC0415 - only this option needs it

        write_plan(planned.plan, out)
    facts = cut_facts(
        planned.plan,
        planned.edges,
        planned.symbols,
        node_counts=[len(graph.nodes) for graph in planned.graphs],
        result_names=planned.result_names,
    ) | {
        "estimated_operators": estimated_operators(planned.graphs),
        "profile": planned.profile,
    }
    match output_format:
        case "json":
            print_json(facts)
        case None:
            _print_plan(facts)
        case _:
            for line in graphviz_lines(facts) if output_format == "dot" else mermaid_lines(facts):
                print_line(line)


def _plan_bundle(bundle: Bundle, make_cut_options: "Callable[[], CutOptions] | None") -> _PlannedCut:
    own_plan = bundle.entry_point.plan
    if make_cut_options is None:
        if own_plan is None:
            fail(f"{bundle.location}: the bundle contains no plan: pass a cut option, such as --stages 4")
        graphs = [bundle.graph(stage_number) for stage_number in range(len(bundle.stages))]
        result_names = set(value_names(bundle.entry_point.signature.result))
        return _PlannedCut(own_plan, bundle.edges, bundle.entry_point.symbols, graphs, result_names, None)
    from stagepack.recutter import plan_bundle  # noqa: PLC0415 - numpy, only to make a new plan

    cut_options = make_cut_options()
    if cut_options.profile is not None and not cut_options.has_way and own_plan is not None:
        cut_options = replace(cut_options, plan=own_plan)
    return _planned_cut(plan_bundle(bundle, cut_options), bundle.entry_point.symbols, cut_options)


def _plan_source(
    source: str,
    make_cut_options: "Callable[[], CutOptions] | None",
    make_example: "Callable[[], ExampleArguments] | None",
    dtype: str | None,
) -> _PlannedCut:
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with progress("importing torch") as next_step, contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.source import NO_EXAMPLE, capture_source_argument  # noqa: PLC0415 - torch, slow to import
        from stagepack.exporter import plan_capture  # noqa: PLC0415 - the same
        from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same

        cut_options = CutOptions() if make_cut_options is None else make_cut_options()
        next_step("capturing the model")
        example = NO_EXAMPLE if make_example is None else make_example()
        captures = capture_source_argument(source, example, dtype=dtype)
        if len(captures) > 1:
            fail(f"{source}: expected one entry point, found {', '.join(captures)}: export it, and plan the bundle")
        next_step("planning")
        (capture,) = captures.values()
        partition, symbols = plan_capture(capture, cut_options)
    return _planned_cut(partition, symbols, cut_options)


def _planned_cut(partition: "Partition", symbols: tuple[Symbol, ...], cut_options: "CutOptions") -> _PlannedCut:
    graphs = [stage.graph for stage in partition.cut.stages]
    return _PlannedCut(
        partition.profiled_plan,
        partition.cut.edges,
        symbols,
        graphs,
        set(partition.cut.outputs),
        cost_facts(cut_options, partition),
    )


def _print_plan(facts: dict[str, Any]) -> None:
    stage_rows = [
        [
            str(stage["stage"]),
            str(stage["nodes"]),
            format_bytes(stage["weight_bytes"]),
            format_bytes(stage["memory"]) + _of_limit(stage["memory_limit"]),
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


def _of_limit(limit: int | None) -> str:
    return "" if limit is None else f" of {format_bytes(limit)}"
