"""The module of a stage whose weights are not all in the memory of its device when it is called."""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from stagepack_loaders.torch.weight_gate import WeightGate


class GatedWeights(WeightGate, Protocol):
    """The weights of a stage, which its module asks for."""

    def has_arrived(self) -> bool:
        """Whether all weights are in the memory of the device, to stay, so that the stage need not ask any more."""

    def wait(self) -> None:
        """Return when all weights have arrived that will stay in the memory of the device.

        Raises:
            DigestError: a file cannot be read, or differs from the one that the manifest lists.
        """

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Check that all weights can be converted.

        Args:
            convert: returns the tensor that a tensor becomes.

        Raises:
            OptionError: some cannot become what `convert` makes of them.
        """

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """Call the module that asks for its weights."""


class GatedModule(torch.nn.Module):
    """Runs a stage: asks for its weights as long as some of them may be missing, then as any other stage does.

    Attributes:
        gated_module: the graph that asks this object for its weights; set when it is built.
        weights: the weights; set when they are loaded.
    """

    gated_module: GraphModule
    weights: GatedWeights

    def __init__(self, plain_module: GraphModule) -> None:
        super().__init__()
        self.plain_module = plain_module

    def forward(self, *values: Any) -> Any:
        """Run the stage on its inputs and its weights."""
        if self.weights.has_arrived():
            return self.plain_module(*values)
        return self.weights.run(self.gated_module, values)

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`."""
        return self.weights.acquire(use_index, given_weights)

    def release(self, use_index: int) -> None:
        """See `WeightGate`."""
        self.weights.release(use_index)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a copy of the graph, which needs to ask for nothing, when all weights have arrived."""
        self.weights.wait()
        if not self.weights.has_arrived():
            raise TypeError(
                "a stage with device_memory cannot be copied, because its weights share memory: load it again"
            )
        return copy.deepcopy(self.plain_module, memo)
