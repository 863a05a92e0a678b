"""Dimensions: an integer, a symbol, or arithmetic over symbols (SPEC S1 to S3)."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from stagepack.format import limits
from stagepack.format.limits import Int64


class Symbol(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A size that the caller chooses, in the closed range ``[min, max]``; None means no bound on that side.

    Attributes:
        example: its size in the example, at which costs are given; None for a size that only the data tells.
    """

    name: str
    min: Int64 | None = None
    max: Int64 | None = None
    example: Int64 | None = None


class Expr(Struct, frozen=True, kw_only=True):
    """Arithmetic on dimensions. `op` is one of `OPERATIONS`."""

    op: str
    args: tuple["Dim", ...]


# A dimension of a shape: a number, the name of a symbol, or an expression.
Dim = Int64 | str | Expr


def _bounded(number: int) -> int:
    """The number itself, so that a hostile expression cannot grow it without end."""
    if abs(number) > limits.TENSOR_ELEMENTS:
        raise OverflowError(f"a size is over {limits.TENSOR_ELEMENTS}")
    return number


def _sum(*numbers: int) -> int:
    return _bounded(sum(numbers))


def _product(*numbers: int) -> int:
    return functools.reduce(lambda product, number: _bounded(product * number), numbers, 1)


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= _EXPONENT_CEILING:
        raise OverflowError(f"the exponent {exponent} is not between 0 and {_EXPONENT_CEILING}")
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
_SIGNS: Final = {"add": " + ", "mul": "*", "floordiv": "//", "mod": " % ", "pow": "**"}
_EXPONENT_CEILING: Final = 64


def symbol_names(dim: Dim) -> Iterator[str]:
    """Yield the names of the symbols of a dimension, with repeats, from left to right."""
    if isinstance(dim, str):
        yield dim
    elif isinstance(dim, Expr):
        for arg in dim.args:
            yield from symbol_names(arg)


def rename_symbols(dim: Dim, rename: Callable[[str], str]) -> Dim:
    """Rebuild a dimension with renamed symbols; `rename` is called in the order of `symbol_names`."""
    if isinstance(dim, Expr):
        return Expr(op=dim.op, args=tuple([rename_symbols(arg, rename) for arg in dim.args]))
    return rename(dim) if isinstance(dim, str) else dim


def evaluate_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Compute a dimension from the sizes of its symbols.

    Raises:
        KeyError: a symbol has no size.
        ArithmeticError: a division by zero, or a number that is over the limit for a size.
    """
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        return sizes[dim]
    return OPERATIONS[dim.op](*(evaluate_dim(arg, sizes) for arg in dim.args))


def size_in_range(symbol: Symbol, size: int) -> bool:
    """Whether a size lies in the range of a symbol."""
    return (symbol.min is None or size >= symbol.min) and (symbol.max is None or size <= symbol.max)


def format_dim(dim: Dim) -> str:
    """Write a dimension as text: ``2*batch + 1``."""
    if not isinstance(dim, Expr):
        return str(dim)
    if dim.op not in _SIGNS:
        return f"{dim.op}({', '.join(map(format_dim, dim.args))})"
    inner = (
        f"({format_dim(arg)})" if isinstance(arg, Expr) and dim.op != "add" else format_dim(arg) for arg in dim.args
    )
    return _SIGNS[dim.op].join(inner)


def format_shape(shape: tuple[Dim, ...]) -> str:
    """Write a shape as text: ``[batch, 2*seq, 384]``."""
    return f"[{', '.join(map(format_dim, shape))}]"


def format_range(symbol: Symbol) -> str:
    """Write the range of a symbol as text: ``1 to 64``, ``at least 2``."""
    if symbol.max is None:
        return f"at least {symbol.min}" if symbol.min is not None else "any size"
    return f"{symbol.min} to {symbol.max}" if symbol.min is not None else f"at most {symbol.max}"
