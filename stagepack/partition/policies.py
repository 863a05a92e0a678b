"""A policy: the caller's function from a node to a stage."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stagepack.errors import CutError
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.assignment import StageAssignment, node_dependencies, refuse_split_groups


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


# For each stage, the stages that it depends on, each with the name of a value that it receives from there.
_Dependencies = Mapping[int, Mapping[int, str]]


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
