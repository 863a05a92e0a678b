"""The nodes, repeats and weights of one stage, which `inspect --stage` prints."""

from typing import Any

from stagepack.cli.output import print_line, print_table
from stagepack.cli.quantities import format_flops
from stagepack.format.graph import Graph
from stagepack.format.operator_permissions import needed_permissions
from stagepack.format.shapes import format_shape
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import Repeat, find_repeats


def stage_graph_facts(graph: Graph, stage_number: int) -> dict[str, Any]:
    """Return the facts of the graph of a stage as plain data."""
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


def print_stage_graph(facts: dict[str, Any]) -> None:
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
        print_line(
            f"stage {facts['stage']} runs only with --allow-ops {' --allow-ops '.join(facts['allow_ops'])}: "
            "pass it only if you know and trust the bundle and the library of these operators"
        )
