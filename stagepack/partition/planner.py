"""The plan of a cut: the nodes of each stage, with their estimated costs."""

from collections.abc import Sequence

from stagepack.format.plan import Plan, PlannedStage, to_runs
from stagepack.partition.assignment import StageAssignment
from stagepack.partition.costed_graph import CostedGraph
from stagepack.partition.costs import activation_bytes
from stagepack.partition.node_order import execution_order


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
