"""Cut the inputs of a call into microbatches of equal size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.manifest import Edge, EntryPoint
from stagepack_loaders.train.batch_dimension import BatchDimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInputs:
    """The inputs of a call, for a schedule that cuts the first dimension of every tensor.

    Attributes:
        values: the inputs by name, tensors with a new first dimension, of the microbatches.
        replicated: those that are the same for each microbatch.
        batch_size: the number of rows of all microbatches.
        sizes: the sizes of the symbols in each microbatch.
    """

    values: Mapping[str, Any]
    replicated: frozenset[str]
    batch_size: int
    sizes: Mapping[str, int]


def cut_inputs(
    entry_point: EntryPoint,
    arguments: Mapping[str, BoundArgument],
    dimensions: BatchDimensions,
    microbatch_count: int,
) -> CallInputs:
    """Return the inputs of a call for a number of microbatches."""
    values: dict[str, Any] = {}
    microbatch: dict[str, BoundArgument] = {}
    replicated: set[str] = set()
    batch: tuple[str, int] | None = None
    for edge in entry_point.inputs:
        argument = arguments[edge.name]
        value = argument.value
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise InputError(
                    f"{argument.location}: a step computes the gradients of parameters only, found a tensor that requires gradients: give "
                    "it detached"
                )
            dimension = _cut_dimension(edge, value, dimensions, microbatch_count)
            if dimension is None:
                replicated.add(edge.name)
                value = value.expand(microbatch_count, *value.shape)
            else:
                batch = _checked_batch(batch, argument.location, value.shape[dimension], microbatch_count)
                value = value.unflatten(dimension, (microbatch_count, batch[1] // microbatch_count)).movedim(
                    dimension, 0
                )
        values[edge.name] = value
        microbatch[edge.name] = BoundArgument(argument.location, value[0] if isinstance(value, torch.Tensor) else value)
    if batch is None and microbatch_count > 1:
        raise InputError(
            f"expected inputs that are {microbatch_count} times as large as in the bundle, in the dimension of the batch, found none"
        )
    sizes = check_values(entry_point.inputs, microbatch, entry_point.symbols, entry_point.guards)
    return CallInputs(values=values, replicated=frozenset(replicated), batch_size=batch[1] if batch else 0, sizes=sizes)


def _cut_dimension(edge: Edge, value: torch.Tensor, dimensions: BatchDimensions, microbatch_count: int) -> int | None:
    """The dimension in which an input is cut."""
    dimension = dimensions.inputs.get(edge.name)
    if dimension is None or dimension >= value.dim():
        return None
    # Of a fixed size, the size of the argument says whether it is a batch of several microbatches.
    return None if dimensions.size == value.shape[dimension] and microbatch_count > 1 else dimension


def _checked_batch(batch: tuple[str, int] | None, location: str, size: int, microbatch_count: int) -> tuple[str, int]:
    """The batch size, with the location of the argument that has it."""
    if batch is not None and size != batch[1]:
        raise InputError(f"{location}: expected {batch[1]} rows, the size of the batch in {batch[0]}, found {size}")
    if size % microbatch_count:
        raise InputError(
            f"{location}: expected a multiple of {microbatch_count} rows, one or more for each microbatch, found {size}: leave out the "
            "last batch, or choose another number of microbatches"
        )
    return batch or (location, size)
