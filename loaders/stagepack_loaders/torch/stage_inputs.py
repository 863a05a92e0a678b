"""Inputs of a stage on their way to its device, and back to the caller if the stage writes them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from stagepack.format.aliasing import alias_classes
from stagepack.format.graph import Graph
from stagepack.torch_internals import write_count


class StageInputs:
    """The inputs of a stage."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def _written(self) -> dict[int, bool]:
        """The positions of the inputs that the stage may write, and whether torch counts its writes. Only needed where inputs are moved.

        An operator that is a view for some arguments makes it possible: ``mask.to(torch.float32)`` is not one for integers. Norms write
        their statistics uncounted.
        """
        graph, classes = self._graph, alias_classes(self._graph)
        written = {}
        for position, value in enumerate(graph.inputs):
            writers = classes.writers.get(classes.representative(value.name), ())
            if writers:
                written[position] = all(graph.ops[graph.nodes[number].op].mutates for number in writers)
        return written

    def write_counts(self, values: Sequence[Any], moved_values: Sequence[Any]) -> dict[int, int | None]:
        """Return the moved inputs that the stage may write, by position, with a count of their writes; None if it is not known.

        values: the inputs, in order.
        """
        moved_positions = {position for position, value in enumerate(values) if moved_values[position] is not value}
        if not moved_positions:
            return {}
        return {
            position: write_count(moved_values[position]) if is_counted else None
            for position, is_counted in self._written.items()
            if position in moved_positions
        }


def write_back(values: Sequence[Any], moved_values: Sequence[Any], counts: Mapping[int, int | None]) -> None:
    """Write what a stage has written into moved inputs into the inputs themselves, as a stage on their device does.

    values: the inputs, in order.
    """
    for position, count in counts.items():
        if count is None or write_count(moved_values[position]) != count:
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
