"""`stages=N`: cut into N consecutive stages so that the slowest is as fast as possible, and say what any cut costs."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from stagepack.errors import CutError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph
from stagepack.format.plan import Plan, PlannedStage, to_runs
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.aliasing import alias_classes, colocation_groups
from stagepack.partition.costs import GraphCosts, activation_bytes
from stagepack.partition.policies import StageAssignment
from stagepack.partition.rematerialize import recomputation_recipes
from stagepack.partition.solver import (
    CostSequence,
    SharedCost,
    part_cost,
    sending_time,
    split_sequence,
    split_with_least_excess,
)

_SLOWER = 1.05  # how much slower the slowest stage may be so that no repeated part is cut


def balance_stages(
    graph: Graph,
    costs: GraphCosts,
    stages: int,
    *,
    memory: Sequence[int] = (),
    speeds: Sequence[float] = (),
    repeats: Sequence[Collection[int]] = (),
) -> list[int]:
    """Positions of the cuts: each is the number of the node that starts the next stage.

    Of all cuts into consecutive stages that tear no bond, the one whose slowest stage is fastest; the time of a stage is
    that of its nodes on a device of its speed, and of what it receives. Parts that repeat are not cut through where the slowest stage
    is no more than a twentieth slower for it. Where there are fewer places to cut at than asked for, the last stages are empty:
    their positions are the end of the graph.

    Args:
        graph: a whole model.
        costs: of its nodes, values and weights.
        stages: how many.
        memory: bytes that the device of each stage has; none for no limits.
        speeds: of the device of each stage, relative to the others; none for equal ones.
        repeats: places inside of parts that repeat; first those inside of any, then fewer and fewer.

    Raises:
        CutError: `stages` is less than 1, `memory` or `speeds` are of another number, or no cut fits into the memory.
    """
    if stages < 1:
        raise CutError(f"stages: expected at least 1, found {stages}")
    for name, given in (("memory", memory), ("speeds", speeds)):
        if given and len(given) != stages:
            raise CutError(f"{name}: expected {stages} numbers, one a stage, found {len(given)}")
        if any(number <= 0 for number in given):
            raise CutError(f"{name}: expected numbers above 0, found {list(given)}")
    if not graph.nodes:
        return [0] * (stages - 1)
    row = row_of(graph, costs)
    filled = min(stages, len(row.places) + 1)
    limits: list[int | None] = [*memory[:filled]] or [None] * filled
    speed = list(speeds or [1.0] * stages)[:filled]
    found = split_sequence(row, speed, limits)
    if found is None:
        raise CutError(_lack(row, limits))
    slowest = _slowest(row, found, speed)
    for inside in repeats:
        places = [place for place in row.places if place not in inside]
        whole = split_sequence(replace(row, places=places), speed, limits) if len(places) >= filled - 1 else None
        if whole is not None and _slowest(row, whole, speed) <= slowest * _SLOWER:
            found = whole
            break
    return found + [len(graph.nodes)] * (stages - filled)


def _slowest(row: CostSequence, cuts: Sequence[int], speeds: Sequence[float]) -> float:
    """The time of the slowest stage, in picoseconds."""
    ends = itertools.pairwise([0, *cuts, len(row.times)])
    return max(part_cost(row, *part).time_on(speed) for part, speed in zip(ends, speeds, strict=True))


def _lack(row: CostSequence, limits: Sequence[int | None]) -> str:
    """Which stage lacks how many bytes, in the cut that lacks least."""
    ends = [0, *split_with_least_excess(row, limits), len(row.times)]
    parts = [part_cost(row, start, end) for start, end in itertools.pairwise(ends)]
    worst = max(range(len(parts)), key=lambda number: parts[number].memory - (limits[number] or parts[number].memory))
    part, limit = parts[worst], limits[worst]
    assert limit is not None
    return (
        f"memory: no cut fits: in the nearest one, stage {worst} needs {part.memory} bytes "
        f"({part.held} of weights, {part.memory - part.held} for activations at the example's sizes), {part.memory - limit} more than "
        f"its device's {limit}: give more memory, or more stages"
    )


def sent_values(graph: Graph, costs: GraphCosts) -> set[str]:
    """The values that a stage receives when it needs them and does not make them: those that are not computed again; no numbers."""
    again = recomputation_recipes(graph, costs)
    values = (*graph.inputs, *(value for node in graph.nodes for value in node.outputs if value is not None))
    return {value.name for value in values if value.name not in again and value.dtype not in SCALAR_DTYPES}


def row_of(graph: Graph, costs: GraphCosts) -> CostSequence:
    """The nodes of a graph as items to split, where no bond is torn."""
    uses: dict[str, list[int]] = defaultdict(list)
    maker = {value.name: -1 for value in graph.inputs}
    for number, node in enumerate(graph.nodes):
        maker.update(dict.fromkeys(output_names(node), number))
        for name in dict.fromkeys(input_names(node)):
            uses[name].append(number)
    sent = sent_values(graph, costs)
    stored: dict[str, tuple[int, set[int]]] = {}
    for weight in graph.weights:
        stored.setdefault(weight.stored, (costs.weights[weight.value], set()))[1].update(uses[weight.value])
    forbidden = {place for bond in colocation_groups(graph) for place in range(bond.nodes[0] + 1, bond.nodes[-1] + 1)}
    return CostSequence(
        times=costs.times,
        sent=[
            SharedCost(cost=sending_time(costs.values[name]), uses=tuple(uses[name]), maker=made)
            for name, made in maker.items()
            if name in sent and uses[name]
        ],
        held=[SharedCost(cost=size, uses=tuple(sorted(found))) for size, found in stored.values() if found],
        working=activation_bytes(graph, costs, alias_classes(graph).of),
        places=[place for place in range(1, len(graph.nodes)) if place not in forbidden],
    )


def plan_for_assignment(
    graph: Graph,
    costs: GraphCosts,
    assignment: StageAssignment,
    *,
    memory: Sequence[int] = (),
    speeds: Sequence[float] = (),
) -> Plan:
    """What a cut costs, stage by stage; see `balanced` for the arguments."""
    nodes: list[list[int]] = [[] for _ in range(assignment.stages)]
    for number, stage in enumerate(assignment.stage_of):
        nodes[stage].append(number)
    sent = sent_values(graph, costs)
    working = activation_bytes(graph, costs, alias_classes(graph).of)
    stored = {weight.value: weight.stored for weight in graph.weights}
    size = {weight.stored: costs.weights[weight.value] for weight in graph.weights}
    limits: list[int | None] = [*memory] or [None] * assignment.stages
    stages = []
    for number, mine in enumerate(nodes):
        used = dict.fromkeys(name for index in mine for name in input_names(graph.nodes[index]))
        made = {name for index in mine for name in output_names(graph.nodes[index])}
        held = sum(size[name] for name in dict.fromkeys(stored[name] for name in used if name in stored))
        received = [costs.values[name] for name in used if name in sent and name not in made]
        stages.append(
            PlannedStage(
                nodes=to_runs(mine),
                module=graph.scopes[graph.nodes[mine[0]].scope].path if mine else "",
                picoseconds=sum(costs.times[index] for index in mine),
                receiving=sum(map(sending_time, received)),
                flops=sum(graph.nodes[index].cost.flops for index in mine),
                bytes=sum(graph.nodes[index].cost.bytes for index in mine),
                weight_bytes=held,
                received=sum(received),
                memory=held + max((working[index] for index in mine), default=0),
                memory_limit=limits[number],
                speed=float(speeds[number]) if speeds else 1.0,
            )
        )
    return Plan(stages=tuple(stages))
