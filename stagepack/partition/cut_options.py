"""What the caller asks for when a model is cut: options, a policy, or a plan as a JSON file, which people may edit."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from stagepack.errors import CutError
from stagepack.format import limits
from stagepack.format.plan import Plan
from stagepack.format.quantities import parse_byte_size
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.assignment import StageAssignment, node_dependencies, refuse_split_groups
from stagepack.partition.profile import DeviceProfile, Profile, find_profile, read_json, write_json

WeightSharing = Literal["replicate", "transmit"]
# A number of stages, or a stage for each layer of the model.
Stages = int | Literal["layers"]
LAYERS: Final = "layers"
# For each stage, the stages that it depends on, each with the name of a value that it receives from there.
_Dependencies = Mapping[int, Mapping[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNode:
    """A node as a policy sees it.

    Attributes:
        index: its number in execution order.
        op: the operator, such as ``aten.linear.default``.
        scope: the path of the module that it came from; ``layers.0@1`` is the second call of ``layers.0``.
        outputs: the names of the values that it defines.
        flops: floating-point operations at the sizes of the example.
        bytes: bytes that it reads and writes at these sizes.

    Examples:
        ::

            def policy(node: stagepack.PolicyNode) -> int:
                return 0 if node.scope.startswith("encoder") else 1

            stagepack.export(model, args, out="m.stagepack", policy=policy)
    """

    index: int
    op: str
    scope: str
    outputs: tuple[str, ...]
    flops: int
    bytes: int


Policy = Callable[[PolicyNode], int]


def assign_by_policy(analysis: GraphAnalysis, policy: Policy) -> StageAssignment:
    """Ask a policy for the stage of each node.

    Its stage numbers give the order of the stages when every value flows to the same or a later stage; else stages are reordered
    so that it does. Numbers without nodes are skipped.
    """
    graph = analysis.graph
    labels = []
    for node_number, node in enumerate(graph.nodes):
        policy_node = PolicyNode(
            index=node_number,
            op=graph.ops[node.op].name,
            scope=graph.scopes[node.scope].path,
            outputs=analysis.node_outputs[node_number],
            flops=node.cost.flops,
            bytes=node.cost.bytes,
        )
        label = policy(policy_node)
        if type(label) is not int or label < 0:
            raise CutError(
                f"policy: expected a stage number from 0 up for node {node_number} "
                f"({policy_node.op} in {policy_node.scope!r}), found {label!r}"
            )
        labels.append(label)
    stage_numbers = _stage_numbers(analysis, labels)
    stage_of = [stage_numbers[label] for label in labels]
    refuse_split_groups(analysis, stage_of)
    return StageAssignment(stage_of, max(1, len(stage_numbers)))


def _stage_numbers(analysis: GraphAnalysis, labels: Sequence[int]) -> dict[int, int]:
    """Number the policy's stages: the smallest first among those whose inputs are ready."""
    dependencies: dict[int, dict[int, str]] = {label: {} for label in sorted(set(labels))}
    for node_number, required_node, value_name in node_dependencies(analysis):
        if labels[required_node] != labels[node_number]:
            dependencies[labels[node_number]].setdefault(labels[required_node], value_name)
    stage_numbers: dict[int, int] = {}
    while len(stage_numbers) < len(dependencies):
        ready = [
            label
            for label, sources in dependencies.items()
            if label not in stage_numbers and stage_numbers.keys() >= sources.keys()
        ]
        if not ready:
            raise CutError(
                f"policy: the stages depend on each other in a cycle: {_describe_cycle(dependencies, stage_numbers)}"
            )
        stage_numbers[min(ready)] = len(stage_numbers)
    return stage_numbers


