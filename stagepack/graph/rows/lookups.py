"""Rules for operators that read and write by indices or masks, and for recurrent layers and norms."""

from typing import Final

from stagepack.graph.rows.alignment import broadcast_rows, leading, reduced_to_nothing, same_rows
from stagepack.graph.rows.call import NodeCall, Tracked
from stagepack.graph.rows.layout import BY_POSITION, INSIDE, ONE, PAIRS, SELECTS, UNKNOWN, Rows, RowsMeetError

_BY_VALUE: Final = "selects rows by values"
_OF_ALL: Final = "selects elements of all rows by their values"
_READS_SHARED: Final = "reads a shared value by the position of the row"


def embedding(call: NodeCall) -> Rows | None:
    """Rows of a table that all rows of the batch share."""
    call.need_shared("indices")
    return call.tensor("indices").rows


def embedding_bag(call: NodeCall) -> list[Rows | None]:
    """Sums of rows of a table, for bags that begin at offsets: each row of the batch is a bag of equal length."""
    call.need_shared("indices", "offsets", "per_sample_weights")
    indices, offsets = call.tensor("indices").rows, call.tensor("offsets").rows
    if indices is None and offsets is None:
        return [None] * len(call.outputs)
    weights = [value.rows for value in call.tensors("per_sample_weights")]
    if (
        indices is None
        or offsets is None
        or indices.before != ONE
        or offsets.step != indices.after
        or any(rows != indices for rows in weights)
    ):
        raise RowsMeetError(UNKNOWN)
    # The other results are numbers of bags and positions, which nothing but the backward pass uses.
    bag_numbers = [None if shape is None else call.points.uniform(shape) for shape in call.outputs[1:]]
    return [Rows(0), *[None if rows is None else rows._replace(step=ONE) for rows in bag_numbers]]


def _is_mask(value: Tracked | None) -> bool:
    return value is not None and value.dtype in ("bool", "uint8")


def _indexed(value: Tracked, indices: list[Tracked | None]) -> Rows | None:
    """The rows of ``value[indices]``; indices are integers."""
    used = {dim: index for dim, index in enumerate(indices) if index is not None}
    index_rank = max((index.rank for index in used.values()), default=0)
    dims = sorted(used)
    is_run = bool(dims) and dims == list(range(dims[0], dims[-1] + 1))
    place = dims[0] if is_run else 0
    rows = value.rows
    if any(index.rows and index.rows.step is not None for dim, index in used.items() if not rows or dim != rows.dim):
        raise RowsMeetError(_READS_SHARED)
    if rows is not None and rows.dim in used:
        # The numbers of the rows stand for the rows themselves.
        own = used[rows.dim].rows
        if own is None or own.step != ONE or (rows.before, rows.after) != (ONE, ONE):
            raise RowsMeetError(_BY_VALUE)
        plain = [index._replace(rows=index.rows and index.rows._replace(step=None)) for index in used.values()]
        index_rows = broadcast_rows(plain, index_rank)
        return index_rows and index_rows.at(place + index_rows.dim)
    index_rows = broadcast_rows(used.values(), index_rank)
    if rows is None:
        return index_rows and index_rows.at(place + index_rows.dim)
    if index_rows is not None:
        raise RowsMeetError(PAIRS)
    before = sum(dim < rows.dim for dim in used)
    return rows.at(rows.dim - before + (index_rank if not is_run or dims[0] < rows.dim else 0))


def index(call: NodeCall) -> Rows | None:
    """``value[indices]``."""
    value, indices = call.tensor("self"), call.optional_tensors("indices")
    if any(map(_is_mask, indices)):
        if value.rows is not None or any(item is not None and item.rows is not None for item in indices):
            raise RowsMeetError(_OF_ALL)
        return None
    return _indexed(value, indices)


