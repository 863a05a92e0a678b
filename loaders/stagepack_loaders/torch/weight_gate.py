"""Modules of graphs that ask for each weight at its first use and say when they have used it for the last time.

A gate answers: it waits until the bytes of a weight are there, or brings them, and may reuse the memory after the last use.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from stagepack.format.aliasing import alias_classes
from stagepack.format.folded_graph import FoldedGraph
from stagepack.format.graph import Graph
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.region_functions import RegionCallSite, region_functions
from stagepack_loaders.torch.build import FunctionStep, GraphBuilder, Step, tuple_of


@dataclass(frozen=True, slots=True)
class WeightUse:
    """Weights of a graph that are used in the same steps.

    Attributes:
        weights: their indices in the weight table.
        first_step: the number of the first step that uses one of them; a step is a node or a call of a region.
        last_step: the number of the last step that uses one of them, or a view of one; the number of steps if the graph returns it.
    """

    weights: tuple[int, ...]
    first_step: int
    last_step: int


class WeightGate(Protocol):
    """Answers the questions of a module for its weights."""

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the weights of a use, when their bytes are there.

        Args:
            use_index: the index of the use.
            given_weights: the weights that the module was called with.
        """

    def release(self, use_index: int) -> None:
        """Take note that the weights of a use will not be used again in this call."""


def weight_uses(folded: FoldedGraph, graph: Graph) -> list[WeightUse]:
    """Return the uses of the weights of a graph, in the order of first use. Weights that nothing uses are in none."""
    items, regions = region_functions(folded, graph)
    step_of_node: list[int] = []
    for step_number, item in enumerate(items):
        step_of_node += [step_number] * (regions[item.region].length if isinstance(item, RegionCallSite) else 1)
    # Views of a weight share its memory: the weight is in use as long as they are.
    classes = alias_classes(graph)
    steps: dict[str, list[int]] = {}
    for node_number, node in enumerate(graph.nodes):
        for value_name in (*input_names(node), *output_names(node)):
            steps.setdefault(classes.representative(value_name), []).append(step_of_node[node_number])
    for value_name in graph.outputs:
        steps.setdefault(classes.representative(value_name), []).append(len(items))
    weights_of_steps: dict[tuple[int, int], list[int]] = {}
    for weight_index, weight in enumerate(graph.weights):
        used_steps = steps.get(classes.representative(weight.value))
        if used_steps:
            weights_of_steps.setdefault((used_steps[0], used_steps[-1]), []).append(weight_index)
    return [WeightUse(tuple(indices), first, last) for (first, last), indices in sorted(weights_of_steps.items())]


def build_gated_module(
    folded: FoldedGraph,
    graph: Graph,
    operators: Sequence[Callable[..., Any]],
    device: torch.device,
    gate: WeightGate,
    uses: Sequence[WeightUse],
) -> GraphModule:
    """Return a module of a graph like that of `build_graph_module`, which asks a gate for its weights."""
    items, regions = region_functions(folded, graph)
    builder = GraphBuilder(graph, regions, operators, device)
    # The names of values are identifiers: none has a space.
    given_names = {weight.value: f"given {weight.value}" for weight in graph.weights}
    acquired, released = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for use_index, use in enumerate(uses):
        acquired[use.first_step].append(use_index)
        released[use.last_step].append(use_index)
    steps: list[Step] = []
    # What is only returned is acquired after the last step.
    for step_number, step in enumerate([*builder.steps(items), None]):
        context = None if step is None else step.context
        for use_index in acquired[step_number]:
            weight_names = [graph.weights[index].value for index in uses[use_index].weights]
            given = [given_names[weight_name] for weight_name in weight_names]
            steps.append(FunctionStep(_acquire, (gate, use_index), given, weight_names, context))
        if step is not None:
            steps.append(step)
            steps += [FunctionStep(_release, (gate, use_index), [], [], context) for use_index in released[step_number]]
    return builder.build_module(
        [*(value.name for value in graph.inputs), *given_names.values()], steps, tuple_of(graph.outputs), None, "Stage"
    )


def _acquire(use: tuple[WeightGate, int], *given_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, use_index = use
    return gate.acquire(use_index, given_weights)


def _release(use: tuple[WeightGate, int]) -> tuple[()]:
    gate, use_index = use
    gate.release(use_index)
    return ()
