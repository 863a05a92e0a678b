"""Whether requests may be batched: concatenated along their first dimension, run once, and split again."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, format_guard, symbol_names
from stagepack_loaders import example
from stagepack_loaders.callable_pipeline import CallablePipeline


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

    Requests may be joined if the edges share one batch dimension (see `batch_dimension`) and the answer to the recorded example does
    not depend on the rest of the batch. The test runs the example only, so it is evidence, not a proof.

    Args:
        bundle: the bundle to run.
        edges: the edges whose values are joined and split.
        requested_size: the batch size that the operator allows.
        pipeline: runs the example; with None the test is left out, and the batch dimension alone decides.

    Returns:
        The smaller of `requested_size` and the largest batch size of the bundle; 1 with a reason if requests must not be joined.
    """
    dimension = batch_dimension(bundle, edges)
    if isinstance(dimension, str):
        return BatchLimit(1, dimension)
    max_batch_size = requested_size if dimension.max is None else min(requested_size, dimension.max)
    if pipeline is None or max_batch_size == 1:
        return BatchLimit(max_batch_size, "")
    with pipeline.without_limit():  # which is for the sizes of each request
        reason = _find_dependence(pipeline, bundle, dimension.max)
    return BatchLimit(1, reason) if reason else BatchLimit(max_batch_size, "")


def batch_dimension(bundle: Bundle, edges: Sequence[Edge]) -> Symbol | str:
    """Find the symbol that is the first dimension of all edges, and no later dimension of any.

    Args:
        bundle: the bundle.
        edges: edges of the bundle.

    Returns:
        The symbol; or, as a string, the reason why there is none.
    """
    if any(stage.state for stage in bundle.stages):
        return "the model keeps state between calls"
    symbols = {symbol.name: symbol for symbol in bundle.entry_point.symbols}
    batch_symbol: Symbol | None = None
    for edge in edges:
        dim = edge.shape[0] if edge.shape and edge.dtype not in SCALAR_DTYPES else None
        if not isinstance(dim, str):
            return f"{edge.name} has no dynamic first dimension"
        if batch_symbol is not None and dim != batch_symbol.name:
            return f"the first dimensions {batch_symbol.name} and {dim} are different"
        batch_symbol = symbols[dim]
    if batch_symbol is None:
        return "the model has no inputs and outputs"
    if any(batch_symbol.name in symbol_names(dim) for edge in edges for dim in edge.shape[1:]):
        return f"{batch_symbol.name} is a later dimension too"
    for guard in bundle.entry_point.guards:
        if batch_symbol.name in {*symbol_names(guard.left), *symbol_names(guard.right)}:
            return f"the model was captured for {format_guard(guard)}"
    return batch_symbol


def _find_dependence(pipeline: CallablePipeline, bundle: Bundle, max_batch_size: int | None) -> str:
    """Run the recorded example inside a larger batch and alone. Return why requests must not be joined; empty if nothing was seen.

    The larger batch holds the items of the example in another order and then in their own; an example of one item is preceded by zeros.
    """
    inputs = {} if bundle.example is None else example.read_example(pipeline, bundle)[0]
    example_size = len(next(iter(inputs.values()), ()))
    if example_size == 0:
        return "the bundle has no recorded example to test batches with"
    batch_items = [example_size - 1, *range(1, example_size), 0, *range(example_size)]
    if max_batch_size is not None:
        batch_items = batch_items[-max_batch_size:]
    expected = example.run_on_inputs(pipeline, inputs)
    for item_positions in (batch_items, [0]):
        starts_with_zeros = example_size == 1 and len(item_positions) > 1
        batch = _select_items(inputs, item_positions)
        if starts_with_zeros:
            for array in batch.values():
                array[0] = 0
        try:
            results = example.run_on_inputs(pipeline, batch)
        except InputError as error:
            return f"the recorded example is refused at batch size {len(item_positions)}: {error}"
        start = int(starts_with_zeros)
        answers = {output_name: result[start:] for output_name, result in results.items()}
        if not example.compare_results(pipeline, answers, _select_items(expected, item_positions[start:])).within:
            return "the answer to the recorded example depends on the rest of its batch"
    return ""


def _select_items(arrays: Mapping[str, Any], item_positions: Sequence[int]) -> dict[str, Any]:
    """Copies of arrays with these positions of the first dimension, in this order."""
    return {array_name: array[list(item_positions)] for array_name, array in arrays.items()}
