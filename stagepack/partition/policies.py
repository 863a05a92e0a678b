"""How the caller says where to cut -> the stage of each node.

No value flows from a later stage to an earlier one.
"""

import difflib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagepack.errors import CutError
from stagepack.format.graph import Graph
from stagepack.format.plan import Plan
from stagepack.format.traversal import input_names, is_random, output_names
from stagepack.graph.aliasing import ColocationGroup, colocation_groups, split_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNode:
    """What a policy sees of a node.

    Attributes:
        index: its number in execution order.
        op: the operator, ``aten.linear.default``.
        scope: the path of the module that it came from; ``layers.0@1`` is the second call of ``layers.0``.
        outputs: the names of the values that it makes.
        flops, bytes: what it costs at the sizes of the example.
    """

    index: int
    op: str
    scope: str
    outputs: tuple[str, ...]
    flops: int
    bytes: int


Policy = Callable[[PolicyNode], int]


class StageAssignment(NamedTuple):
    """The stage of each node, and the number of stages; the last ones may be empty."""

    stage_of: list[int]
    stages: int


def assign_consecutive(graph: Graph, positions: Sequence[int]) -> StageAssignment:
    """Cut before the nodes with these numbers; stages may be empty."""
    starts = Counter(positions)
    return StageAssignment(
        list(itertools.accumulate(starts[number] for number in range(len(graph.nodes)))), len(positions) + 1
    )


def assign_by_plan(graph: Graph, plan: Plan) -> StageAssignment:
    """Give each stage the nodes that a plan says.

    Raises:
        CutError: the plan is of another model, a node stands in no stage or in two, a value would flow to an earlier stage, or
            state would be torn.
    """
    stage_of: dict[int, int] = {}
    for stage, planned in enumerate(plan.stages):
        for first, count in planned.nodes:
            if first < 0 or count < 1 or first + count > len(graph.nodes):
                there = f"stage {stage} has {count} nodes from {first} on, the model has {len(graph.nodes)}"
                raise CutError(f"plan: {there}: is the plan of another model?")
            for number in range(first, first + count):
                if number in stage_of:
                    raise CutError(f"plan: node {number} stands in stage {stage_of[number]} and in stage {stage}")
                stage_of[number] = stage
    missing = [number for number in range(len(graph.nodes)) if number not in stage_of]
    if missing:
        raise CutError(f"plan: {len(missing)} nodes stand in no stage, the first is {missing[0]}")
    stages = [stage_of[number] for number in range(len(graph.nodes))]
    for number, needed, what in _needs(graph):
        if stages[needed] > stages[number]:
            raise CutError(
                f"plan: node {number} of stage {stages[number]} needs {what!r}, which node {needed} of stage {stages[needed]} "
                "makes: values flow to later stages only"
            )
    _refuse_torn(graph, stages)
    return StageAssignment(stages, len(plan.stages))


def assign_by_positions(graph: Graph, positions: Iterable[int]) -> StageAssignment:
    """Cut before the nodes with these numbers.

    Raises:
        CutError: a stage would be empty, or state would be torn.
    """
    cuts = sorted(positions)
    ends = [0, *cuts, len(graph.nodes)]
    if cuts and any(before >= after for before, after in itertools.pairwise(ends)):
        message = f"the cuts stand before the operators {cuts} of {len(graph.nodes)}"
        raise CutError(f"a stage would be empty: {message}: leave out what stands at an end of the model, or twice")
    assignment = assign_consecutive(graph, cuts)
    _refuse_torn(graph, assignment.stage_of)
    return assignment


def assign_by_modules(graph: Graph, names: Sequence[str]) -> StageAssignment:
    """Start a stage at the first node of each named module.

    Raises:
        CutError: a name is not that of a module with nodes, two names start at one place, a stage would be empty, or state would be torn.
    """
    first: dict[str, int] = {}
    for number, node in enumerate(graph.nodes):
        path = graph.scopes[node.scope].path
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:length]), number)
    starts: dict[int, str] = {}
    for name in names:
        if name not in first:
            close = difflib.get_close_matches(name, first, n=3) or sorted(first)[:3]
            raise CutError(
                f"split_at: no operator comes from a module {name!r}: close names are {', '.join(map(repr, close))}"
            )
        if first[name] in starts:
            raise CutError(f"split_at: {starts[first[name]]!r} and {name!r} start at the same place: name one of them")
        if first[name] == 0:
            raise CutError(f"split_at: {name!r} starts the model, so the stage before it would be empty: leave it out")
        starts[first[name]] = name
    return assign_by_positions(graph, starts)


