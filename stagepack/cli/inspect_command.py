"""`stagepack inspect`."""

from typing import Any

import click

from stagepack.cli.bundle_facts import bundle_facts, print_facts
from stagepack.cli.graph_listing import code
from stagepack.cli.output import fail, print_json, print_line, print_table, reports_errors
from stagepack.cli.quantities import format_flops
from stagepack.format.folded import trivially_folded
from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape
from stagepack.graph.repeat_search import Repeat, find_repeats


@click.command("inspect")
@click.argument("bundle", type=click.Path())
@click.option("--stage", "number", type=int, help="List the nodes of one stage.")
@click.option("--graph", "as_code", is_flag=True, help="Print the graphs, or that of --stage, as code to be read.")
@click.option("--flat", is_flag=True, help="With --graph: print what repeats as often as it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(bundle: str, number: int | None, as_code: bool, flat: bool, as_json: bool) -> None:
    """Show the stages and edges of BUNDLE: reads its manifest, or graphs, and no weights. Needs no torch."""
    if as_code and as_json:
        raise click.UsageError("--graph and --json exclude each other")
    if flat and not as_code:
        raise click.UsageError("--flat says how to print the graph: give --graph too")
    opened = Bundle(bundle)
    if number is not None and not 0 <= number < len(opened.stages):
        fail(f"--stage: expected 0 to {len(opened.stages) - 1}, found {number}")
    if as_code:
        for stage in range(len(opened.stages)) if number is None else [number]:
            folded, graph = opened.graph_file(stage)
            for line in code(trivially_folded(graph) if flat else folded, graph, f"stage_{stage}"):
                print_line(line)
            print_line("")
    elif number is not None:
        _stage(opened, number, as_json)
    elif as_json:
        print_json(bundle_facts(opened))
    else:
        print_facts(opened)


def _stage(bundle: Bundle, number: int, as_json: bool) -> None:
    graph = bundle.graph(number)
    found = find_repeats(graph)
    repeats: list[dict[str, Any]] = [_repeat(graph, repeat, None) for repeat in found.repeats]
    repeats += [_repeat(graph, left.repeat, left.reason) for left in found.left_alone]
    nodes: list[dict[str, Any]] = [
        {
            "node": index,
            "op": graph.ops[node.op].name,
            "makes": {
                value.name: f"{value.dtype}{format_shape(value.shape)}" for value in node.outputs if value is not None
            },
            "module": graph.scopes[node.scope].path,
            "flops": node.cost.flops,
        }
        for index, node in enumerate(graph.nodes)
    ]
    weights = [
        {
            "name": weight.names[0],
            "also": list(weight.names[1:]),
            "kind": weight.kind,
            "dtype": weight.dtype,
            "shape": list(weight.shape),
        }
        for weight in graph.weights
    ]
    if as_json:
        print_json({"stage": number, "nodes": nodes, "repeats": repeats, "weights": weights})
        return
    rows = [
        [
            str(node["node"]),
            str(node["op"]),
            ", ".join(f"{name} {kind}" for name, kind in node["makes"].items()),
            format_flops(node["flops"]),
            str(node["module"]),
        ]
        for node in nodes
    ]
    print_table(f"nodes of stage {number}", ["#node", "operator", "makes", "#compute", "module"], rows)
    if repeats:
        rows = [
            [str(part["times"]), str(part["nodes"]), part["first"], part["left_alone"] or "stored once"]
            for part in repeats
        ]
        print_table("what repeats", ["#times", "#nodes", "first in", "is"], rows)
    print_table(
        "weights",
        ["name", "kind", "value"],
        [[w.names[0], w.kind, f"{w.dtype}{format_shape(w.shape)}"] for w in graph.weights],
    )


def _repeat(graph: Graph, repeat: Repeat, reason: str | None) -> dict[str, Any]:
    """What is said of equal parts of a graph; `reason` is why they are not folded."""
    return {
        "times": len(repeat.starts),
        "nodes": repeat.length,
        "first": graph.scopes[graph.nodes[repeat.starts[0]].scope].path,
        "starts": list(repeat.starts),
        "left_alone": None if reason is None else f"not folded: {reason}",
    }
