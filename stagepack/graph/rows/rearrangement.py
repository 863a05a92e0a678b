"""Rules for operators that move, copy, join, cut or reduce dimensions."""

import functools
from collections.abc import Callable
from typing import Final

from stagepack.graph.rows.alignment import Rule, SharedRule, broadcast_rows, same_rows
from stagepack.graph.rows.call import NodeCall, Tracked
from stagepack.graph.rows.layout import (
    ADDS,
    ALONG,
    INSIDE,
    ONE,
    PAIRS,
    SELECTS,
    UNKNOWN,
    Rows,
    RowsMeetError,
    Size,
    counts_rows,
    exact_quotient,
    is_multiple,
    product,
    reshaped_rows,
    total_size,
)

ZERO: Final[Size] = (0,) * len(ONE)


def main_tensor(call: NodeCall) -> Tracked:
    """The tensor that an operator rearranges."""
    return call.tensor("self", "input")


def of_rows(rule: Callable[[NodeCall, Tracked, Rows], Rows | None]) -> SharedRule:
    """The rule for a tensor that has rows; a result of another one has none."""

    @functools.wraps(rule)
    def rule_or_none(call: NodeCall) -> Rows | None:
        value = main_tensor(call)
        return None if value.rows is None else rule(call, value, value.rows)

    return rule_or_none


@of_rows
def row_major(call: NodeCall, value: Tracked, rows: Rows) -> Rows | None:
    """The elements stay in row-major order."""
    return reshaped_rows(rows, value.shape, call.shape)


@of_rows
def retyped(call: NodeCall, value: Tracked, rows: Rows) -> Rows | None:
    """``view(dtype)`` and the like change the last dimension, or add or remove one behind it."""
    is_last = rows.dim >= len(call.shape) - (len(call.shape) >= value.rank)
    return reshaped_rows(rows, value.shape, call.shape) if is_last else rows


def like(call: NodeCall) -> Rows | None:
    """A new tensor of equal elements: the rows are in the dimension of the argument's rows, if the result has the argument's shape."""
    for _, value in call.all_tensors():
        if value.shape == call.shape and value.rows is not None:
            return value.rows._replace(step=None)
    return call.points.uniform(call.shape)


def numbered(call: NodeCall) -> Rows | None:
    """``arange``: a number for each row."""
    rows = call.points.uniform(call.shape)
    if rows is None:
        return None
    start = (call.numbers("start") or [ZERO])[0] if call.has_parameter("start") else ZERO
    step = (call.numbers("step") or [ONE])[0] if call.has_parameter("step") else ONE
    if start != ZERO or rows.after != ONE:
        raise RowsMeetError("numbers the rows")
    return rows._replace(step=step)


def permuted(order: Callable[[NodeCall, int], list[int]]) -> Rule:
    """The dimensions change their order; `order` returns the old dimension of each new one."""

    @of_rows
    def rule(call: NodeCall, value: Tracked, rows: Rows) -> Rows | None:
        return rows.at(order(call, value.rank).index(rows.dim))

    return rule


def permutation(call: NodeCall, rank: int) -> list[int]:
    """The order of ``permute``."""
    return call.axes("dims", rank)


def exchange(first: str, second: str) -> Callable[[NodeCall, int], list[int]]:
    """The order after two dimensions change places."""

    def order(call: NodeCall, rank: int) -> list[int]:
        dims = list(range(rank))
        left, right = call.axis(first, rank), call.axis(second, rank)
        dims[left], dims[right] = dims[right], dims[left]
        return dims

    return order


def exchange_last(_: NodeCall, rank: int) -> list[int]:
    """The order after the last two dimensions change places."""
    return [*range(rank)] if rank < 2 else [*range(rank - 2), rank - 1, rank - 2]


def reversal(_: NodeCall, rank: int) -> list[int]:
    """All dimensions in reverse."""
    return [*reversed(range(rank))]


def moved(call: NodeCall, rank: int) -> list[int]:
    """The order of ``movedim``."""
    sources, targets = call.axes("source", rank), call.axes("destination", rank)
    order: list[int | None] = [None] * rank
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    other_dims = iter(dim for dim in range(rank) if dim not in sources)
    return [next(other_dims) if dim is None else dim for dim in order]


