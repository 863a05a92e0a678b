"""`stagepack inspect`."""

from collections.abc import Mapping
from typing import Any

import click

from stagepack.cli.bundle_facts import bundle_facts, each_entry_point, permission_line, print_bundle
from stagepack.cli.command import flag, only_with, option_object, subcommand
from stagepack.cli.graph_listing import graph_lines
from stagepack.cli.listed_facts import listed_facts, print_listed
from stagepack.cli.output import print_json, print_line, print_table
from stagepack.cli.shared_flags import DELTAS, JSON, BundleOptions, check_stage_number, open_listed_argument
from stagepack.documents import Listed
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph
from stagepack.format.manifest_codec import kind_name
from stagepack.format.operators import needed_permissions
from stagepack.format.quantities import format_flops
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import find_repeats
from stagepack.graph.rows.batch_dimension import batch_dimension, end_edges
from stagepack.graph.subsequences import Repeat


@option_object
class _Options(BundleOptions):
    delta_paths: tuple[str, ...] = DELTAS
    stage_number: int | None = flag(
        "--stage N", "Show the nodes and weights of stage N, counted from 0.", default_text="all"
    )
    as_code: bool = flag("--graph", "Print the graph of each stage, or of --stage, as pseudocode.")
    flat: bool = only_with(flag("--flat", "With --graph: print each call of a region as its nodes."), "--graph")
    as_json: bool = JSON


@subcommand(
    "inspect",
    examples=[
        "stagepack inspect net.stagepack",
        "stagepack inspect net.stagepack --stage 1",
        "stagepack inspect net.stagepack --graph --stage 1",
    ],
)
def command(options: _Options) -> None:
    """Show a bundle in stages, or what a delta or an adapter changes.

    Reads the manifest and the graphs, but never the weights. Needs no torch. BUNDLE may be a delta of 'stagepack delta', or an adapter of
    'stagepack adapter'.
    """
    if options.as_code and options.as_json:
        raise click.UsageError("--graph and --json cannot be used together")
    bundle = open_listed_argument(options.bundle_path)
    if not isinstance(bundle, Bundle):
        _show_changes(bundle, options)
        return
    stage_number = options.stage_number
    if stage_number is not None:
        check_stage_number(stage_number, bundle)
    if options.as_code:
        for selected in each_entry_point(bundle):
            for listed_stage in range(len(selected.stages)) if stage_number is None else [stage_number]:
                _print_graph(selected, listed_stage, options.flat)
    elif stage_number is not None:
        facts = _stage_facts(bundle.graph(stage_number), stage_number)
        if options.as_json:
            print_json(facts)
        else:
            _print_stage(facts)
    elif options.as_json:
        print_json(bundle_facts(bundle) | {"batching": _batching_facts(bundle)})
    else:
        print_bundle(bundle)
        for entry_point, batching in _batching_facts(bundle).items():
            subject = f"batching of {entry_point}" if len(bundle.entry_points) > 1 else "batching"
            print_line(f"{subject}: {_batching_line(batching)}")


def _show_changes(listed: Listed, options: _Options) -> None:
    """Show a delta or an adapter."""
    if options.as_code or options.stage_number is not None:
        found = kind_name(listed.document_format)
        raise click.UsageError(f"--stage and --graph are for bundles, found {found}: inspect its base")
    if options.as_json:
        print_json(listed_facts(listed))
    else:
        print_listed(listed)


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


def _stage_facts(graph: Graph, stage_number: int) -> dict[str, Any]:
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


def _print_stage(facts: dict[str, Any]) -> None:
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
        print_line(permission_line(facts["stage"], facts["allow_ops"]))
