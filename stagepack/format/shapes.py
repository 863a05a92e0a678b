"""Dimensions of shapes: integers, symbols, arithmetic over symbols, and conditions on them (SPEC S1 to S4)."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from stagepack.format import limits
from stagepack.format.limits import Int64


class Symbol(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A size that the caller chooses within a range.

    Attributes:
        name: the name that dimensions use.
        min: the smallest size; None for no lower bound.
        max: the largest size; None for no upper bound.
        example: the size in the example, at which costs are given; None for a size that depends on the data.
    """

    name: str
    min: Int64 | None = None
    max: Int64 | None = None
    example: Int64 | None = None


class Guard(Struct, frozen=True, kw_only=True):
    """A condition on sizes that the graph was captured for.

    Attributes:
        left: the dimension on the left side.
        relation: how they must compare, a key of `RELATIONS`.
        right: the dimension on the right side.
    """

    left: "Dim"
    relation: str
    right: "Dim"


class Expr(Struct, frozen=True, kw_only=True, gc=False):
    """Arithmetic on dimensions.

    Attributes:
        op: the operation, a key of `OPERATIONS`.
        args: the operands.
    """

    op: str
    args: tuple["Dim", ...]


# A dimension of a shape: an integer, the name of a symbol, or an expression.
Dim = Int64 | str | Expr


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor are side by side in memory, in whatever order of the dimensions (SPEC G9)."""
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != reach:
            return 0 in shape
        reach *= size
    return True


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch has them."""
    reaches = itertools.accumulate((max(1, size) for size in reversed(shape)), operator.mul, initial=1)
    return tuple(itertools.islice(reaches, len(shape)))[::-1]


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor have the memory order of a contiguous tensor. A dimension of size 1 may have any stride."""
    expected = zip(shape, strides, row_major_strides(shape), strict=True)
    return 0 in shape or all(size == 1 or stride == row_major for size, stride, row_major in expected)


def _bounded(size: int) -> int:
    """Return the size itself, or raise OverflowError: a hostile expression must not compute with numbers of any length."""
    if abs(size) > limits.TENSOR_ELEMENTS:
        raise OverflowError(f"expected a size of at most {limits.TENSOR_ELEMENTS}")
    return size


def _sum(*terms: int) -> int:
    return _bounded(sum(terms))


def _product(*factors: int) -> int:
    return functools.reduce(lambda product, factor: _bounded(product * factor), factors, 1)


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= _MAX_EXPONENT:
        raise OverflowError(f"expected an exponent from 0 to {_MAX_EXPONENT}, found {exponent}")
    return _bounded(_bounded(base) ** exponent)


OPERATIONS: Final[Mapping[str, Callable[..., int]]] = MappingProxyType(
    {
        "add": _sum,
        "mul": _product,
        "floordiv": operator.floordiv,
        "mod": operator.mod,
        "pow": _power,
        "max": max,
        "min": min,
    }
)
RELATIONS: Final[Mapping[str, Callable[[int, int], bool]]] = MappingProxyType(
    {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le}
)
_RELATION_SIGNS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
_OPERATOR_SIGNS: Final = {"add": " + ", "mul": "*", "floordiv": "//", "mod": " % ", "pow": "**"}
_MAX_EXPONENT: Final = 64


def symbol_names(dim: Dim) -> Iterator[str]:
    """Yield the names of the symbols in a dimension, from left to right and with repeats."""
    if isinstance(dim, str):
        yield dim
    elif isinstance(dim, Expr):
        for arg in dim.args:
            yield from symbol_names(arg)


def rename_symbols(dim: Dim, rename: Callable[[str], str]) -> Dim:
    """Return a dimension with other names of symbols."""
    if isinstance(dim, Expr):
        return Expr(op=dim.op, args=tuple([rename_symbols(arg, rename) for arg in dim.args]))
    return rename(dim) if isinstance(dim, str) else dim


def evaluate_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Compute a dimension."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        return sizes[dim]
    return OPERATIONS[dim.op](*(evaluate_dim(arg, sizes) for arg in dim.args))


def known_size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """Compute a dimension; None if it has no value at these sizes, such as one that depends on data."""
    try:
        return evaluate_dim(dim, sizes)
    except (KeyError, ArithmeticError):
        return None


def guard_holds(guard: Guard, sizes: Mapping[str, int], *, without_value: bool = False) -> bool:
    """Whether a condition on sizes holds; True if a symbol has no size, `without_value` if a side has no value."""
    try:
        return RELATIONS[guard.relation](evaluate_dim(guard.left, sizes), evaluate_dim(guard.right, sizes))
    except KeyError:
        return True
    except ArithmeticError:
        return without_value


def size_in_range(symbol: Symbol, size: int) -> bool:
    """Whether a size is in the range of a symbol; both ends are included."""
    return (symbol.min is None or size >= symbol.min) and (symbol.max is None or size <= symbol.max)


def format_dim(dim: Dim) -> str:
    """Return a dimension as text, such as ``2*batch + 1``."""
    if not isinstance(dim, Expr):
        return str(dim)
    if dim.op not in _OPERATOR_SIGNS:
        return f"{dim.op}({', '.join(map(format_dim, dim.args))})"
    operands = (
        f"({format_dim(arg)})" if isinstance(arg, Expr) and dim.op != "add" else format_dim(arg) for arg in dim.args
    )
    return _OPERATOR_SIGNS[dim.op].join(operands)


def format_guard(guard: Guard) -> str:
    """Return a condition on sizes as text, such as ``batch % 2 == 0``."""
    return f"{format_dim(guard.left)} {_RELATION_SIGNS[guard.relation]} {format_dim(guard.right)}"


def format_shape(shape: tuple[Dim, ...]) -> str:
    """Return a shape as text, such as ``[batch, 2*seq, 384]``."""
    return f"[{', '.join(map(format_dim, shape))}]"


def format_range(symbol: Symbol) -> str:
    """Return the range of a symbol as text, such as ``1 to 64`` or ``at least 2``."""
    if symbol.max is None:
        return f"at least {symbol.min}" if symbol.min is not None else "any size"
    return f"{symbol.min} to {symbol.max}" if symbol.min is not None else f"at most {symbol.max}"


def example_sizes(symbols: Iterable[Symbol]) -> dict[str, int]:
    """Return the size of each symbol in the example, by name.

    A size that depends on the data has none in the example; it counts as the minimum of its range, and at least as 1.
    """
    return {
        symbol.name: symbol.example if symbol.example is not None else max(symbol.min or 1, 1) for symbol in symbols
    }
