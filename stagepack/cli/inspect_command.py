"""`stagepack inspect`."""

from typing import Any

import click

from stagepack.cli.facts import bundle_facts, print_facts
from stagepack.cli.output import fail, print_json, print_table, reports_errors
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape
from stagepack.quantities import readable_flops


@click.command("inspect")
@click.argument("bundle", type=click.Path())
@click.option("--stage", "number", type=int, help="List the nodes of one stage.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(bundle: str, number: int | None, as_json: bool) -> None:
    """Show the stages and edges of BUNDLE: reads its manifest, or one graph, and no weights. Needs no torch."""
    opened = Bundle(bundle)
    if number is not None:
        _stage(opened, number, as_json)
    elif as_json:
        print_json(bundle_facts(opened))
    else:
        print_facts(opened)


def _stage(bundle: Bundle, number: int, as_json: bool) -> None:
    if not 0 <= number < len(bundle.stages):
        fail(f"--stage: expected 0 to {len(bundle.stages) - 1}, found {number}")
    graph = bundle.graph(number)
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
        print_json({"stage": number, "nodes": nodes, "weights": weights})
        return
    rows = [
        [
            str(node["node"]),
            str(node["op"]),
            ", ".join(f"{name} {kind}" for name, kind in node["makes"].items()),
            readable_flops(node["flops"]),
            str(node["module"]),
        ]
        for node in nodes
    ]
    print_table(f"nodes of stage {number}", ["#node", "operator", "makes", "#compute", "module"], rows)
    print_table(
        "weights",
        ["name", "kind", "value"],
        [[w.names[0], w.kind, f"{w.dtype}{format_shape(w.shape)}"] for w in graph.weights],
    )
