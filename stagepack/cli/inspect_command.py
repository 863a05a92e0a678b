"""`stagepack inspect`."""

from typing import Any

import click

from stagepack.cli.bundle_facts import bundle_facts, print_bundle
from stagepack.cli.command import subcommand
from stagepack.cli.graph_listing import graph_lines
from stagepack.cli.output import print_json, print_line
from stagepack.cli.path_options import bundle_argument, open_argument
from stagepack.cli.run_options import check_stage_number, json_option
from stagepack.cli.stage_facts import print_stage_graph, stage_graph_facts
from stagepack.format.folded import trivially_folded
from stagepack.format.reader import Bundle


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

    Reads the manifest, and with --stage or --graph the graphs, but never the weights. Needs no torch.
    """
    if as_code and as_json:
        raise click.UsageError("--graph and --json cannot be used together")
    if flat and not as_code:
        raise click.UsageError("--flat requires --graph")
    bundle = open_argument(bundle_path)
    check_stage_number(stage_number, bundle)
    if as_code:
        for listed_stage in range(len(bundle.stages)) if stage_number is None else [stage_number]:
            _print_graph(bundle, listed_stage, flat)
    elif stage_number is not None:
        facts: dict[str, Any] = stage_graph_facts(bundle.graph(stage_number), stage_number)
        if as_json:
            print_json(facts)
        else:
            print_stage_graph(facts)
    elif as_json:
        print_json(bundle_facts(bundle))
    else:
        print_bundle(bundle)


def _print_graph(bundle: Bundle, stage_number: int, flat: bool) -> None:
    folded, graph = bundle.graph_file(stage_number)
    for line in graph_lines(trivially_folded(graph) if flat else folded, graph, f"stage_{stage_number}"):
        print_line(line)
    print_line("")
