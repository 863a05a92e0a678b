"""The target of a batch, cut like its results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stagepack.errors import InputError


class Target:
    """The target of a batch: tensors in containers, in the parts of microbatches.

    Tensors without dimensions, and what is no tensor, are the same for each microbatch.
    """

    def __init__(self, target: Any, microbatches: int, batch_size: int, dimensions: Sequence[int]) -> None:
        self._target = target
        self._microbatches = microbatches
        self._batch_size = batch_size
        self._dimensions = tuple(dimensions)
        self.part(0, 1)

    def part(self, start: int, stop: int) -> Any:
        """Return the target of the microbatches from `start` up to, and without, `stop`."""
        return _map_tensors(self._target, lambda tensor: self._narrowed(tensor, start, stop))

    def _narrowed(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if not tensor.dim() or self._microbatches == 1:
            return tensor
        dimension = self._dimension_of(tensor)
        rows = tensor.shape[dimension] // self._microbatches
        return tensor.narrow(dimension, start * rows, (stop - start) * rows)

    def _dimension_of(self, tensor: torch.Tensor) -> int:
        size = self._batch_size
        fitting = [
            dimension
            for dimension in self._dimensions
            if dimension < tensor.dim() and _fits(tensor.shape[dimension], size, may_be_multiple=not dimension)
        ]
        if len(fitting) == 1:
            return fitting[0]
        expected = " or ".join(f"in dimension {dimension}" for dimension in self._dimensions)
        raise InputError(
            f"target: expected the {size} rows of the batch {expected}, as the results have them, found the shape {list(tensor.shape)}: "
            "let the loss function itself have what is the same for each microbatch, or give it as a tensor without dimensions"
        )


def _fits(size: int, batch_size: int, *, may_be_multiple: bool) -> bool:
    if size == batch_size or not batch_size:
        return size == batch_size
    return may_be_multiple and size > 0 and math.gcd(size, batch_size) == batch_size


def _map_tensors(target: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A target with other tensors in the same containers."""
    if isinstance(target, torch.Tensor):
        return function(target)
    if isinstance(target, Mapping):
        return {key: _map_tensors(entry, function) for key, entry in target.items()}
    if isinstance(target, list | tuple):
        entries = [_map_tensors(entry, function) for entry in target]
        # The fields of a named tuple are arguments of their own.
        return type(target)(*entries) if hasattr(target, "_fields") else type(target)(entries)
    if target is None or isinstance(target, bool | int | float | str):
        return target
    raise InputError(f"target: expected tensors in lists, tuples and dicts, found {type(target).__name__}")
