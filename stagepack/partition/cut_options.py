"""Where to cut: what the caller asks for -> the stage of each node, and the plan that says what that costs."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stagepack.errors import CutError
from stagepack.format.graph import Graph
from stagepack.format.plan import Plan
from stagepack.graph.repeat_search import repeat_interiors
from stagepack.partition.costs import GraphCosts
from stagepack.partition.cut import Cut, WeightSharing, cut_graph
from stagepack.partition.node_order import late_state_sort_keys
from stagepack.partition.planner import balance_stages, plan_for_assignment
from stagepack.partition.policies import (
    Policy,
    StageAssignment,
    assign_by_modules,
    assign_by_plan,
    assign_by_policy,
    assign_by_positions,
    assign_consecutive,
)

_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """Where to cut: one of the first four, or none of them for the marks in the model's code, else one stage.

    Attributes:
        stages: as many stages, so that the slowest is as fast as possible.
        split_at: names of modules; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan saved earlier.
        memory: with `stages`: what the device of each stage has, in bytes or as ``"24GiB"``.
        speeds: with `stages`: of the device of each stage, relative to the others.
        shared: what becomes of a weight that several stages use: each holds it ("replicate"), or the first one holds it and
            sends it at each call ("transmit").
    """

    stages: int | None = None
    split_at: Sequence[str] = ()
    policy: Policy | None = None
    plan: Plan | None = None
    memory: Sequence[int | str] = ()
    speeds: Sequence[float] = ()
    shared: WeightSharing = "replicate"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            CutError: more than one way to cut, limits without a number of stages to find, or what is no list or no sensible number.
        """
        for name, listed in (("split_at", self.split_at), ("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(listed, str | int | float):
                raise CutError(f"{name}: expected a list, found {listed!r}")
        ways = {"stages": self.stages, "split_at": self.split_at, "policy": self.policy, "plan": self.plan}
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise CutError(f"expected one way to cut, found {' and '.join(given)}: choose one")
        if (self.memory or self.speeds) and self.stages is None:
            raise CutError("memory and speeds say how to choose among cuts: give stages=N too")
        if self.shared not in ("replicate", "transmit"):
            raise CutError(f"shared: expected 'replicate' or 'transmit', found {self.shared!r}")
        if not all(1e-6 <= speed <= 1e6 for speed in self.speeds):
            raise CutError(f"speeds: expected numbers from 0.000001 to 1000000, found {list(self.speeds)}")

    def cut(self, graph: Graph, costs: GraphCosts, split_positions: Sequence[int] = ()) -> tuple[Cut, Plan]:
        """Cut a graph as these options say.

        Args:
            graph: a graph of `canonical_graph`.
            costs: of `graph`.
            split_positions: the numbers of the nodes before which the model's own code has a split marker.

        Returns:
            The cut, and its plan.

        Raises:
            CutError: the graph cannot be cut so.
        """
        assignment = self._assign(graph, costs, split_positions)
        shared = self.shared if self.plan is None else self.plan.shared
        plan = plan_for_assignment(graph, costs, assignment, memory=self._memory_in_bytes, speeds=self.speeds)
        return cut_graph(graph, assignment, costs, shared), replace(plan, shared=shared)

    @property
    def _memory_in_bytes(self) -> list[int]:
        return list(map(parse_byte_size, self.memory))

    def _assign(self, graph: Graph, costs: GraphCosts, split_positions: Sequence[int]) -> StageAssignment:
        if self.plan is not None:
            return assign_by_plan(graph, self.plan)
        if self.policy is not None:
            return assign_by_policy(graph, self.policy)
        keys = late_state_sort_keys(graph)
        order = sorted(range(len(keys)), key=lambda number: (keys[number], number))
        stage_of, stages = self._assign_in_a_row(
            replace(graph, nodes=tuple(graph.nodes[number] for number in order)),
            dataclasses.replace(costs, times=tuple(costs.times[number] for number in order)),
            [sum(key < mark for key in keys) for mark in split_positions],
        )
        return StageAssignment([stage for _, stage in sorted(zip(order, stage_of, strict=True))], stages)

    def _assign_in_a_row(self, graph: Graph, costs: GraphCosts, split_positions: Sequence[int]) -> StageAssignment:
        if self.split_at:
            return assign_by_modules(graph, self.split_at)
        if self.stages is not None:
            positions = balance_stages(
                graph,
                costs,
                self.stages,
                memory=self._memory_in_bytes,
                speeds=self.speeds,
                repeats=repeat_interiors(graph),
            )
            return assign_consecutive(graph, positions)
        return assign_by_positions(graph, split_positions)


def parse_byte_size(text: int | str) -> int:
    """Parse a number of bytes: ``24GiB`` (1024 ** 3), ``24GB`` (1000 ** 3), ``500 MB``, or a plain number.

    Args:
        text: the number with its unit; a plain number counts bytes.

    Returns:
        The number of bytes, rounded down, below 2 ** 63.

    Raises:
        CutError: `text` is not a number of bytes, or is 2 ** 63 bytes or more.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KkMGT]?i?B?)", str(text))
    unit = match[2].replace("k", "K") if match else "?"
    if match is None or unit not in _BYTE_UNITS:
        raise CutError(f"memory: expected a number of bytes such as 24GiB, 24GB or 25769803776, found {text!r}")
    scale = _BYTE_UNITS[unit]
    byte_count = int(float(match[1]) * scale) if "." in match[1] else int(match[1]) * scale
    if byte_count >= 2**63:
        raise CutError(f"memory: expected fewer than 2 ** 63 bytes, found {text!r}")
    return byte_count
