"""Modules of stages that ask for each weight at its first use and say when they have used it for the last time.

A gate answers: it waits until the bytes of a weight are there, or brings them, and may reuse the memory after the last use.
"""

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.graph.region_functions import region_functions
from stagepack_loaders.torch.build import FunctionStep, GraphBuilder, StageParts, Step, tuple_of
from stagepack_loaders.window_plan import WeightUse


class WeightGate(ABC):
    """The weights of a stage, which its module asks for."""

    @abstractmethod
    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the weights of a use, when their bytes are there; `given_weights` are those that the module was called with."""

    def release(self, use_index: int) -> None:  # noqa: B027 - a default
        """Take note that the weights of a use will not be used again in this call."""

    @abstractmethod
    def has_arrived(self) -> bool:
        """Whether all weights are in the memory of the device, to stay, so that the stage need not ask any more."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all weights have arrived that will stay in the memory of the device.

        Raises:
            DigestError: a file cannot be read, or differs from the one that the manifest lists.
        """

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse a conversion, by a function of a tensor, that some weights cannot have. By default, all can when they are there."""
        self.wait()

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """Call the module that asks for its weights."""
        return module(*values)


class GatedModule(torch.nn.Module):
    """Runs a stage: asks for its weights as long as some of them may be missing, then as any other stage does.

    Attributes:
        gate: what it asks; set when the weights are loaded.
    """

    gate: WeightGate

    def __init__(
        self, plain_module: GraphModule, parts: StageParts, device: torch.device, uses: Sequence[WeightUse]
    ) -> None:
        super().__init__()
        self.plain_module = plain_module
        self._gated_module = _build_gated(self, parts, device, uses)

    def forward(self, *values: Any) -> Any:
        """Run the stage on its inputs and its weights."""
        if self.gate.has_arrived():
            return self.plain_module(*values)
        return self.gate.run(self._gated_module, values)

    def wait_for_copy(self) -> None:
        """Return when all weights have arrived, so that a copy of the stage needs to ask for nothing."""
        self.gate.wait()
        if not self.gate.has_arrived():
            raise TypeError(
                "a stage with device_memory cannot be copied, because its weights share memory: load it again"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a copy of the graph."""
        self.wait_for_copy()
        return copy.deepcopy(self.plain_module, memo)


def _build_gated(gated: GatedModule, parts: StageParts, device: torch.device, uses: Sequence[WeightUse]) -> GraphModule:
    """Return a module of a graph like that of `build_graph_module`, which asks for its weights."""
    graph = parts.graph
    items, regions = region_functions(parts.folded, graph)
    builder = GraphBuilder(graph, regions, parts.operators, device)
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
            steps.append(FunctionStep(_acquire, (gated, use_index), given, weight_names, context))
        if step is not None:
            steps.append(step)
            steps += [
                FunctionStep(_release, (gated, use_index), [], [], context) for use_index in released[step_number]
            ]
    inputs = [*(value.name for value in graph.inputs), *given_names.values()]
    return builder.build_module(inputs, steps, tuple_of(graph.outputs), None, "Stage")


def _acquire(use: tuple[GatedModule, int], *given_weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gated, use_index = use
    return gated.gate.acquire(use_index, given_weights)


def _release(use: tuple[GatedModule, int]) -> tuple[()]:
    gated, use_index = use
    gated.gate.release(use_index)
    return ()