def assign_by_policy(graph: Graph, policy: Policy) -> StageAssignment:
    """Ask a function for the stage of each node.

    Its numbers are kept when every value flows to the same or a later stage; else stages are put in an order in which
    it does.

    Raises:
        CutError: the function gives something other than an integer from 0 up, stages depend on each other in a cycle, or state would
            be torn.
    """
    asked = []
    for number, node in enumerate(graph.nodes):
        seen = PolicyNode(
            index=number,
            op=graph.ops[node.op].name,
            scope=graph.scopes[node.scope].path,
            outputs=tuple(output_names(node)),
            flops=node.cost.flops,
            bytes=node.cost.bytes,
        )
        stage = policy(seen)
        if type(stage) is not int or stage < 0:
            raise CutError(
                f"policy: expected a stage number from 0 up for node {number} ({seen.op} in {seen.scope!r}), found {stage!r}"
            )
        asked.append(stage)
    order = _order(graph, asked)
    stages = [order[stage] for stage in asked]
    _refuse_torn(graph, stages)
    return StageAssignment(stages, max(1, len(order)))


def _order(graph: Graph, asked: list[int]) -> dict[int, int]:
    """The stages asked for -> their numbers: the smallest first among those whose inputs are ready."""
    needs: dict[int, dict[int, str]] = {
        stage: {} for stage in sorted(set(asked))
    }  # stage -> stage it needs -> what of it
    for number, needed, what in _needs(graph):
        if asked[needed] != asked[number]:
            needs[asked[number]].setdefault(asked[needed], what)
    order: dict[int, int] = {}
    while len(order) < len(needs):
        ready = [stage for stage, sources in needs.items() if stage not in order and order.keys() >= sources.keys()]
        if not ready:
            raise CutError(f"policy: the stages depend on each other in a cycle: {_cycle(needs, order)}")
        order[min(ready)] = len(order)
    return order


def _needs(graph: Graph) -> Iterator[tuple[int, int, str]]:
    """Yield, for each node, the earlier nodes that must not run after it, and the name of what they make for it.

    Besides values these are random numbers: all are drawn from one generator, so their order is part of the model.
    """
    maker: dict[str, int] = {}
    last_draw: int | None = None
    for number, node in enumerate(graph.nodes):
        for name in input_names(node):
            if name in maker:
                yield number, maker[name], name
        if is_random(graph, node):
            if last_draw is not None:
                yield number, last_draw, "random numbers"
            last_draw = number
        maker.update(dict.fromkeys(output_names(node), number))


def _cycle(needs: dict[int, dict[int, str]], done: dict[int, int]) -> str:
    """A cycle among the stages that are not done, as text."""
    stage = next(stage for stage in needs if stage not in done)
    path = [stage]
    while path.count(stage) < 2:
        stage = next(source for source in needs[stage] if source not in done)
        path.append(stage)
    path = path[path.index(stage) :][::-1]
    steps = (f" -({needs[after][before]})-> stage {after}" for before, after in itertools.pairwise(path))
    return f"stage {path[0]}" + "".join(steps)


def _refuse_torn(graph: Graph, stages: list[int]) -> None:
    for bond in split_groups(colocation_groups(graph), stages):
        raise CutError(_torn_message(graph, bond, stages))


def _torn_message(graph: Graph, bond: ColocationGroup, stages: list[int]) -> str:
    used = {stages[number]: graph.scopes[graph.nodes[number].scope].path for number in bond.nodes}
    where = ", ".join(f"stage {stage} (in {path!r})" for stage, path in sorted(used.items()))
    return f"{bond.name!r} is written, so all that touches it must stay in one stage, but this cut puts it into {where}: move the cut"
