"""Which dimension of inputs and results is the batch, which is cut into microbatches. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stagepack.errors import OptionError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, format_dim, format_shape, symbol_names
from stagepack.format.tree import value_names
from stagepack.graph.rows.analysis import find_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDimensions:
    """Where tensors have the batch.

    Attributes:
        size: the size of a microbatch: a symbol, or a number in a bundle whose batch is fixed.
        inputs: the dimension of each input that has the batch, by name; the others are the same for each microbatch.
        results: the dimension of each result that has it.
        meeting: which operator lets rows meet nevertheless; None if none does.
    """

    size: Dim = 1
    inputs: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[str, int] = field(default_factory=dict)
    meeting: str | None = None

    @property
    def target_dimensions(self) -> tuple[int, ...]:
        """The dimensions that may be the batch of a target: those of the results, or of the inputs if no result has rows."""
        return tuple(sorted(set((self.results or self.inputs).values())))


def find_batch_dimensions(bundle: Bundle, batch_dim: int | str | None, microbatches: int) -> BatchDimensions:
    """Determine which dimension is the batch.

    batch_dim: the name of the dimension, or its number in the first input; None for one along which the model keeps rows apart.
    """
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
