"""`stagepack plan`."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stagepack.cli.cut_facts import DEVICES, cut_facts
from stagepack.cli.cut_option_flags import cut_options
from stagepack.cli.diagram import dot, mermaid
from stagepack.cli.output import fail, print_json, print_line, print_table, progress, reports_errors
from stagepack.cli.quantities import format_bytes, format_flops, format_time
from stagepack.format.manifest import Edge
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.validate import MANIFEST_NAME


@click.command("plan")
@click.argument("source", metavar="SOURCE|BUNDLE")
@cut_options
@click.option("--inputs", metavar="FILE.py:FUNCTION", help="For a SOURCE: a function that returns the example inputs.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the plan, to be edited and given to --plan.")
@click.option("--dot", "form", flag_value="dot", help="Print the graph of the stages for Graphviz.")
@click.option("--mermaid", "form", flag_value="mermaid", help="Print the graph of the stages for Mermaid.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@reports_errors
def command(
    source: str, where: Callable[[], Any] | None, inputs: str | None, out: Path | None, form: str | None
) -> None:
    """Show the cut that would be made, or that of a BUNDLE: bytes, compute, traffic and balance, at the example's sizes.

    SOURCE is file.py:factory, package.module:factory, a .pt2 file, or a Hugging Face folder or hub name. A BUNDLE needs no torch.
    """
    if os.path.isfile(os.path.join(source, MANIFEST_NAME)):
        if inputs is not None:
            raise click.UsageError("--inputs is for a SOURCE: a bundle holds its example")
        plan, edges, symbols = _of_bundle(Bundle(source), where)
    else:
        plan, edges, symbols = _of_source(source, where, inputs)
    if out is not None:
        from stagepack.partition.plan_file import write_plan  # noqa: PLC0415 - only when it is asked for

        write_plan(plan, out)
    facts = cut_facts(plan, edges, symbols)
    if form == "json":
        print_json(facts)
    elif form is not None:
        print_line_by_line(dot(facts) if form == "dot" else mermaid(facts))
    else:
        _print(facts)


def print_line_by_line(text: str) -> None:
    """Print a text of several lines."""
    for line in text.splitlines():
        print_line(line)


def _of_bundle(bundle: Bundle, where: Callable[[], Any] | None) -> tuple[Plan, tuple[Edge, ...], tuple[Symbol, ...]]:
    if where is None:
        if bundle.manifest.plan is None:
            fail(f"{bundle.path}: the bundle carries no plan: say how to cut, such as --stages 4")
        return bundle.manifest.plan, bundle.edges, bundle.manifest.symbols
    from stagepack.recutter import plan_bundle  # noqa: PLC0415 - numpy, only where something is planned

    cut, plan = plan_bundle(bundle, where())
    return plan, cut.edges, bundle.manifest.symbols


def _of_source(
    source: str, where: Callable[[], Any] | None, inputs: str | None
) -> tuple[Plan, tuple[Edge, ...], tuple[Symbol, ...]]:
    with progress("import torch") as now, contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.user_code import capture_source_argument  # noqa: PLC0415 - the same
        from stagepack.exporter import plan_capture  # noqa: PLC0415 - torch, after the arguments are checked
        from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same

        now("capture")
        capture = capture_source_argument(source, inputs)
        now("plan")
        cut, plan, symbols = plan_capture(capture, CutOptions() if where is None else where())
    return plan, cut.edges, symbols


def _print(facts: dict[str, Any]) -> None:
    rows = [
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
    print_table("plan", columns, rows)
    crossing = [edge for edge in facts["edges"] if edge["producer"] is not None and edge["consumers"]]
    if crossing:
        edges = [
            [
                edge["name"],
                edge["value"],
                str(edge["producer"]),
                ", ".join(map(str, edge["consumers"])) + (" (skip)" if edge["skips"] else ""),
                format_bytes(edge["bytes"]),
            ]
            for edge in crossing
        ]
        print_table("crossing", ["name", "value", "#from", "to", "#size"], edges)
    print_line(
        f"slowest stage over mean {facts['slowest_over_mean']:.2f}, "
        f"{format_bytes(facts['traffic'])} a call between stages; "
        "idle by microbatches: " + ", ".join(f"{count}: {part:.0%}" for count, part in facts["bubble"].items())
    )
    if facts["sizes"]:
        sizes = ", ".join(f"{name} = {size}" for name, size in facts["sizes"].items())
        print_line(f"estimated for {sizes}, on {DEVICES}")


def _of_limit(limit: int | None) -> str:
    return "" if limit is None else f" of {format_bytes(limit)}"
