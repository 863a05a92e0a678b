"""A graph and the stage of each node -> the stages as graphs, and the edges between them.

A value goes straight from the stage that defines it to every stage that uses it. Names of values do not change, and each stage records
the positions of its nodes in the whole model, so that joining gives the graph back:
``join_stages(cut_graph(canonical_graph(g), ...)) == canonical_graph(g)``.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from stagepack.format.graph import Graph, ModuleCall, Value, Weight
from stagepack.format.manifest import Edge
from stagepack.format.plan import Run, to_runs
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.assembly import GraphAssembler
from stagepack.partition.assignment import StageAssignment
from stagepack.partition.recipes import CostedGraph
from stagepack.partition.rematerialize import StageNodes, ops_with_sym_size, rematerialize_values

WeightSharing = Literal["replicate", "transmit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStage:
    """One stage.

    Attributes:
        graph: its graph.
        added_count: the number of leading nodes that exist only in this stage.
        node_runs: the numbers of its other nodes in the whole graph.
    """

    graph: Graph
    added_count: int
    node_runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A graph that is divided into stages.

    Attributes:
        stages: the stages in order.
        edges: the values that cross a boundary: inputs of the model first, then in the order of their definition.
        outputs: the names of the values that the model returns.
    """

    stages: tuple[CutStage, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[str, ...]


def cut_graph(costed: CostedGraph, assignment: StageAssignment, shared: WeightSharing = "replicate") -> Cut:
    """Cut the graph of a whole model into stages.

    shared: how stages get a weight that several of them use: each holds it ("replicate"), or the first one holds it and sends it to the
        others at each call ("transmit").
    """
    analysis = costed.analysis
    graph = replace(analysis.graph, ops=ops_with_sym_size(analysis.graph))
    stages = rematerialize_values(costed, assignment)
    stage_weights = _stage_weights(analysis, stages)
    if shared == "transmit":
        stage_weights = _without_received_weights(analysis, assignment.stage_of, stage_weights)
    edges = tuple(_edges(analysis, stages, stage_weights))
    values = {**analysis.values, **{weight.value: _value_of(weight) for weight in graph.weights}}
    cut_stages = []
    for stage_number, (stage, weights) in enumerate(zip(stages, stage_weights, strict=True)):
        stage_graph = GraphAssembler(graph.symbols).graph(
            graph,
            [*stage.added, *(graph.nodes[node_number] for node_number in stage.node_numbers)],
            inputs=[values[edge.name] for edge in edges if stage_number in edge.consumers],
            weights=weights,
            outputs=[edge.name for edge in edges if edge.producer == stage_number],
        )
        calls = tuple(call for call in graph.calls if _has_node_of(stage.node_numbers, call))
        cut_stages.append(
            CutStage(
                graph=replace(stage_graph, calls=calls),
                added_count=len(stage.added),
                node_runs=to_runs(stage.node_numbers),
            )
        )
    return Cut(stages=tuple(cut_stages), edges=edges, outputs=tuple(graph.outputs))


def _has_node_of(node_numbers: Sequence[int], call: ModuleCall) -> bool:
    """Whether a module call has one of these nodes, whose numbers ascend."""
    first_node = int(call.first)
    index = bisect.bisect_left(node_numbers, first_node)
    return index < len(node_numbers) and node_numbers[index] < first_node + call.nodes


def _value_of(weight: Weight) -> Value:
    """A weight as a value that is sent."""
    return Value(name=weight.value, dtype=weight.dtype, shape=weight.shape)


def _stage_weights(analysis: GraphAnalysis, stages: Sequence[StageNodes]) -> list[list[Weight]]:
    """The weights of each stage, in the order of their first use.

    A weight that no node uses goes to the first stage that uses its bytes by another weight, else a weight of its module, or of the
    nearest enclosing module.
    """
    weights = {weight.value: weight for weight in analysis.graph.weights}
    stage_weights: list[list[Weight]] = []
    first_stages: dict[tuple[str, str], int] = {}
    for stage_number, stage in enumerate(stages):
        used_weights = [weights[value_name] for value_name in stage.input_names(analysis) if value_name in weights]
        stage_weights.append(used_weights)
        for weight in used_weights:
            for owner in _owners(weight):
                first_stages.setdefault(owner, stage_number)
    used_names = {weight.value for used_weights in stage_weights for weight in used_weights}
    for weight in analysis.graph.weights:
        if weight.value not in used_names:
            stage_number = next((first_stages[owner] for owner in _owners(weight) if owner in first_stages), 0)
            stage_weights[stage_number].append(weight)
    return stage_weights


def _owners(weight: Weight) -> Iterator[tuple[str, str]]:
    """Yield the stored tensor of a weight, and the modules that have the weight, from the innermost to the model."""
    yield "stored", weight.stored
    path = weight.names[0].split(".")[:-1]
    yield from (("module", ".".join(path[:length])) for length in range(len(path), -1, -1))


def _without_received_weights(
    analysis: GraphAnalysis, stage_of: Sequence[int], stage_weights: Sequence[Sequence[Weight]]
) -> list[list[Weight]]:
    """The weights of each stage, when only the first of the stages whose nodes use a weight holds it.

    Nodes that are computed again need their weights in their stage.
    """
    user_stages = {
        weight.value: {stage_of[node_number] for node_number in analysis.users.get(weight.value, ())}
        for weight in analysis.graph.weights
    }
    first_stages: dict[str, int] = {}
    kept_weights: list[list[Weight]] = []
    for stage_number, weights in enumerate(stage_weights):
        kept_weights.append(
            [
                weight
                for weight in weights
                if stage_number not in user_stages[weight.value]
                or stage_number == first_stages.setdefault(weight.value, stage_number)
            ]
        )
    return kept_weights


def _edges(
    analysis: GraphAnalysis, stages: Sequence[StageNodes], stage_weights: Sequence[Sequence[Weight]]
) -> Iterator[Edge]:
    """Yield the edges: inputs of the model, values that nodes define, weights."""
    graph = analysis.graph
    consumers: dict[str, list[int]] = {}
    producers: dict[str, int] = {}
    for stage_number, (stage, weights) in enumerate(zip(stages, stage_weights, strict=True)):
        present = stage.output_names(analysis) | {weight.value for weight in weights}
        for value_name in present:
            producers.setdefault(value_name, stage_number)
        for value_name in stage.input_names(analysis):
            if value_name not in present:
                consumers.setdefault(value_name, []).append(stage_number)
    for value in graph.inputs:
        yield _edge(value, None, consumers.get(value.name, []))
    sent_names = {*consumers, *graph.outputs}
    node_values = (value for node in graph.nodes for value in node.outputs if value is not None)
    for value in (*node_values, *map(_value_of, graph.weights)):
        if value.name in sent_names:
            yield _edge(value, producers[value.name], consumers.get(value.name, []))


def _edge(value: Value, producer: int | None, consumers: Sequence[int]) -> Edge:
    return Edge(
        name=value.name,
        dtype=value.dtype,
        shape=value.shape,
        expr=value.expr,
        producer=producer,
        consumers=tuple(consumers),
    )
