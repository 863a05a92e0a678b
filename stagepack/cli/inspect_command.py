"""`stagepack inspect`."""

from typing import Any

import click

from stagepack.cli.code import code
from stagepack.cli.facts import bundle_facts, print_facts
from stagepack.cli.output import fail, print_json, print_line, print_table, reports_errors
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape
from stagepack.quantities import readable_flops


@click.command("inspect")
@click.argument("bundle", type=click.Path())
@click.option("--stage", "number", type=int, help="List the nodes of one stage.")
@click.option("--graph", "as_code", is_flag=True, help="Print the graphs, or that of --stage, as code to be read.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(bundle: str, number: int | None, as_code: bool, as_json: bool) -> None:
    """Show the stages and edges of BUNDLE: reads its manifest, or graphs, and no weights. Needs no torch."""
    if as_code and as_json:
        raise click.UsageError("--graph and --json exclude each other")
    opened = Bundle(bundle)
    if number is not None and not 0 <= number < len(opened.stages):
        fail(f"--stage: expected 0 to {len(opened.stages) - 1}, found {number}")
    if as_code:
        for stage in range(len(opened.stages)) if number is None else [number]:
            for line in code(opened.graph(stage), f"stage_{stage}"):
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
