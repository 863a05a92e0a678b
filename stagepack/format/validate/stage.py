"""Where the graph of a stage and the manifest disagree (SPEC G14)."""

from collections.abc import Iterator

from stagepack.errors import Problem
from stagepack.format.graph import (
    Graph,
)
from stagepack.format.manifest import Edge, Stage
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.validate.problems import format_names


def check_stage(graph: Graph, stage: Stage, edges: dict[str, Edge]) -> Iterator[Problem]:
    """Yield the places where a stage's graph and the manifest disagree (G14)."""

    def problem(message: str) -> Problem:
        return Problem(rule="G14", where=stage.graph, message=message)

    if tuple(value.name for value in graph.inputs) != stage.inputs:
        yield problem(f"the manifest gives the inputs {format_names(stage.inputs)}, the graph has other ones")
    if graph.outputs != stage.outputs:
        yield problem(f"the manifest gives the outputs {format_names(stage.outputs)}, the graph has other ones")
    if len(graph.nodes) != stage.nodes:
        yield problem(f"the manifest counts {stage.nodes} nodes, the graph has {len(graph.nodes)}")
    if set(stage.namespaces) != {operator_namespace(op.name) for op in graph.ops} - ALLOWED_NAMESPACES:
        yield problem(f"the manifest gives the namespaces {format_names(stage.namespaces)}, the graph has other ones")
    made = (value for node in graph.nodes for value in node.outputs if value is not None)
    values = {value.name: (value.dtype, value.shape, value.expr) for value in (*graph.inputs, *made)}
    values.update((weight.value, (weight.dtype, weight.shape, None)) for weight in graph.weights)
    for name in (*stage.inputs, *stage.outputs):
        edge, value = edges.get(name), values.get(name)
        if edge is not None and value not in (None, (edge.dtype, edge.shape, edge.expr)):
            yield problem(f"the value {name[:80]} has another dtype, shape or expr than its edge")
