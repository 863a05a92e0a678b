"""Inputs of a stage on their way to its device, and back to the caller if the stage writes them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from stagepack.format.graph import Graph
from stagepack.graph.aliasing import alias_classes


class StageInputs:
    """The inputs of a stage."""

    def __init__(self, graph: Graph) -> None:
        """Keep the graph.

        Args:
            graph: the graph of the stage.
        """
        self._graph = graph

    @cached_property
    def _written(self) -> list[int]:
        """The positions of the inputs that the stage may write. Only needed where inputs are moved."""
        classes = alias_classes(self._graph)
        return [position for position, value in enumerate(self._graph.inputs) if classes.is_written(value.name)]

    def write_back(self, values: Sequence[Any], moved_values: Sequence[Any]) -> None:
        """Write what the stage has written into moved inputs into the inputs themselves, as a stage on their device does.

        Args:
            values: the inputs, in order.
            moved_values: the same on the device of the stage.
        """
        if all(moved_value is value for value, moved_value in zip(values, moved_values, strict=True)):
            return
        for position in self._written:
            if moved_values[position] is not values[position]:
                values[position].copy_(moved_values[position])


def move_input(value: Any, device: torch.device) -> Any:
    """Return an input on a device; the same object if it is there, or no tensor.

    To a GPU it goes by page-locked memory: the host does not wait for the work that the device was given before. Also what the caller has
    page-locked is copied first: the caller may write it again when the call returns.
    """
    if not isinstance(value, torch.Tensor):
        return value
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
    if device.type != "cuda" or value.device.type != "cpu" or not is_plain or torch.compiler.is_compiling():
        return value.to(device)
    # `to` gives other strides to what is not dense.
    strides = value.to("meta").stride()
    page_locked = torch.empty_strided(value.size(), strides, dtype=value.dtype, pin_memory=True)
    return page_locked.copy_(value).to(device, non_blocking=True)