def expanded(call: NodeCall) -> Rows | None:
    """Dimensions of size 1, or new ones in front, are repeated."""
    return _expanded(call, main_tensor(call))


def _expanded(call: NodeCall, value: Tracked) -> Rows | None:
    if value.rows is None:
        return call.points.uniform(call.shape)
    return value.rows.at(len(call.shape) - value.rank + value.rows.dim)


def broadcast_list(call: NodeCall) -> list[Rows | None]:
    """``broadcast_tensors``: each tensor is expanded to the shape of the result."""
    return [_expanded(call, value) for value in call.tensors("tensors")]


def repeated(call: NodeCall) -> Rows | None:
    """The whole tensor is repeated along each dimension."""
    value = main_tensor(call)
    if value.rows is None:
        return call.points.uniform(call.shape)
    dim = len(call.shape) - value.rank + value.rows.dim
    times = exact_quotient(call.shape[dim], value.shape[value.rows.dim])
    if times is None:
        raise RowsMeetError(SELECTS)
    return value.rows._replace(dim=dim, before=product((times, value.rows.before)))


def interleaved(call: NodeCall) -> Rows | None:
    """Each element is repeated along a dimension."""
    value = main_tensor(call)
    if call.overload != "self_int" or call.numbers("dim") is None:
        raise RowsMeetError(UNKNOWN)
    dim = call.axis("dim", value.rank)
    times = exact_quotient(call.shape[dim], value.shape[dim])
    if value.rows is None and not any(map(counts_rows, call.shape)):
        return None
    if times is None or (value.rows is None) != counts_rows(times):
        raise RowsMeetError(UNKNOWN)
    if value.rows is None:
        after = exact_quotient(times, call.points.rows)
        if after is None:
            raise RowsMeetError(UNKNOWN)
        return Rows(dim, value.shape[dim], after)
    return value.rows if value.rows.dim != dim else value.rows._replace(after=product((value.rows.after, times)))


@of_rows
def selected(call: NodeCall, value: Tracked, rows: Rows) -> Rows | None:
    """One position along a dimension is taken, or each as a result of its own."""
    dim = call.axis("dim", value.rank)
    if dim == rows.dim:
        raise RowsMeetError(SELECTS)
    return rows.at(rows.dim - (dim < rows.dim))


@of_rows
def diagonal(call: NodeCall, value: Tracked, rows: Rows) -> Rows | None:
    """Two dimensions become one behind the others."""
    dims = {call.axis("dim1", value.rank), call.axis("dim2", value.rank)}
    if rows.dim in dims:
        raise RowsMeetError(SELECTS)
    return rows.at(rows.dim - sum(dim < rows.dim for dim in dims))


def _part(call: NodeCall, value: Tracked, dim: int, start: Size, size: Size) -> Rows | None:
    """The rows of a part of a tensor along a dimension: all positions of the rows, or whole repetitions of all rows."""
    rows = value.rows
    if rows is None or rows.dim != dim or size == value.shape[dim]:
        return rows
    block = product((call.points.rows, rows.after))
    before = exact_quotient(size, block)
    if before is None or not is_multiple(start, block):
        raise RowsMeetError(SELECTS)
    return rows._replace(before=before)


def sliced(call: NodeCall) -> Rows | None:
    """``slice`` and ``narrow``."""
    value = main_tensor(call)
    dim = call.axis("dim", value.rank)
    start = (call.numbers("start") or [ZERO])[0] if value.rows is not None or call.counts_rows("start") else ZERO
    if value.rows is None or value.rows.dim != dim:
        if counts_rows(start):
            raise RowsMeetError("computes with the number of rows")
        return value.rows
    if call.has_parameter("step") and call.numbers("step") not in (None, [ONE]):
        raise RowsMeetError(SELECTS)
    length = value.shape[dim]
    start = tuple([first + size if first < 0 else first for first, size in zip(start, length, strict=True)])
    return _part(call, value, dim, start, call.shape[dim])


