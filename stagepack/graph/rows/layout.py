"""Where the rows of a batch are in a tensor.

A dimension that holds the rows has ``before * rows * after`` positions in row-major order: the batch may be merged with dimensions before
and after it, as in ``[batch, seq, d] -> [batch*seq, d]``. Sizes are compared by their values at some points: large numbers in the place of
the symbols. Two expressions that are equal at all of them are equal, however torch has written them.
"""

import functools
import operator
import random
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from stagepack.format.shapes import Dim, evaluate_dim

# A size at each of the points.
Size = tuple[int, ...]
Shape = tuple[Size, ...]

# Primes, larger than the random factor of the other symbols: no other size is a multiple of them. Neighbours have the other symbols equal.
_ROW_COUNTS: Final = (10_007, 10_009, 10_037, 10_039)
# Sizes that models divide by 2 to 8 a few times stay whole numbers, as their guards demand.
_COMMON_MULTIPLE: Final = 3360
_FACTORS: Final = range(11, 997, 2)

ONE: Final[Size] = (1,) * len(_ROW_COUNTS)


# How rows meet, as what an operator does.
PAIRS: Final = "combines each row with other rows"
BY_POSITION: Final = "combines rows with other values by their position in the batch"
INSIDE: Final = "computes one result from several rows"
ALONG: Final = "computes along the rows"
SELECTS: Final = "selects some of the rows"
ADDS: Final = "adds other items to the rows"
UNKNOWN: Final = "is not known to keep rows apart"


class RowsMeetError(Exception):
    """Rows of a batch meet; the text says how, as what an operator does."""


class Rows(NamedTuple):
    """The rows of a batch in a tensor."""

    dim: int  # the dimension that holds them
    # How many times the rows are repeated or interrupted: the product of the dimensions that are merged in front of the rows.
    before: Size = ONE
    # The positions of each row in this dimension: the product of the dimensions that are merged behind the rows.
    after: Size = ONE
    # Each element is the number of its row times this, as ``arange`` makes them; None for elements of the row.
    step: Size | None = None

    @property
    def is_consecutive(self) -> bool:
        """Whether each row is in one piece, so that tensors of some rows and of the next ones can be concatenated."""
        return self.before == ONE

    def at(self, dim: int) -> "Rows":
        """The same rows in another dimension."""
        return self._replace(dim=dim)


class SizePoints:
    """The values of sizes at the points."""

    def __init__(self, symbol_names: Iterable[str], row_dim: Dim) -> None:
        choice = random.Random(0)  # noqa: S311 - no secret
        pairs = {
            symbol_name: [_COMMON_MULTIPLE * choice.choice(_FACTORS) for _ in range(2)] for symbol_name in symbol_names
        }
        self._points = [
            {symbol_name: values[point // 2] for symbol_name, values in pairs.items()}
            for point in range(len(_ROW_COUNTS))
        ]
        if isinstance(row_dim, str):
            for point, row_count in zip(self._points, _ROW_COUNTS, strict=True):
                point[row_dim] = row_count
        self._sizes: dict[Dim, Size] = {}
        self.rows = self.size(row_dim)

    def size(self, dim: Dim) -> Size:
        """The value of a dimension at each point."""
        values_at_points = self._sizes.get(dim)
        if values_at_points is None:
            try:
                values_at_points = tuple([evaluate_dim(dim, point) for point in self._points])
            except (KeyError, ArithmeticError):
                raise RowsMeetError("has a size that cannot be compared") from None
            self._sizes[dim] = values_at_points
        return values_at_points

    def shape(self, dims: Sequence[Dim]) -> Shape:
        """The values of all dimensions of a shape."""
        return tuple([self.size(dim) for dim in dims])

    def uniform(self, shape: Shape) -> Rows | None:
        """The rows of a tensor that is equal in all rows: the dimension whose size depends on the number of rows."""
        dims = [dim for dim, size in enumerate(shape) if counts_rows(size)]
        if not dims:
            return None
        after = exact_quotient(shape[dims[0]], self.rows)
        if len(dims) > 1 or after is None:
            raise RowsMeetError("makes a value whose size is not that of the rows")
        return Rows(dims[0], ONE, after)


def counts_rows(size: Size) -> bool:
    """Whether a size depends on the number of rows."""
    return any(size[point] != size[point + 1] for point in range(0, len(size), 2))


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes at each point."""
    return functools.reduce(_times, sizes, ONE)


def _times(left: Size, right: Size) -> Size:
    return tuple(map(operator.mul, left, right))


def exact_quotient(size: Size, divisor: Size) -> Size | None:
    """The quotient at each point; None if it is no whole number at one."""
    if any(part == 0 or whole % part for whole, part in zip(size, divisor, strict=True)):
        return None
    return tuple(map(operator.floordiv, size, divisor))


def reshaped_rows(rows: Rows, shape: Shape, new_shape: Shape) -> Rows:
    """The rows after a change of shape that keeps the row-major order of elements."""
    if shape == new_shape:
        return rows
    outer = product((*shape[: rows.dim], rows.before))
    inner = product((rows.after, *shape[rows.dim + 1 :]))
    total = product(new_shape[1:])
    passed = ONE
    for dim, size in enumerate(new_shape):
        before, after = exact_quotient(outer, passed), exact_quotient(inner, total)
        # A row of one position fits beside dimensions of size 1 at several places, of which the largest dimension is the right one.
        if before is not None and after is not None and size != ONE:
            return Rows(dim, before, after, rows.step)
        passed = _times(passed, size)
        total = product(new_shape[dim + 2 :])
    raise RowsMeetError("moves parts of rows to other rows")


def is_multiple(size: Size, divisor: Size) -> bool:
    """Whether a size is a multiple of another at each point; 0 is."""
    return exact_quotient(size, divisor) is not None


def total_size(sizes: Iterable[Size]) -> Size:
    """The sum of sizes at each point."""
    return tuple(map(sum, zip(*sizes, strict=True)))
