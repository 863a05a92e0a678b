"""Whether requests may be batched: concatenated along their first dimension, run once, and split again."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stagepack.errors import InputError, StageFailedError
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.graph.rows.batch_dimension import batch_dimension
from stagepack_loaders import example
from stagepack_loaders.pipeline import CallablePipeline

# Rows beside those whose answers are compared: much larger and smaller, and not numbers.
_NEIGHBOUR_FACTORS: Final = ((1e3, 1e-3), (math.nan, math.inf))
_DEPENDS: Final = "the answer to the recorded example depends on the rest of its batch"
_SCALED_DTYPES: Final = frozenset({"bfloat16", "float16", "float32", "float64", "complex64", "complex128"})


class BatchLimit(NamedTuple):
    """The largest batch that requests may be joined to.

    Attributes:
        max_batch_size: the batch size; 1 if requests must not be joined.
        reason: why requests must not be joined; empty if they may.
    """

    max_batch_size: int
    reason: str


def batch_limit(
    bundle: Bundle, edges: Sequence[Edge], requested_size: int, pipeline: CallablePipeline | None
) -> BatchLimit:
    """Determine how large a batch of several requests may be.

    Requests may be joined if the edges share one batch dimension whose rows no operator mixes (see `batch_dimension`), and the answer to
    the recorded example does not depend on the rest of the batch: other rows of the example, and rows that are scaled, reordered, NaN or
    infinite. The graph decides, and the runs confirm it for the kernels of the runtime.

    pipeline: runs the example; with None the runs are left out, and the graph alone decides.
    The result is the smaller of `requested_size` and the largest batch size of the bundle; 1 with a reason if requests must not be joined.
    """
    dimension = batch_dimension(
        bundle.stored, edges
    )  # whose stages take no numbers of adapters, which are one for each row
    if isinstance(dimension, str):
        return BatchLimit(1, dimension)
    max_batch_size = requested_size if dimension.max is None else min(requested_size, dimension.max)
    if pipeline is None or max_batch_size == 1:
        return BatchLimit(max_batch_size, "")
    with pipeline.without_limit():  # which is for the sizes of each request
        reason = _find_dependence(pipeline, dimension)
    return BatchLimit(1, reason) if reason else BatchLimit(max_batch_size, "")


def _find_dependence(pipeline: CallablePipeline, symbol: Symbol) -> str:
    """Run the recorded example in other batches. Return why requests must not be joined; empty if nothing was seen."""
    inputs = {} if pipeline.bundle.example is None else example.read_example(pipeline)[0]
    example_size = len(next(iter(inputs.values()), ()))
    if example_size == 0:
        return "the bundle has no recorded example to test batches with"
    expected = example.run_on_inputs(pipeline, inputs)
    reordered = [example_size - 1, *range(1, example_size), 0, *range(example_size)]
    smallest = list(range(min(example_size, max(1, symbol.min or 0))))
    for item_positions in (reordered if symbol.max is None else reordered[-symbol.max :], smallest):
        try:
            results = example.run_on_inputs(pipeline, _select_items(inputs, item_positions))
        except InputError as error:
            return f"the recorded example is refused at batch size {len(item_positions)}: {error}"
        if not example.compare_results(pipeline, results, _select_items(expected, item_positions)).within:
            return _DEPENDS
    own_count = example_size if symbol.max is None else min(example_size, max(1, symbol.max - 2))
    own_items = _select_items(inputs, range(own_count))
    own_answers = _select_items(expected, range(own_count))
    for first, last in _neighbours(pipeline, inputs):
        batch = {
            array_name: pipeline.arrays.join([first[array_name], array, last[array_name]])
            for array_name, array in own_items.items()
        }
        if symbol.max is not None:
            batch = {array_name: array[: symbol.max] for array_name, array in batch.items()}
        try:
            results = example.run_on_inputs(pipeline, batch)
        except (InputError, StageFailedError):
            continue  # the scheduler runs the calls of a batch that fails alone, so an error is no other answer
        own_results = {array_name: result[1 : 1 + own_count] for array_name, result in results.items()}
        if not example.compare_results(pipeline, own_results, own_answers).within:
            return _DEPENDS
    return ""


def _neighbours(
    pipeline: CallablePipeline, inputs: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of items to run beside the example: its first item, scaled or without numbers, and its integers in another order."""
    scaled_names = {edge.name for edge in pipeline.inputs if edge.dtype in _SCALED_DTYPES}
    for factors in _NEIGHBOUR_FACTORS:
        first, last = (
            {
                array_name: array[:1] * factor if array_name in scaled_names else _reversed_elements(array[:1])
                for array_name, array in inputs.items()
            }
            for factor in factors
        )
        yield first, last


def _reversed_elements(array: Any) -> Any:
    """An array with its elements in reverse order."""
    elements = array.reshape(-1)
    return elements[list(reversed(range(len(elements))))].reshape(array.shape)


def _select_items(arrays: Mapping[str, Any], item_positions: Sequence[int]) -> dict[str, Any]:
    """Copies of arrays with these positions of the first dimension, in this order."""
    return {array_name: array[list(item_positions)] for array_name, array in arrays.items()}