def split(call: NodeCall) -> list[Rows | None]:
    """Consecutive parts along a dimension."""
    value = main_tensor(call)
    dim = call.axis("dim", value.rank)
    parts: list[Rows | None] = []
    start = ZERO
    for shape in call.outputs:
        if shape is None:  # an unused part, whose size is not known
            if value.rows is not None and value.rows.dim == dim:
                raise RowsMeetError(SELECTS)
            parts.append(None)
            continue
        parts.append(_part(call, value, dim, start, shape[dim]))
        start = total_size([start, shape[dim]])
    return parts


def joined(call: NodeCall) -> Rows | None:
    """``cat``: along the rows only if each part has all of them."""
    rank = len(call.shape)
    values = [value for value in call.tensors("tensors") if value.rank == rank]
    return _joined(values, call.axis("dim", rank), rank)


def joined_along(dim: int) -> Rule:
    """``hstack`` and ``vstack`` of tensors that have the dimension."""

    def rule(call: NodeCall) -> Rows | None:
        values = call.tensors("tensors")
        if any(value.rank <= dim or value.rank < 2 for value in values):
            raise RowsMeetError(UNKNOWN)
        return _joined(values, dim, len(call.shape))

    return rule


def _joined(values: list[Tracked], dim: int, rank: int) -> Rows | None:
    placed = [value.rows for value in values if value.rows is not None]
    if not placed:
        return None
    if placed[0].dim != dim:
        return broadcast_rows(values, rank)
    if len(placed) < len(values):
        raise RowsMeetError(ADDS)
    rows = same_rows([rows._replace(before=ONE) for rows in placed])
    return rows._replace(before=total_size([rows.before for rows in placed]))


def stacked(call: NodeCall) -> Rows | None:
    """A new dimension for the list of tensors."""
    rows = broadcast_rows(call.tensors("tensors"), len(call.shape) - 1)
    if rows is None:
        return None
    return rows.at(rows.dim + (call.axis("dim", len(call.shape)) <= rows.dim))


def reduced(call: NodeCall) -> Rows | None:
    """Dimensions are reduced to one result; all if none is named."""
    value = main_tensor(call)
    call.need_shared("self", "input")
    if value.rows is None:
        return None
    dims = call.axes("dim", value.rank) if call.has_parameter("dim") else list(range(value.rank))
    if value.rows.dim in dims:
        raise RowsMeetError(INSIDE)
    return value.rows.at(value.rows.dim - (0 if call.option("keepdim") else sum(dim < value.rows.dim for dim in dims)))


def along(*parameters: str, reason: str) -> Rule:
    """Some dimensions are computed together, and the shape stays, but for their sizes and dimensions behind them."""

    def rule(call: NodeCall) -> Rows | None:
        value = main_tensor(call)
        call.need_shared("self", "input")
        if value.rows is None:
            return None
        parameter = next((option for option in parameters if call.has_parameter(option)), None)
        if parameter is None or value.rows.dim in call.axes(parameter, value.rank):
            raise RowsMeetError(reason)
        return value.rows

    return rule


def differences(call: NodeCall) -> Rows | None:
    """``diff`` along a dimension, with values that are put before and after it."""
    rows = broadcast_rows((value for _, value in call.all_tensors()), len(call.shape))
    if rows is not None and rows.dim == call.axis("dim", len(call.shape)):
        raise RowsMeetError(ALONG)
    return rows


@of_rows
def padded(call: NodeCall, value: Tracked, rows: Rows) -> Rows | None:
    """Elements are added at the ends of the last dimensions."""
    amounts = call.numbers("pad" if call.has_parameter("pad") else "padding") or []
    position = 2 * (value.rank - 1 - rows.dim)
    if any(amount != ZERO for amount in amounts[position : position + 2]):
        raise RowsMeetError(ADDS)
    return rows


def meshed(call: NodeCall) -> list[Rows | None]:
    """``meshgrid``: each tensor along a dimension of its own."""
    values = call.tensors("tensors")
    placed = [(position, value.rows) for position, value in enumerate(values) if value.rows is not None]
    if len(placed) > 1:
        raise RowsMeetError(PAIRS)
    if not placed:
        return [None] * len(call.outputs)
    position, rows = placed[0]
    swapped = {0: 1, 1: 0} if call.option("indexing") == "xy" else {}
    rows = rows.at(swapped.get(position, position))
    return [rows if output == position else rows._replace(step=None) for output in range(len(call.outputs))]
