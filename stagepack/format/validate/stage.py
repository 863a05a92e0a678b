"""The agreement of the graph of a stage with the manifest (SPEC G14)."""

from collections.abc import Iterator, Mapping

from stagepack.errors import Problem
from stagepack.format.graph import Graph
from stagepack.format.manifest import Edge, Stage
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.shapes import Symbol
from stagepack.format.validate.problems import format_names


def check_stage(
    graph: Graph, stage: Stage, edges: Mapping[str, Edge], symbols: Mapping[str, Symbol]
) -> Iterator[Problem]:
    """Yield the G14 problems of a stage.

    Args:
        graph: the graph of the stage.
        stage: the manifest entry of the stage.
        edges: the edges of the entry point, by name.
        symbols: its symbols, by name.
    """
    messages = _differences(graph, stage, edges, symbols)
    return (Problem(rule="G14", where=stage.graph, message=message) for message in messages)


def _differences(graph: Graph, stage: Stage, edges: Mapping[str, Edge], symbols: Mapping[str, Symbol]) -> Iterator[str]:
    if tuple(value.name for value in graph.inputs) != stage.inputs:
        yield f"the manifest lists the inputs {format_names(stage.inputs)}, the graph has other ones"
    if graph.outputs != stage.outputs:
        yield f"the manifest lists the outputs {format_names(stage.outputs)}, the graph has other ones"
    if len(graph.nodes) != stage.nodes:
        yield f"the manifest counts {stage.nodes} nodes, the graph has {len(graph.nodes)}"
    if set(stage.namespaces) != {operator_namespace(op.name) for op in graph.ops} - ALLOWED_NAMESPACES:
        yield f"the manifest lists the namespaces {format_names(stage.namespaces)}, the graph has other ones"
    for symbol in graph.symbols:
        if symbols.get(symbol.name, symbol) != symbol:
            yield f"the symbol {symbol.name[:80]} has another min, max or example than in the manifest"
    node_values = (value for node in graph.nodes for value in node.outputs if value is not None)
    types = {value.name: (value.dtype, value.shape, value.expr) for value in (*graph.inputs, *node_values)}
    types.update((weight.value, (weight.dtype, weight.shape, None)) for weight in graph.weights)
    for edge_name in (*stage.inputs, *stage.outputs):
        edge, graph_type = edges.get(edge_name), types.get(edge_name)
        if edge is not None and graph_type not in (None, (edge.dtype, edge.shape, edge.expr)):
            yield f"the value {edge_name[:80]} has another dtype, shape or expr than its edge"
