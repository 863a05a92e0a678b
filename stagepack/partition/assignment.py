"""The stage of each node, from a plan, from split positions, or from names of modules. No value flows to an earlier stage."""

import bisect
import difflib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from stagepack.errors import CutError
from stagepack.format.plan import Plan
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.node_order import NodeOrder


class StageAssignment(NamedTuple):
    """The stage of each node.

    Attributes:
        stage_of: the number of the stage of each node.
        stage_count: the number of stages; the last ones may be empty.
        named_modules: the paths of the modules that the caller has put into a stage by their names.
    """

    stage_of: list[int]
    stage_count: int
    named_modules: Sequence[str] = ()


def assign_consecutive(order: NodeOrder, split_positions: Sequence[int]) -> StageAssignment:
    """Split an order of nodes into consecutive stages, which may be empty.

    split_positions: the positions in `order` at which a stage starts, ascending.
    """
    stage_of = [bisect.bisect_right(split_positions, position) for position in order.positions]
    return StageAssignment(stage_of, len(split_positions) + 1)


def assign_by_positions(analysis: GraphAnalysis, order: NodeOrder, split_positions: Iterable[int]) -> StageAssignment:
    """Split an order of nodes into consecutive stages that are not empty."""
    positions = sorted(split_positions)
    node_count = len(analysis.graph.nodes)
    ends = [0, *positions, node_count]
    if positions and any(start >= end for start, end in itertools.pairwise(ends)):
        raise CutError(
            f"a stage would be empty: the model is split before operators {positions} of {node_count}: "
            "remove splits at the start or the end of the model, and duplicate ones"
        )
    assignment = assign_consecutive(order, positions)
    refuse_split_groups(analysis, assignment.stage_of)
    return assignment


def assign_by_modules(analysis: GraphAnalysis, order: NodeOrder, module_paths: Sequence[str]) -> StageAssignment:
    """Start a stage at the first node of each named module."""
    first_positions = _first_positions(analysis, order)
    starts: dict[int, str] = {}
    for path in module_paths:
        if path not in first_positions:
            raise CutError(f"split_at: no operator comes from a module {path!r}: {_close_paths(path, first_positions)}")
        position = first_positions[path]
        if position in starts:
            raise CutError(f"split_at: {starts[position]!r} and {path!r} start at the same operator: name one of them")
        if position == 0:
            raise CutError(f"split_at: {path!r} starts the model, so the stage before it would be empty: remove it")
        starts[position] = path
    return assign_by_positions(analysis, order, starts)._replace(named_modules=tuple(module_paths))


def _close_paths(path: str, known_paths: Collection[str]) -> str:
    """Which modules may be meant by a path that is none."""
    if not known_paths:
        return "the operators name no modules: cut by a number of stages, or mark the code with stagepack.split_here"
    # A path in a part of the model, or in a wrapper of it.
    longer = [known_path for known_path in known_paths if known_path.endswith(f".{path}")]
    close = longer or difflib.get_close_matches(path, known_paths, n=3) or sorted(known_paths)[:3]
    return f"close names are {', '.join(map(repr, close[:3]))}"


def _first_positions(analysis: GraphAnalysis, order: NodeOrder) -> dict[str, int]:
    """The position of the first node of each module, by its path."""
    graph = analysis.graph
    first_positions: dict[str, int] = {}
    for position, node_number in enumerate(order.node_numbers):
        path = graph.scopes[graph.nodes[node_number].scope].path
        components = path.split(".") if path else []
        for length in range(1, len(components) + 1):
            first_positions.setdefault(".".join(components[:length]), position)
    return first_positions


def assign_by_plan(analysis: GraphAnalysis, plan: Plan) -> StageAssignment:
    """Assign to each stage the nodes that a plan lists for it."""
    stage_of = _planned_stages(plan, len(analysis.graph.nodes))
    for node_number, required_node, value_name in node_dependencies(analysis):
        if stage_of[required_node] > stage_of[node_number]:
            raise CutError(
                f"plan: node {node_number} of stage {stage_of[node_number]} uses {value_name!r}, which node {required_node} of "
                f"stage {stage_of[required_node]} defines: values flow to later stages only"
            )
    refuse_split_groups(analysis, stage_of)
    return StageAssignment(stage_of, len(plan.stages))


def _planned_stages(plan: Plan, node_count: int) -> list[int]:
    stage_of: dict[int, int] = {}
    for stage_number, stage in enumerate(plan.stages):
        for first, count in stage.nodes:
            if first < 0 or count < 1 or first + count > node_count:
                raise CutError(
                    f"plan: stage {stage_number} has {count} nodes from node {first} on, but the model has {node_count} nodes: "
                    "is the plan of another model?"
                )
            for node_number in range(first, first + count):
                if node_number in stage_of:
                    raise CutError(
                        f"plan: node {node_number} is in stage {stage_of[node_number]} and in stage {stage_number}"
                    )
                stage_of[node_number] = stage_number
    missing = [node_number for node_number in range(node_count) if node_number not in stage_of]
    if missing:
        raise CutError(f"plan: {len(missing)} nodes are in no stage, the first is node {missing[0]}")
    return [stage_of[node_number] for node_number in range(node_count)]


def node_dependencies(analysis: GraphAnalysis) -> Iterator[tuple[int, int, str]]:
    """Yield the nodes that must not run after a node.

    Random numbers count as values: all are drawn from one generator, so their order is part of the model.
    """
    last_random_node: int | None = None
    for node_number, used_names in enumerate(analysis.node_inputs):
        for value_name in used_names:
            if value_name in analysis.producers:
                yield node_number, analysis.producers[value_name], value_name
        if node_number in analysis.random_nodes:
            if last_random_node is not None:
                yield node_number, last_random_node, "random numbers"
            last_random_node = node_number


def refuse_split_groups(analysis: GraphAnalysis, stage_of: Sequence[int]) -> None:
    """Check that each colocation group is in one stage."""
    graph = analysis.graph
    for group in analysis.colocation_groups:
        scopes = {stage_of[node]: graph.scopes[graph.nodes[node].scope].path for node in group.nodes}
        if len(scopes) > 1:
            stages = ", ".join(f"stage {stage_number} (in {path!r})" for stage_number, path in sorted(scopes.items()))
            raise CutError(
                f"{group.name!r} is written, so all operators that touch it must stay in one stage, but this cut puts them "
                f"into {stages}: move the cut"
            )
