"""Cut a batch into microbatches of equal size: which dimension is the batch, and the parts of the inputs and of the target."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stagepack.errors import InputError, OptionError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, format_dim, format_shape, symbol_names
from stagepack.format.tree import value_names
from stagepack.graph.rows.row_analysis import find_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDimensions:
    """Where tensors have the batch: the dimension of each input and result that has it, by name."""

    # The size of a microbatch: a symbol, or a number in a bundle whose batch is fixed.
    size: Dim = 1
    inputs: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[str, int] = field(default_factory=dict)
    meeting: str | None = None  # the operator that lets rows meet nevertheless

    @property
    def target_dimensions(self) -> tuple[int, ...]:
        """The dimensions that may be the batch of a target: those of the results, or of the inputs if no result has rows."""
        return tuple(sorted(set((self.results or self.inputs).values())))


def find_batch_dimensions(bundle: Bundle, batch_dim: int | str | None, microbatches: int) -> BatchDimensions:
    """Determine which dimension is the batch: the one that the caller names, or one along which the model keeps rows apart."""
    entry_point = bundle.entry_point
    inputs = [edge for edge in entry_point.inputs if _is_tensor(edge)]
    if batch_dim is None and microbatches == 1:
        return BatchDimensions()
    if not inputs:
        raise OptionError(
            "microbatches: the model has no input with a batch dimension: expected 1, so that nothing is cut"
        )
    graphs = [bundle.graph_file(stage_number, module_calls=False).graph for stage_number in range(len(bundle.stages))]
    if batch_dim is not None:
        index, size = _named_size(inputs, batch_dim)
        named = BatchDimensions(size=size, inputs=_input_positions(inputs, index, size))
        separate = named if microbatches == 1 else _with_results(entry_point, graphs, named)
        if isinstance(separate, BatchDimensions):
            return separate
        return replace(named, results=_result_positions(entry_point, index, size), meeting=separate)
    reasons = []
    for size, index in _candidates(inputs).items():
        try:
            dimensions = BatchDimensions(size=size, inputs=_input_positions(inputs, index, size))
        except OptionError as error:
            reasons.append(str(error))
            continue
        separate = _with_results(entry_point, graphs, dimensions)
        if isinstance(separate, BatchDimensions):
            return separate
        reasons.append(f"{format_dim(size)}: {separate}")
    raise OptionError(
        f"batch_dim: the model keeps the rows of no dimension apart: {'; '.join(reasons)}: name the dimension of the batch, or give "
        "microbatches=1"
    )


def _with_results(
    entry_point: EntryPoint, graphs: Sequence[Graph], dimensions: BatchDimensions
) -> BatchDimensions | str:
    """Where the results have the batch, or which operator lets rows meet.

    Each microbatch has random numbers of its own in one process too. A batch norm in training mode has the statistics of each.
    """
    results = set(value_names(entry_point.signature.result))
    result_rows = find_rows(graphs, dimensions.inputs, results, allow_random=True)
    meeting = result_rows if isinstance(result_rows, str) else None
    if meeting is not None:
        result_rows = find_rows(graphs, dimensions.inputs, results, allow_random=True, allow_batch_norm=True)
    if isinstance(result_rows, str):
        return result_rows
    positions = {
        result_name: rows.dim for result_name, rows in result_rows.items() if rows is not None and rows.is_consecutive
    }
    return replace(dimensions, results=positions, meeting=meeting)


def _input_positions(inputs: Sequence[Edge], index: int, size: Dim) -> dict[str, int]:
    """Where the inputs have the batch."""
    positions = {}
    for edge in inputs:
        dimensions = _positions(edge, index, size)
        if len(dimensions) > 1 or any(edge.shape[dimension] != size for dimension in dimensions):
            raise OptionError(
                f"{format_dim(size)}: expected it as one dimension of {edge.name}, or as none, found {format_shape(edge.shape)}"
            )
        if dimensions:
            positions[edge.name] = dimensions[0]
    return positions


def _result_positions(entry_point: EntryPoint, index: int, size: Dim) -> dict[str, int]:
    """Where the results of a model in which rows meet have the batch, by their shapes alone."""
    result_names = set(value_names(entry_point.signature.result))
    edges = [edge for edge in entry_point.edges if edge.name in result_names and _is_tensor(edge)]
    positions = {edge.name: _positions(edge, index, size) for edge in edges}
    return {
        edge.name: positions[edge.name][0]
        for edge in edges
        if len(positions[edge.name]) == 1 and edge.shape[positions[edge.name][0]] == size
    }


def _positions(edge: Edge, index: int, size: Dim) -> Sequence[int]:
    """The dimensions of a tensor that depend on the batch."""
    symbols = set(symbol_names(size))
    if not symbols:  # other dimensions may have the same number
        return [index] if index < len(edge.shape) and edge.shape[index] == size else []
    return [dimension for dimension, dim in enumerate(edge.shape) if not symbols.isdisjoint(symbol_names(dim))]


def _candidates(inputs: Sequence[Edge]) -> dict[Dim, int]:
    """The dynamic sizes of inputs, leading dimensions first, each with its number; and the first size of all, if it is fixed."""
    ranked = sorted(
        ((index, dim) for edge in inputs for index, dim in enumerate(edge.shape) if not isinstance(dim, int)),
        key=lambda pair: pair[0],
    )
    candidates: dict[Dim, int] = {}
    for index, dim in ranked:
        candidates.setdefault(dim, index)
    candidates.setdefault(inputs[0].shape[0], 0)
    return candidates


def _named_size(inputs: Sequence[Edge], batch_dim: int | str) -> tuple[int, Dim]:
    """The number and the size of the dimension that the caller names."""
    if isinstance(batch_dim, str):
        sizes = {dim: index for edge in inputs for index, dim in enumerate(edge.shape) if isinstance(dim, str)}
        if batch_dim in sizes:
            return sizes[batch_dim], batch_dim
        raise OptionError(
            f"batch_dim: expected the name of a dynamic dimension of the inputs, {', '.join(sizes) or 'of which there is none'}, found "
            f"{batch_dim!r}"
        )
    first = inputs[0]
    if type(batch_dim) is not int or not 0 <= batch_dim < len(first.shape):
        raise OptionError(
            f"batch_dim: expected the number of a dimension of {first.name}, of shape {format_shape(first.shape)}, found {batch_dim!r}"
        )
    return batch_dim, first.shape[batch_dim]


def _is_tensor(edge: Edge) -> bool:
    return bool(edge.shape) and edge.dtype not in SCALAR_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInputs:
    """The inputs of a call by name, for a schedule that cuts the first dimension of every tensor, which is that of the microbatches."""

    values: Mapping[str, Any]
    replicated: frozenset[str]  # those that are the same for each microbatch
    batch_size: int
    sizes: Mapping[str, int]  # of the symbols in each microbatch


def cut_inputs(
    entry_point: EntryPoint, arguments: Mapping[str, BoundArgument], dimensions: BatchDimensions, microbatch_count: int
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
    # Where the size is fixed, that of the argument says whether it is a batch of several microbatches.
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


def fingerprint_of(call: CallInputs, *, with_content: bool) -> int:
    """Return a checksum of a batch: of its sizes, and of its content if that is asked for."""
    checksum = zlib.crc32(repr(sorted(call.sizes.items())).encode())
    if with_content:
        for input_name, value in sorted(call.values.items()):
            tensor = value[0] if input_name in call.replicated else value
            content: Any = repr(tensor).encode()
            if isinstance(tensor, torch.Tensor):
                dense = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
                content = dense.reshape(-1).view(torch.uint8).numpy()
            checksum = zlib.crc32(content, checksum)
    return checksum


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
