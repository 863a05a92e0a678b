"""A graph and cut options -> the stages as graphs with the edges between them, and the plan of the cut.

A value goes straight from the stage that defines it to every stage that uses it. Each stage records the positions of its nodes in the whole
model, so that joining gives the graph back: ``join_stages(cut_graph(canonical_graph(g), ...)) == canonical_graph(g)``.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stagepack.format.assembly import GraphAssembler
from stagepack.format.graph import Graph, ModuleCall, Value, Weight
from stagepack.format.manifest import Edge
from stagepack.format.plan import Plan, PlannedStage, to_runs
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import find_repeats, repeat_interiors
from stagepack.partition.assignment import (
    CutStage,
    NodeOrder,
    StageAssignment,
    assign_by_modules,
    assign_by_plan,
    assign_by_positions,
    assign_consecutive,
    execution_order,
    late_state_order,
)
from stagepack.partition.costs import GraphCosts
from stagepack.partition.cut_options import CutOptions, WeightSharing, assign_by_policy
from stagepack.partition.layer_cut import assign_by_layers
from stagepack.partition.profile import DeviceProfile, MeasuredCosts, Profile, device_costs, measured_costs
from stagepack.partition.recipes import CostedGraph, activation_bytes
from stagepack.partition.rematerialize import StageNodes, ops_with_sym_size, rematerialize_values
from stagepack.partition.solver import balance_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A graph that is divided into stages."""

    stages: tuple[CutStage, ...]
    # The values that cross a boundary: inputs of the model first, then in the order of their definition.
    edges: tuple[Edge, ...]
    outputs: tuple[str, ...]


def cut_graph(costed: CostedGraph, assignment: StageAssignment, shared: WeightSharing = "replicate") -> Cut:
    """Cut the graph of a whole model into stages."""
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

    One that no node uses goes to the first stage that uses its bytes, else a weight of its module, or of the nearest enclosing module.
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


def plan_for_assignment(
    costed: CostedGraph, assignment: StageAssignment, *, memory: Sequence[int] = (), speeds: Sequence[float] = ()
) -> Plan:
    """Estimate the costs of a cut, stage by stage. Without `memory` there are no limits, without `speeds` all are equal."""
    working_bytes = activation_bytes(costed.analysis, costed.costs, execution_order(costed.graph))
    stage_nodes: list[list[int]] = [[] for _ in range(assignment.stage_count)]
    for node_number, stage_number in enumerate(assignment.stage_of):
        stage_nodes[stage_number].append(node_number)
    limits: list[int | None] = [*memory] or [None] * assignment.stage_count
    return Plan(
        stages=tuple(
            _planned_stage(costed, node_numbers, working_bytes, limit, speed)
            for node_numbers, limit, speed in zip(
                stage_nodes, limits, speeds or [1.0] * assignment.stage_count, strict=True
            )
        )
    )


def _planned_stage(
    costed: CostedGraph, node_numbers: Sequence[int], working_bytes: Sequence[int], limit: int | None, speed: float
) -> PlannedStage:
    analysis, costs, graph = costed.analysis, costed.costs, costed.graph
    used_names, defined_names = analysis.used_by(node_numbers), analysis.defined_by(node_numbers)
    stored_bytes = {
        weight.stored: costs.weight_bytes[weight.value] for weight in graph.weights if weight.value in used_names
    }
    weight_bytes = sum(stored_bytes.values())
    received_bytes = [
        costs.value_bytes[value_name]
        for value_name in dict.fromkeys(
            itertools.chain(*(costed.received_names[node_number] for node_number in node_numbers))
        )
        if value_name in costed.sent_values and value_name not in defined_names
    ]
    nodes = [graph.nodes[node_number] for node_number in node_numbers]
    return PlannedStage(
        nodes=to_runs(node_numbers),
        module=graph.scopes[nodes[0].scope].path if nodes else "",
        picoseconds=sum(costs.node_times[node_number] for node_number in node_numbers),
        receiving=sum(map(costs.link.sending_time, received_bytes)),
        flops=sum(node.cost.flops for node in nodes),
        bytes=sum(node.cost.bytes for node in nodes),
        weight_bytes=weight_bytes,
        received=sum(received_bytes),
        memory=weight_bytes + max((working_bytes[node_number] for node_number in node_numbers), default=0),
        memory_limit=limit,
        speed=float(speed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A cut with its costs."""

    cut: Cut
    # The cut with its estimated costs, for the manifest. It follows from the model and the cut alone, whatever chose the cut.
    plan: Plan
    # The measured costs that chose the cut, if the caller has measured them.
    measured: MeasuredCosts | None
    # The cut with the costs of the caller's profile, measured or of a device; `plan` without a profile.
    profiled_plan: Plan


def partition_graph(
    graph: Graph, costs: GraphCosts, options: CutOptions, split_positions: Sequence[int] = ()
) -> Partition:
    """Cut a graph as the caller asks."""
    estimated = CostedGraph(analysis=GraphAnalysis(graph), costs=costs)
    measured = measured_costs(graph, costs, options.profile) if isinstance(options.profile, Profile) else None
    costed = estimated
    if measured is not None:
        costed = CostedGraph(analysis=estimated.analysis, costs=measured.costs)
    elif isinstance(options.profile, DeviceProfile):
        costed = CostedGraph(analysis=estimated.analysis, costs=device_costs(graph, costs, options.profile))
    assignment = _assign(costed, options, split_positions)
    shared = options.shared if options.plan is None else options.plan.shared

    def make_plan(plan_costs: CostedGraph) -> Plan:
        plan = plan_for_assignment(plan_costs, assignment, memory=options.memory_bytes, speeds=options.speeds)
        return replace(plan, shared=shared)

    plan = make_plan(estimated)
    return Partition(
        cut=cut_graph(estimated, assignment, shared),
        plan=plan,
        measured=measured,
        profiled_plan=plan if costed is estimated else make_plan(costed),
    )


def _assign(costed: CostedGraph, options: CutOptions, split_positions: Sequence[int]) -> StageAssignment:
    analysis = costed.analysis
    if options.plan is not None:
        return assign_by_plan(analysis, options.plan)
    if options.policy is not None:
        return assign_by_policy(analysis, options.policy)
    order = late_state_order(analysis)
    if options.split_at:
        return assign_by_modules(analysis, order, options.split_at)
    if options.stages is None:
        return assign_by_positions(analysis, order, [order.position_in_front_of(node) for node in split_positions])
    if not isinstance(options.stages, int):
        return assign_by_layers(costed, order)
    starts = balance_stages(
        costed,
        options.stages,
        order=order,
        memory=options.memory_bytes,
        speeds=options.speeds,
        repeat_interiors=_repeat_interiors(analysis, order),
    )
    return assign_consecutive(order, starts)


def _repeat_interiors(analysis: GraphAnalysis, order: NodeOrder) -> list[set[int]]:
    """The positions inside of the repeats of a graph whose nodes are in this order."""
    ordered = analysis if order.is_execution_order else GraphAnalysis(order.apply(analysis.graph))
    return repeat_interiors(find_repeats(ordered).repeats)