def _target(call: NodeCall, *sources: Tracked | None) -> tuple[Tracked, Rows] | None:
    """The tensor that an operator writes into, and its rows; None if neither it nor what is written has rows."""
    target = call.tensor("self")
    if target.rows is not None:
        return target, target.rows
    if any(source is not None and source.rows is not None for source in sources):
        raise RowsMeetError("writes rows into a value that all rows share")
    return None


def index_put(call: NodeCall) -> Rows | None:
    """``target[indices] = values``."""
    new, indices = call.tensor("values"), call.optional_tensors("indices")
    if (written := _target(call, *indices, new)) is None:
        return None
    target, target_rows = written
    if any(map(_is_mask, indices)):
        return _put_by_mask(target, new, indices)
    rows = _indexed(target, indices)
    if rows is None:
        raise RowsMeetError(_BY_VALUE)
    used = [item for item in indices if item is not None]
    result_rank = target.rank - len(used) + max((item.rank for item in used), default=0)
    # The place of the values is aligned with the place of the elements that they replace.
    element = Tracked("", ((0,) * len(ONE),) * result_rank, rows)
    broadcast_rows([element, new], result_rank)
    return target_rows


def _put_by_mask(target: Tracked, new: Tracked, indices: list[Tracked | None]) -> Rows | None:
    """Elements are replaced where a mask says so, by a value that is the same for all of them."""
    masks = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    dim, mask = masks[0]
    if target.rows is None or len(masks) > 1 or new.rows is not None:
        raise RowsMeetError(_OF_ALL)
    is_aligned = mask.rows is not None and mask.rows.at(dim + mask.rows.dim) == target.rows
    is_beside = mask.rows is None and not dim <= target.rows.dim < dim + mask.rank
    if not is_aligned and not is_beside:
        raise RowsMeetError(_BY_VALUE)
    kept_rank = target.rank - mask.rank - dim
    if any(size != ONE for size in new.shape[: max(0, new.rank - kept_rank)]):
        raise RowsMeetError("writes values into elements of all rows in their order")
    return target.rows


def gather(call: NodeCall) -> Rows | None:
    """Elements by indices along a dimension, at the same place along the others."""
    value, indices = call.tensor("self"), call.tensor("index", "indices")
    dim = call.axis("dim", value.rank)
    if value.rows is None:
        if indices.rows is not None and indices.rows.dim != dim:
            raise RowsMeetError(_READS_SHARED)
        return indices.rows
    if value.rows.dim == dim:
        raise RowsMeetError(_BY_VALUE)
    if indices.rows != value.rows:
        raise RowsMeetError(BY_POSITION)
    return value.rows


def scatter(call: NodeCall) -> Rows | None:
    """Elements are written by indices along a dimension, at the same place along the others."""
    indices, sources = call.tensor("index"), call.tensors("src")
    if (written := _target(call, indices, *sources)) is None:
        return None
    target, rows = written
    if rows.dim == call.axis("dim", target.rank):
        raise RowsMeetError(_BY_VALUE)
    if any(source.rows != rows for source in (indices, *sources)):
        raise RowsMeetError(BY_POSITION)
    return rows


def index_select(call: NodeCall) -> Rows | None:
    """Positions along a dimension."""
    value, indices = call.tensor("self"), call.tensor("index")
    return _indexed(value, [*[None] * call.axis("dim", value.rank), indices])


def index_write(call: NodeCall) -> Rows | None:
    """Positions along a dimension are added to, copied or filled."""
    indices, sources = call.tensor("index"), call.tensors("source", "value")
    if (written := _target(call, indices, *sources)) is None:
        return None
    target, rows = written
    if indices.rows is not None or rows.dim == call.axis("dim", target.rank):
        raise RowsMeetError(_BY_VALUE)
    if any(value.rank and value.rows != rows for value in sources):
        raise RowsMeetError(BY_POSITION)
    return rows


