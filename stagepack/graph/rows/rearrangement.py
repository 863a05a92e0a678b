"""Rules for operators that move, copy, join, cut or reduce dimensions."""

from collections.abc import Callable
from typing import Final

from stagepack.graph.rows.alignment import Rule, broadcast_rows, same_rows
from stagepack.graph.rows.call import NodeCall, Tracked
from stagepack.graph.rows.layout import (
    ONE,
    Rows,
    RowsMeetError,
    Shape,
    Size,
    counts_rows,
    exact_quotient,
    is_multiple,
    product,
    reshaped_rows,
    total_size,
)

_SELECTS: Final = "selects some of the rows"
_UNKNOWN: Final = "is not known to keep rows apart"
ZERO: Final[Size] = (0,) * len(ONE)


def main_tensor(call: NodeCall) -> Tracked:
    """The tensor that an operator rearranges."""
    return call.tensor("self", "input")


def row_major(call: NodeCall) -> Rows | None:
    """The elements stay in row-major order."""
    value = main_tensor(call)
    return None if value.rows is None else reshaped_rows(value.rows, value.shape, call.shape)


def retyped(call: NodeCall) -> Rows | None:
    """``view(dtype)`` and the like change the last dimension, or add or remove one behind it."""
    value = main_tensor(call)
    if value.rows is not None and value.rows.dim >= len(call.shape) - (len(call.shape) >= value.rank):
        return row_major(call)
    return value.rows


def like(call: NodeCall) -> Rows | None:
    """A new tensor of equal elements: the rows are where those of the argument are, if it has this shape."""
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

    def rule(call: NodeCall) -> Rows | None:
        value = main_tensor(call)
        if value.rows is None:
            return None
        return value.rows.at(order(call, value.rank).index(value.rows.dim))

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
        raise RowsMeetError(_SELECTS)
    return value.rows._replace(dim=dim, before=product((times, value.rows.before)))


def interleaved(call: NodeCall) -> Rows | None:
    """Each element is repeated along a dimension."""
    value = main_tensor(call)
    if call.overload != "self_int" or call.numbers("dim") is None:
        raise RowsMeetError(_UNKNOWN)
    dim = call.axis("dim", value.rank)
    times = exact_quotient(call.shape[dim], value.shape[dim])
    if value.rows is None and not any(map(counts_rows, call.shape)):
        return None
    if times is None or (value.rows is None) != counts_rows(times):
        raise RowsMeetError(_UNKNOWN)
    if value.rows is None:
        after = exact_quotient(times, call.points.rows)
        if after is None:
            raise RowsMeetError(_UNKNOWN)
        return Rows(dim, value.shape[dim], after)
    return value.rows if value.rows.dim != dim else value.rows._replace(after=product((value.rows.after, times)))


def selected(call: NodeCall) -> Rows | None:
    """One position along a dimension is taken, or each as a result of its own."""
    value = main_tensor(call)
    if value.rows is None:
        return None
    dim = call.axis("dim", value.rank)
    if dim == value.rows.dim:
        raise RowsMeetError(_SELECTS)
    return value.rows.at(value.rows.dim - (dim < value.rows.dim))


def diagonal(call: NodeCall) -> Rows | None:
    """Two dimensions become one behind the other_dims."""
    value = main_tensor(call)
    if value.rows is None:
        return None
    dims = {call.axis("dim1", value.rank), call.axis("dim2", value.rank)}
    if value.rows.dim in dims:
        raise RowsMeetError(_SELECTS)
    return value.rows.at(value.rows.dim - sum(dim < value.rows.dim for dim in dims))


def _part(call: NodeCall, value: Tracked, dim: int, start: Size, size: Size) -> Rows | None:
    """The rows of a part of a tensor along a dimension: all positions of the rows, or whole repetitions of all rows."""
    rows = value.rows
    if rows is None or rows.dim != dim or size == value.shape[dim]:
        return rows
    block = product((call.points.rows, rows.after))
    before = exact_quotient(size, block)
    if before is None or not is_multiple(start, block):
        raise RowsMeetError(_SELECTS)
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
        raise RowsMeetError(_SELECTS)
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
                raise RowsMeetError(_SELECTS)
            parts.append(None)
            continue
        parts.append(_part(call, value, dim, start, shape[dim]))
        start = total_size([start, shape[dim]])
    return parts


def joined(call: NodeCall) -> Rows | None:
    """``cat``: along the rows only if each part has all of them."""
    result_shape = call.shape
    values = [value for value in call.tensors("tensors") if value.rank == len(result_shape)]
    dim = call.axis("dim", len(result_shape))
    return _joined(values, dim, result_shape)


def joined_along(dim: int) -> Rule:
    """``hstack`` and ``vstack`` of tensors that have the dimension."""

    def rule(call: NodeCall) -> Rows | None:
        values = call.tensors("tensors")
        if any(value.rank <= dim or value.rank < 2 for value in values):
            raise RowsMeetError(_UNKNOWN)
        return _joined(values, dim, call.shape)

    return rule


def _joined(values: list[Tracked], dim: int, result_shape: Shape) -> Rows | None:
    placed = [value.rows for value in values if value.rows is not None]
    if not placed:
        return None
    if placed[0].dim != dim:
        return broadcast_rows(values, len(result_shape))
    if len(placed) < len(values):
        raise RowsMeetError("adds other items to the rows")
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
        raise RowsMeetError("computes one result from several rows")
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
        raise RowsMeetError("computes along the rows")
    return rows


def padded(call: NodeCall) -> Rows | None:
    """Elements are added at the ends of the last dimensions."""
    value = main_tensor(call)
    amounts = call.numbers("pad" if call.has_parameter("pad") else "padding") or []
    if value.rows is not None:
        position = 2 * (value.rank - 1 - value.rows.dim)
        if any(amount != ZERO for amount in amounts[position : position + 2]):
            raise RowsMeetError("adds other items to the rows")
    return value.rows


def meshed(call: NodeCall) -> list[Rows | None]:
    """``meshgrid``: each tensor along a dimension of its own."""
    values = call.tensors("tensors")
    placed = [(position, value.rows) for position, value in enumerate(values) if value.rows is not None]
    if len(placed) > 1:
        raise RowsMeetError("combines each row with other rows")
    if not placed:
        return [None] * len(call.outputs)
    position, rows = placed[0]
    swapped = {0: 1, 1: 0} if call.option("indexing") == "xy" else {}
    rows = rows.at(swapped.get(position, position))
    return [rows if output == position else rows._replace(step=None) for output in range(len(call.outputs))]
