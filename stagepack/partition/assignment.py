"""The stage of each node, from a plan, from split positions, or from names of modules. No value flows to an earlier stage.

Nodes are cut in execution order, except that written state is touched late: some models set all their counters, or the lengths of all their
caches, before the first layer. State that is written must stay in one stage, so no cut could separate the layers.
"""

import bisect
import difflib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from stagepack.errors import CutError
from stagepack.format.graph import Graph
from stagepack.format.plan import Plan, Run
from stagepack.graph.analysis import GraphAnalysis


@dataclass(frozen=True)
class NodeOrder:
    """An order of the nodes of a graph in which every node comes after all that it depends on."""

    # For each node, the number of the node in front of which it is placed, or its own number. The nodes are sorted by these keys, and by
    # their numbers where keys are equal.
    keys: Sequence[int]

    @cached_property
    def node_numbers(self) -> Sequence[int]:
        """The number of the node at each position."""
        return sorted(range(len(self.keys)), key=self.keys.__getitem__)

    @cached_property
    def positions(self) -> Sequence[int]:
        """The position of each node."""
        positions = [0] * len(self.keys)
        for position, node_number in enumerate(self.node_numbers):
            positions[node_number] = position
        return positions

    @property
    def is_execution_order(self) -> bool:
        """Whether the position of each node is its number."""
        return all(position == node_number for position, node_number in enumerate(self.node_numbers))

    def position_in_front_of(self, node_number: int) -> int:
        """Return the number of nodes that this order places before a split in front of a node."""
        return bisect.bisect_left(sorted(self.keys), node_number)

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with its nodes in this order."""
        return replace(graph, nodes=tuple([graph.nodes[node_number] for node_number in self.node_numbers]))


def execution_order(graph: Graph) -> NodeOrder:
    """Return the order in which the nodes of a graph run."""
    return NodeOrder(range(len(graph.nodes)))


def late_state_order(analysis: GraphAnalysis) -> NodeOrder:
    """Move nodes that touch written memory in front of the first node that depends on them; all others stay."""
    classes = analysis.alias_classes
    if not classes.writers:
        return execution_order(analysis.graph)
    node_count = len(analysis.graph.nodes)
    keys = list(range(node_count))
    # The least key of the nodes that use a value or touch written memory, among those seen so far: the nodes are visited backwards.
    first_uses: dict[str, int] = defaultdict(lambda: node_count)
    for node_number in reversed(range(node_count)):
        used_names, defined_names = analysis.node_inputs[node_number], analysis.node_outputs[node_number]
        touched = {
            classes.representative(value_name)
            for value_name in (*defined_names, *used_names)
            if classes.is_written(value_name)
        }
        if touched and node_number not in analysis.random_nodes:
            first_use = min(first_uses[value_name] for value_name in (*defined_names, *touched))
            keys[node_number] = first_use if first_use < node_count else node_number
        for value_name in (*used_names, *touched):
            first_uses[value_name] = min(first_uses[value_name], keys[node_number])
    return NodeOrder(keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStage:
    """One stage of a cut. It stands here, without the solver and NumPy: what only reads or writes bundles uses it, too."""

    graph: Graph
    # The number of leading nodes that exist only in this stage.
    added_count: int
    # The numbers of its other nodes in the whole graph.
    node_runs: tuple[Run, ...]


class StageAssignment(NamedTuple):
    """The stage of each node."""

    stage_of: list[int]
    # The number of stages; the last ones may be empty.
    stage_count: int
    # The paths of the modules that the caller has put into a stage by their names.
    named_modules: Sequence[str] = ()


def assign_consecutive(order: NodeOrder, split_positions: Sequence[int]) -> StageAssignment:
    """Split an order of nodes at ascending positions into consecutive stages, which may be empty."""
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