def select_scatter(call: NodeCall) -> Rows | None:
    """A copy in which one position along a dimension, or a part of it, is replaced."""
    new = call.tensor("src")
    if (written := _target(call, new)) is None:
        return None
    target, rows = written
    dim = call.axis("dim", target.rank)
    if rows.dim == dim and new.shape != target.shape:
        raise RowsMeetError(SELECTS)
    removed = new.rank < target.rank and dim < rows.dim
    if new.rows != rows.at(rows.dim - removed):
        raise RowsMeetError(BY_POSITION)
    return rows


def classification_loss(call: NodeCall) -> Rows | None:
    """A loss of classes in dimension 1; with a reduction it is one number of all rows."""
    if call.option("reduction") != 0:
        return reduced_to_nothing(call)
    return leading("self", "target")(call)


def recurrent(call: NodeCall) -> list[Rows | None]:
    """LSTM, GRU and RNN over a batch of sequences, with a state whose dimension 1 is the batch."""
    data, states = call.tensor("input"), call.tensors("hx")
    call.need_shared("input", "hx")
    placed = [value.rows for value in (data, *states) if value.rows is not None]
    if not placed:
        return [None] * len(call.outputs)
    batch_dim = 0 if call.option("batch_first") else 1
    if data.rank != 3 or data.rows is None or data.rows.dim != batch_dim or len(placed) < 1 + len(states):
        raise RowsMeetError(INSIDE)
    rows = same_rows([rows if rows is data.rows else rows.at(rows.dim - 1 + batch_dim) for rows in placed])
    return [rows, *[rows.at(1)] * (len(call.outputs) - 1)]


def batch_norm(call: NodeCall) -> list[Rows | None]:
    """Batch norm by running statistics; by the statistics of the batch, it is computed from all rows."""
    data = call.tensor("input")
    call.need_shared("input")
    nothing: list[Rows | None] = [None] * len(call.outputs)
    if data.rows is None:
        return nothing
    if call.option("training") or call.overload == "no_stats" or data.rows.dim == 1:
        raise RowsMeetError("computes its statistics from all rows")
    return [data.rows, *nothing[1:]]


def batch_statistics(call: NodeCall) -> list[Rows | None]:
    """Batch norm by whatever statistics; all rows may meet in them."""
    rows = call.tensor("input").rows
    if rows is not None and rows.dim != 0:
        return batch_norm(call)
    return [rows, *[None] * (len(call.outputs) - 1)]


def instance_norm(call: NodeCall) -> Rows | None:
    """Instance norm: the statistics of each item, or running statistics."""
    if call.option("use_input_stats") and call.tensors("running_mean") and call.tensor("input").rows is not None:
        raise RowsMeetError("writes statistics of all rows")
    return leading("input")(call)


def one_hot(call: NodeCall) -> Rows | None:
    """A new last dimension, as large as stated or as the largest number of all rows."""
    value = call.tensor("self")
    if value.rows is not None and call.option("num_classes") == -1:
        raise RowsMeetError(INSIDE)
    return value.rows


def first_only(call: NodeCall) -> Rows | None:
    """The first tensor is compared, element by element, with others that all rows share."""
    call.need_shared("self", "elements", "input")
    return call.tensor("self", "elements", "input").rows


def cosine_similarity(call: NodeCall) -> Rows | None:
    """Two tensors are broadcast, and a dimension of both is summed over."""
    left, right = call.tensor("x1"), call.tensor("x2")
    rank = max(left.rank, right.rank)
    rows, dim = broadcast_rows([left, right], rank), call.axis("dim", rank)
    if rows is None:
        return None
    if rows.dim == dim:
        raise RowsMeetError(INSIDE)
    return rows.at(rows.dim - (dim < rows.dim))


def crossed(call: NodeCall) -> Rows | None:
    """The cross product of vectors along a dimension."""
    rows = broadcast_rows([call.tensor("self"), call.tensor("other")], len(call.shape))
    if rows is not None and (call.numbers("dim") is None or rows.dim == call.axis("dim", len(call.shape))):
        raise RowsMeetError(INSIDE)
    return rows
