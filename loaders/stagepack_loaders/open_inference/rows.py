"""Whether rows of several requests may run as one batch."""

from collections.abc import Sequence

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALARS
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, symbols_in
from stagepack_loaders import example
from stagepack_loaders.pipeline import Pipeline


def rows_at_once(bundle: Bundle, edges: Sequence[Edge], most: int, pipeline: Pipeline | None) -> tuple[int, str]:
    """How many rows of several requests may run at once, at most `most`, and why only those of one request may, if that is so.

    Args:
        bundle: what runs.
        edges: its values that are to be joined and split by their rows.
        most: what is asked for.
        pipeline: runs the example, to see that rows keep apart; None trusts that they do.
    """
    found = row_symbol(bundle, edges)
    if isinstance(found, str):
        return 1, found
    most = most if found.max is None else min(most, found.max)
    reason = "" if pipeline is None or most == 1 else _why_rows_meet(pipeline, bundle, found.max)
    return (1, reason) if reason else (most, "")


def row_symbol(bundle: Bundle, edges: Sequence[Edge]) -> Symbol | str:
    """The size that counts rows: the first dimension of all these edges and no other one; or why there is none."""
    if any(stage.state for stage in bundle.stages):
        return "it keeps state from call to call"
    symbols = {symbol.name: symbol for symbol in bundle.manifest.symbols}
    first: Symbol | None = None
    for edge in edges:
        dim = edge.shape[0] if edge.shape and edge.dtype not in SCALARS else None
        if not isinstance(dim, str):
            return f"{edge.name} has no first dimension that varies"
        if first is not None and dim != first.name:
            return f"the first dimensions {first.name} and {dim} vary apart"
        first = symbols[dim]
    if first is None:
        return "nothing goes in or out"
    if any(first.name in symbols_in(dim) for edge in edges for dim in edge.shape[1:]):
        return f"{first.name} is not the first dimension alone"
    return first


def _why_rows_meet(pipeline: Pipeline, bundle: Bundle, most: int | None) -> str:
    """Run the example among other rows, at most `most` in all: whether its rows have the same answers; if not, the reason.

    A row of zeros stands before it, and, if they may be so many, its own rows in another order. A probe, not a proof.
    """
    if bundle.example is None:
        return "it has no example to see whether rows keep apart"
    arrays = example.arrays_of(pipeline)
    given, _ = example.read_example(pipeline, bundle)
    rows = len(next(iter(given.values())))
    order = [*range(1, rows), 0, *range(rows)]
    order = order if most is None or len(order) < most else order[-rows:][: most - 1]
    alone = {name: arrays.rows(result, order) for name, result in example.call(pipeline, given).items()}
    try:
        among = example.call(
            pipeline, {name: arrays.after_zeros(arrays.rows(array, order)) for name, array in given.items()}
        )
    except InputError as error:
        return f"its example after a row of zeros is refused: {error}"
    found = {name: result[1:] for name, result in among.items()}
    return "" if example.compare(pipeline, found, alone).within else "other rows change the answer to the example's"
