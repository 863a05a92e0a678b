"""Cut the inputs of a call into microbatches of equal size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import EntryPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInputs:
    """The inputs of a call, for a schedule that cuts the first dimension of every tensor.

    Attributes:
        values: the inputs by name.
        replicated: those that are the same for each microbatch; they are repeated along a new first dimension.
        sizes: the sizes of the symbols in each microbatch.
    """

    values: Mapping[str, Any]
    replicated: frozenset[str]
    sizes: Mapping[str, int]


def cut_inputs(entry_point: EntryPoint, arguments: Mapping[str, BoundArgument], microbatch_count: int) -> CallInputs:
    """Return the inputs of a call for a number of microbatches.

    The first dimension of the first tensor is the batch. Inputs whose first dimension is the same are cut; all others are the same for
    each microbatch.

    Args:
        entry_point: the entry point that is called.
        arguments: the arguments of the call, by edge name.
        microbatch_count: the number of microbatches.

    Raises:
        InputError: the batch is no multiple of the number of microbatches, or a microbatch does not fit the bundle.
    """
    inputs = entry_point.inputs
    batch_edge = next((edge for edge in inputs if edge.shape and edge.dtype not in SCALAR_DTYPES), None)
    if batch_edge is None:
        raise InputError("the model has no input with a batch dimension")
    batch_size = len(arguments[batch_edge.name].value)
    if batch_size % microbatch_count:
        raise InputError(
            f"{arguments[batch_edge.name].location}: expected a multiple of {microbatch_count} rows, one or more for each microbatch, "
            f"found {batch_size}: leave out the last batch, or choose another number of microbatches"
        )
    values: dict[str, Any] = {}
    microbatch: dict[str, BoundArgument] = {}
    replicated: set[str] = set()
    for edge in inputs:
        location, value = arguments[edge.name].location, arguments[edge.name].value
        is_cut = bool(edge.shape) and edge.dtype not in SCALAR_DTYPES and edge.shape[0] == batch_edge.shape[0]
        values[edge.name] = value
        first_value = value[: batch_size // microbatch_count] if is_cut else value
        if not is_cut and isinstance(value, torch.Tensor):
            replicated.add(edge.name)
            values[edge.name] = value.expand(microbatch_count, *value.shape)
        microbatch[edge.name] = BoundArgument(location, first_value)
    sizes = check_values(inputs, microbatch, entry_point.symbols, entry_point.guards)
    return CallInputs(values=values, replicated=frozenset(replicated), sizes=sizes)
