"""A graph and cut options -> the cut, and its plan.

- The plan of a cut: the nodes of each stage, with their estimated costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stagepack.format.graph import Graph
from stagepack.format.plan import Plan, PlannedStage, to_runs
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import find_repeats, repeat_interiors
from stagepack.partition.assignment import (
    NodeOrder,
    StageAssignment,
    assign_by_modules,
    assign_by_plan,
    assign_by_positions,
    assign_consecutive,
    execution_order,
    late_state_order,
)
from stagepack.partition.costs import GraphCosts, MeasuredCosts, activation_bytes, measured_costs
from stagepack.partition.cut import Cut, cut_graph
from stagepack.partition.cut_options import CutOptions, assign_by_policy
from stagepack.partition.device_profile import DeviceProfile, device_costs
from stagepack.partition.profile import Profile
from stagepack.partition.recipes import CostedGraph
from stagepack.partition.solver import balance_stages


def plan_for_assignment(
    costed: CostedGraph,
    assignment: StageAssignment,
    *,
    memory: Sequence[int] = (),
    speeds: Sequence[float] = (),
) -> Plan:
    """Estimate the costs of a cut, stage by stage.

    memory: bytes of memory of the device of each stage; empty for no limits.
    speeds: speed of the device of each stage, relative to the others; empty for equal speeds.
    """
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
        for value_name in used_names
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
    """A cut with its costs.

    Attributes:
        cut: the stages and edges.
        plan: the cut with its estimated costs, for the manifest. It follows from the model and the cut alone, whatever chose the cut.
        measured: the measured costs that chose the cut, if the caller has measured them.
        profiled_plan: the cut with the costs of the caller's profile, measured or of a device; `plan` without a profile.
    """

    cut: Cut
    plan: Plan
    measured: MeasuredCosts | None
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
