"""The stages of a bundle -> the graph of the whole model, as it was before the cut."""

from collections.abc import Sequence

from msgspec.structs import replace

from stagepack.errors import CutError
from stagepack.format.graph import Graph, Value
from stagepack.format.manifest import Manifest
from stagepack.format.plan import run_members
from stagepack.format.tree import value_names
from stagepack.graph.assembly import GraphAssembler, canonical_graph


def join_stages(manifest: Manifest, stages: Sequence[Graph]) -> Graph:
    """Put the graphs of all stages together.

    A node that several stages compute comes once, and one that a cut has added does not come at all.

    Raises:
        CutError: the manifest does not say where the nodes stand.
    """
    at: dict[int, tuple[Graph, int]] = {}
    for entry, graph in zip(manifest.stages, stages, strict=True):
        if len(graph.nodes) > entry.added and not entry.places:
            raise CutError("the bundle does not say where its nodes stand in the whole model: export the model again")
        for index, number in enumerate(run_members(entry.places), start=entry.added):
            at.setdefault(number, (graph, index))
    assembly = GraphAssembler(manifest.symbols)
    nodes = [
        assembly.node(graph, graph.nodes[index]) for _, (graph, index) in sorted(at.items(), key=lambda item: item[0])
    ]
    inputs = [
        Value(name=edge.name, dtype=edge.dtype, shape=edge.shape, expr=edge.expr)
        for edge in manifest.edges
        if edge.producer is None
    ]
    weights = {weight.value: weight for graph in stages for weight in graph.weights}
    results = value_names(manifest.signature.result)
    calls = {call.path: call for graph in stages for call in graph.calls}
    graph = assembly.finish(nodes, inputs, list(weights.values()), list(dict.fromkeys(results)))
    return canonical_graph(replace(graph, symbols=manifest.symbols, calls=tuple(calls.values())))
