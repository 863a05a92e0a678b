"""A graph and cut options -> the cut, and its plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stagepack.format.graph import Graph
from stagepack.format.plan import Plan
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.repeats import find_repeats, repeat_interiors
from stagepack.partition.assignment import (
    StageAssignment,
    assign_by_modules,
    assign_by_plan,
    assign_by_positions,
    assign_consecutive,
)
from stagepack.partition.costed_graph import CostedGraph
from stagepack.partition.costs import GraphCosts, MeasuredCosts, measured_costs
from stagepack.partition.cut import Cut, cut_graph
from stagepack.partition.cut_options import CutOptions, assign_by_policy
from stagepack.partition.device_profile import DeviceProfile, device_costs
from stagepack.partition.node_order import NodeOrder, late_state_order
from stagepack.partition.planner import plan_for_assignment
from stagepack.partition.profile import Profile
from stagepack.partition.solver import balance_stages


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
