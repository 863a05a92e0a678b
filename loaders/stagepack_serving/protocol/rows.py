"""Whether rows of several requests may run as one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, symbol_names
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
        dim = edge.shape[0] if edge.shape and edge.dtype not in SCALAR_DTYPES else None
        if not isinstance(dim, str):
            return f"{edge.name} has no first dimension that varies"
        if first is not None and dim != first.name:
            return f"the first dimensions {first.name} and {dim} vary apart"
        first = symbols[dim]
    if first is None:
        return "nothing goes in or out"
    if any(first.name in symbol_names(dim) for edge in edges for dim in edge.shape[1:]):
        return f"{first.name} is not the first dimension alone"
    return first


def _why_rows_meet(pipeline: Pipeline, bundle: Bundle, most: int | None) -> str:
    """Run the example's rows among others, at most `most` in all, and alone: whether their answers stay; if not, the reason.

    A probe, not a proof: rows may meet on other inputs.
    """
    given = {} if bundle.example is None else example.read_example(pipeline, bundle)[0]
    rows = len(next(iter(given.values()), ()))
    if rows == 0:
        return "it has no example with rows, to see whether they keep apart"
    among = [rows - 1, *range(1, rows), 0, *range(rows)]
    whole = example.run_on_inputs(pipeline, given)
    for order in (among if most is None else among[-most:], [0]):
        first_is_zeros = rows == 1 and len(order) > 1  # there is no other row to put there
        try:
            found = example.run_on_inputs(pipeline, _rows(given, order, first_is_zeros=first_is_zeros))
        except InputError as error:
            return f"its example is refused with {len(order)} rows: {error}"
        start = int(first_is_zeros)
        parts = {name: result[start:] for name, result in found.items()}
        if not example.compare(pipeline, parts, _rows(whole, order[start:])).within:
            return "other rows change the answer to the example's"
    return ""


def _rows(arrays: Mapping[str, Any], order: Sequence[int], *, first_is_zeros: bool = False) -> dict[str, Any]:
    """Some rows of arrays, in this order; the first may be made zeros."""
    found = {name: array[list(order)] for name, array in arrays.items()}
    if first_is_zeros:
        for array in found.values():
            array[0] = 0
    return found
