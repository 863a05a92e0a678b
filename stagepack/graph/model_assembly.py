"""The stages of a bundle -> the graph of the whole model, as it was before the cut."""

from collections.abc import Sequence

from msgspec.structs import replace

from stagepack.errors import CutError
from stagepack.format.assembly import GraphAssembler
from stagepack.format.graph import Graph, Value, Weight
from stagepack.format.manifest import EntryPoint
from stagepack.format.plan import run_members
from stagepack.format.rules import raise_problems
from stagepack.format.traversal import input_names, sort_module_calls
from stagepack.format.tree import value_names
from stagepack.format.validate.whole_model import check_whole_model


def canonical_graph(graph: Graph) -> Graph:
    """Return the graph of a whole model in the one form that `join_stages` returns."""
    used_names = dict.fromkeys(value_name for node in graph.nodes for value_name in input_names(node))
    ranks = {value_name: rank for rank, value_name in enumerate(used_names)}
    weights = sorted(graph.weights, key=lambda weight: (ranks.get(weight.value, len(ranks)), weight.names))
    canonical = GraphAssembler(graph.symbols).graph(graph, graph.nodes, graph.inputs, weights, graph.outputs)
    return replace(canonical, symbols=graph.symbols, calls=sort_module_calls(graph.calls))


def join_stages(entry_point: EntryPoint, stages: Sequence[Graph]) -> Graph:
    """Join the graphs of all stages, in order.

    A node that several stages compute is in the result once, and a node that a cut added is not in it.
    """
    raise_problems(check_whole_model(entry_point, stages))
    sources: dict[int, tuple[Graph, int]] = {}
    for entry, graph in zip(entry_point.stages, stages, strict=True):
        if len(graph.nodes) > entry.added and not entry.places:
            raise CutError(
                "the bundle does not record the positions of its nodes in the whole model: export the model again"
            )
        for node_index, position in enumerate(run_members(entry.places), start=entry.added):
            sources.setdefault(position, (graph, node_index))
    assembler = GraphAssembler(entry_point.symbols)
    nodes = []
    for position in sorted(sources):
        graph, node_index = sources[position]
        nodes.append(assembler.add_node(graph, graph.nodes[node_index]))
    inputs = [
        Value(name=edge.name, dtype=edge.dtype, shape=edge.shape, expr=edge.expr)
        for edge in entry_point.edges
        if edge.producer is None
    ]
    weights: dict[str, Weight] = {}
    for weight in (weight for graph in stages for weight in graph.weights):
        if weights.setdefault(weight.value, weight) != weight:
            raise CutError(f"the weight {weight.names[0][:80]!r} differs in two stages: export the model again")
    outputs = dict.fromkeys(value_names(entry_point.signature.result))
    calls = {call.path: call for graph in stages for call in graph.calls}
    joined = assembler.finish(nodes, inputs, tuple(weights.values()), tuple(outputs))
    return canonical_graph(replace(joined, symbols=entry_point.symbols, calls=tuple(calls.values())))
