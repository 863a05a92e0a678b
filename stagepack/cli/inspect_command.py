"""`stagepack inspect`."""

from collections.abc import Mapping
from typing import Any

import click

from stagepack.cli.bundle_facts import bundle_facts, each_entry_point, print_bundle
from stagepack.cli.command import subcommand
from stagepack.cli.graph_listing import graph_lines
from stagepack.cli.output import print_json, print_line
from stagepack.cli.path_options import bundle_argument, open_argument
from stagepack.cli.run_options import check_stage_number, json_option
from stagepack.cli.stage_facts import print_stage_graph, stage_graph_facts
from stagepack.format.reader import Bundle
from stagepack.format.unfold import trivially_folded
from stagepack.graph.rows.batch import batch_dimension, end_edges


@subcommand(
    "inspect",
    examples=[
        "stagepack inspect net.stagepack",
        "stagepack inspect net.stagepack --stage 1",
        "stagepack inspect net.stagepack --graph --stage 1",
    ],
)
@bundle_argument
@click.option(
    "--stage",
    "stage_number",
    type=int,
    metavar="N",
    show_default="all",
    help="Show the nodes and weights of stage N, counted from 0.",
)
@click.option("--graph", "as_code", is_flag=True, help="Print the graph of each stage, or of --stage, as pseudocode.")
@click.option("--flat", is_flag=True, help="With --graph: print each call of a region as its nodes.")
@json_option
def command(bundle_path: str, stage_number: int | None, as_code: bool, flat: bool, as_json: bool) -> None:
    """Show the stages, edges and nodes of a bundle.

    Reads the manifest and the graphs, but never the weights. Needs no torch.
    """
    if as_code and as_json:
        raise click.UsageError("--graph and --json cannot be used together")
    if flat and not as_code:
        raise click.UsageError("--flat requires --graph")
    bundle = open_argument(bundle_path)
    if stage_number is not None:
        check_stage_number(stage_number, bundle)
    if as_code:
        for selected in each_entry_point(bundle):
            for listed_stage in range(len(selected.stages)) if stage_number is None else [stage_number]:
                _print_graph(selected, listed_stage, flat)
    elif stage_number is not None:
        facts: dict[str, Any] = stage_graph_facts(bundle.graph(stage_number), stage_number)
        if as_json:
            print_json(facts)
        else:
            print_stage_graph(facts)
    elif as_json:
        print_json(bundle_facts(bundle) | {"batching": _batching_facts(bundle)})
    else:
        print_bundle(bundle)
        for entry_point, facts in _batching_facts(bundle).items():
            subject = f"batching of {entry_point}" if len(bundle.entry_points) > 1 else "batching"
            print_line(f"{subject}: {_batching_line(facts)}")


def _batching_facts(bundle: Bundle) -> dict[str, dict[str, str | None]]:
    """For each entry point, the dynamic size over which requests may share a batch, or why they may not."""
    facts: dict[str, dict[str, str | None]] = {}
    for selected in each_entry_point(bundle):
        symbol = batch_dimension(selected, end_edges(selected))
        over, reason = (None, symbol) if isinstance(symbol, str) else (symbol.name, None)
        facts[selected.entry_point.name] = {"over": over, "reason": reason}
    return facts


def _batching_line(facts: Mapping[str, str | None]) -> str:
    if facts["over"] is None:
        return f"none: {facts['reason']}"
    return f"requests may share a batch over {facts['over']}: no operator lets rows meet"


def _print_graph(bundle: Bundle, stage_number: int, flat: bool) -> None:
    folded, graph = bundle.graph_file(stage_number)
    prefix = f"{bundle.entry_point.name}_" if bundle.fragment else ""
    for line in graph_lines(trivially_folded(graph) if flat else folded, graph, f"{prefix}stage_{stage_number}"):
        print_line(line)
    print_line("")
