"""A graph and the stage of each node -> the stages as graphs, and the edges between them.

A value goes straight from where it is made to every stage that uses it. Names of values stay as they are, and each stage
says where its nodes stand in the whole model, so that `join` gives the graph back: ``join(cut(whole(g), ...)) == whole(g)``.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from stagepack.format.graph import Graph, ModuleCall, Node, Value, Weight
from stagepack.format.manifest import Edge
from stagepack.format.plan import Run, to_runs
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.assembly import GraphAssembler
from stagepack.partition.costs import GraphCosts
from stagepack.partition.policies import StageAssignment
from stagepack.partition.rematerialize import SYM_SIZE_OP, rematerialize_values

WeightSharing = Literal["replicate", "transmit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStage:
    """One stage: its graph, how many nodes at its begin are its own alone, and where the others stand in the whole graph."""

    graph: Graph
    added: int
    places: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The stages in order, and the values that cross a boundary: inputs of the model first, then in the order of their making."""

    stages: tuple[CutStage, ...]
    edges: tuple[Edge, ...]


def cut_graph(graph: Graph, assignment: StageAssignment, costs: GraphCosts, shared: WeightSharing = "replicate") -> Cut:
    """Cut a whole graph into the stages that a function of `policy` assigned.

    `shared` says what becomes of a weight that several stages use: every one of them holds it, or the first one holds it and
    sends it to the others at each call.
    """
    stage_of, count = assignment
    if SYM_SIZE_OP not in graph.ops:
        graph = replace(graph, ops=(*graph.ops, SYM_SIZE_OP))
    parts = rematerialize_values(graph, stage_of, count, costs)
    nodes = [[*part.added, *(graph.nodes[number] for number in part.nodes)] for part in parts]
    weights = _weights(graph, nodes)
    if shared == "transmit":
        _send_shared(graph, stage_of, weights)
    edges = tuple(_edges(graph, nodes, weights))
    values = {value.name: value for value in (*graph.inputs, *_made(graph))}
    values |= {w.value: Value(name=w.value, dtype=w.dtype, shape=w.shape) for w in graph.weights}
    stages = []
    for number, part in enumerate(parts):
        stage = GraphAssembler(graph.symbols).graph(
            graph,
            nodes[number],
            inputs=[values[edge.name] for edge in edges if number in edge.consumers],
            weights=weights[number],
            outputs=[edge.name for edge in edges if edge.producer == number],
        )
        calls = tuple(call for call in graph.calls if _has_some(part.nodes, call))
        stages.append(CutStage(graph=replace(stage, calls=calls), added=len(part.added), places=to_runs(part.nodes)))
    return Cut(stages=tuple(stages), edges=edges)


def _has_some(nodes: Sequence[int], call: ModuleCall) -> bool:
    """Whether there are some of a call's nodes among these, which ascend."""
    first = int(call.first)
    at = bisect.bisect_left(nodes, first)
    return at < len(nodes) and nodes[at] < first + call.nodes


def _made(graph: Graph) -> Iterator[Value]:
    for node in graph.nodes:
        yield from (value for value in node.outputs if value is not None)


def _weights(graph: Graph, nodes: Sequence[Sequence[Node]]) -> list[list[Weight]]:
    """The weights of each stage in the order of their first use.

    One that nobody uses goes to the first stage that uses its bytes by another weight, else a weight of its module, or of the nearest
    module around it.
    """
    weights = {weight.value: weight for weight in graph.weights}
    stages: list[list[Weight]] = []
    home: dict[tuple[str, str], int] = {}
    for number, part in enumerate(nodes):
        used = dict.fromkeys(name for node in part for name in input_names(node) if name in weights)
        stages.append([weights[name] for name in used])
        for name in used:
            for place in _places(weights[name]):
                home.setdefault(place, number)
    used_somewhere = {weight.value for stage in stages for weight in stage}
    for weight in graph.weights:
        if weight.value not in used_somewhere:
            stages[next((home[place] for place in _places(weight) if place in home), 0)].append(weight)
    return stages


def _places(weight: Weight) -> Iterator[tuple[str, str]]:
    """Yield where a weight lies: in a stored tensor, and in the modules that hold it, the innermost first."""
    yield "stored", weight.stored
    parts = weight.names[0].split(".")[:-1]
    yield from (("module", ".".join(parts[:length])) for length in range(len(parts), -1, -1))


def _send_shared(graph: Graph, stage_of: Sequence[int], weights: Sequence[list[Weight]]) -> None:
    """Leave a weight that nodes of several stages use in the first of them alone; copies of nodes hold what they need."""
    users: dict[str, set[int]] = {weight.value: set() for weight in graph.weights}
    for node, stage in zip(graph.nodes, stage_of, strict=True):
        for name in input_names(node):
            if name in users:
                users[name].add(stage)
    home: dict[str, int] = {}
    for number, held in enumerate(weights):
        held[:] = [w for w in held if number not in users[w.value] or number == home.setdefault(w.value, number)]


def _edges(graph: Graph, nodes: Sequence[Sequence[Node]], weights: Sequence[Sequence[Weight]]) -> Iterator[Edge]:
    users: dict[str, list[int]] = {}
    made_in: dict[str, int] = {}
    for number, (part, held) in enumerate(zip(nodes, weights, strict=True)):
        have = {name for node in part for name in output_names(node)} | {weight.value for weight in held}
        for name in have:
            made_in.setdefault(name, number)
        for name in dict.fromkeys(name for node in part for name in input_names(node)):
            if name not in have:
                users.setdefault(name, []).append(number)
    sent = [
        *_made(graph),
        *(Value(name=w.value, dtype=w.dtype, shape=w.shape) for w in graph.weights),
    ]
    for value in graph.inputs:
        yield _edge(value, None, users.get(value.name, []))
    for value in sent:
        if value.name in users or value.name in graph.outputs:
            yield _edge(value, made_in[value.name], users.get(value.name, []))


def _edge(value: Value, producer: int | None, consumers: list[int]) -> Edge:
    return Edge(
        name=value.name,
        dtype=value.dtype,
        shape=value.shape,
        expr=value.expr,
        producer=producer,
        consumers=tuple(consumers),
    )