def _describe_cycle(dependencies: _Dependencies, finished: Mapping[int, int]) -> str:
    """A cycle among the stages that are not finished."""
    label = next(label for label in dependencies if label not in finished)
    path = [label]
    while path.count(label) < 2:
        label = next(source for source in dependencies[label] if source not in finished)
        path.append(label)
    cycle = path[path.index(label) :][::-1]
    steps = (f" -({dependencies[user][source]})-> stage {user}" for source, user in itertools.pairwise(cycle))
    return f"stage {cycle[0]}" + "".join(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """Where to cut: at most one of `stages`, `split_at`, `policy` and `plan`.

    Without them, the model is cut at the split markers in its code; without split markers it is one stage.

    Attributes:
        stages: the number of stages, which are chosen so that the slowest is as fast as possible; or ``"layers"``, a stage for each
            layer of the model.
        split_at: paths of modules; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan saved earlier.
        memory: with a number of `stages`: memory of the device of each stage, in bytes or as ``"24GiB"``.
        speeds: with a number of `stages`: speed of the device of each stage, relative to the others, from 0.000001 to 1000000.
        profile: measured times of the nodes, or a device, in the place of estimates for the reference device; a name or a path becomes
            what `find_profile` returns for it. The memory of a device limits each stage where `memory` is not given.
        shared: how stages get a weight that several of them use: each holds it ("replicate"), or the first one holds it and
            sends it at each call ("transmit").

    Raises:
        CutError: more than one way to cut, `memory` or `speeds` without a number of stages, or a value of the wrong form.

    Examples:
        ::

            CutOptions(stages=4, memory=["24GiB"] * 4)
    """

    stages: Stages | None = None
    split_at: Sequence[str] = ()
    policy: Policy | None = None
    plan: Plan | None = None
    memory: Sequence[int | str] = ()
    speeds: Sequence[float] = ()
    profile: Profile | DeviceProfile | str | os.PathLike[str] | None = None
    shared: WeightSharing = "replicate"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if isinstance(self.profile, str | os.PathLike):
            object.__setattr__(self, "profile", find_profile(self.profile))
        is_number = isinstance(self.stages, int) and not isinstance(self.stages, bool)
        if not is_number and self.stages is not None and not (isinstance(self.stages, str) and self.stages == LAYERS):
            raise CutError(f"stages: expected a whole number or {LAYERS!r}, found {self.stages!r}")
        for option, items in (("split_at", self.split_at), ("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(items, str | int | float):
                raise CutError(f"{option}: expected a list, found {items!r}")
        ways = {"stages": self.stages, "split_at": self.split_at, "policy": self.policy, "plan": self.plan}
        chosen = [option for option, choice in ways.items() if choice]
        if len(chosen) > 1:
            raise CutError(f"expected one way to cut, found {' and '.join(chosen)}: choose one")
        if (self.memory or self.speeds) and not isinstance(self.stages, int):
            raise CutError("memory and speeds select among the cuts into a number of stages: pass stages=N too")
        if self.shared not in ("replicate", "transmit"):
            raise CutError(f"shared: expected 'replicate' or 'transmit', found {self.shared!r}")
        if not all(limits.SLOWEST_SPEED <= speed <= limits.FASTEST_SPEED for speed in self.speeds):
            raise CutError(f"speeds: expected numbers from 0.000001 to 1000000, found {list(self.speeds)}")

    @property
    def has_way(self) -> bool:
        """Whether it says where to cut; if not, the split markers in the model's code do."""
        return any((self.stages, self.split_at, self.policy, self.plan))

    @property
    def memory_bytes(self) -> list[int]:
        """Bytes of memory of the device of each stage; empty for no limits."""
        if not self.memory and isinstance(self.stages, int) and isinstance(self.profile, DeviceProfile):
            return [self.profile.memory] * self.stages
        try:
            return [parse_byte_size(size) for size in self.memory]
        except ValueError as error:
            raise CutError(f"memory: {error}") from None


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    Args:
        path: a file that ``stagepack plan -o`` wrote. Only the `nodes` of each stage and `shared` matter when a model is cut by it.

    Returns:
        The plan, for the `plan` argument of `stagepack.export` and `stagepack.recut`.

    Raises:
        CutError: the file cannot be read, or is not a plan.

    Examples:
        ::

            plan = stagepack.read_plan("plan.json")
            stagepack.export(model, args, out="m.stagepack", plan=plan)
    """
    return read_json(path, Plan, "plan", "stagepack plan --out")


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file, with one line for each stage. A file of that name is replaced."""
    write_json({"stages": plan.stages, "shared": plan.shared}, path, ("stages",))
