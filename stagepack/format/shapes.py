"""Dimensions: an integer, a symbol, or arithmetic over symbols (SPEC S1 to S3)."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct


class Symbol(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A size that the caller chooses, in the closed range ``[min, max]``; None means no bound on that side."""

    name: str
    min: int | None = None
    max: int | None = None


class Expr(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arithmetic on dimensions. `op` is one of `OPERATIONS`."""

    op: str
    args: tuple["Dim", ...]


# A dimension of a shape: a number, the name of a symbol, or an expression.
Dim = int | str | Expr


def _sum(*numbers: int) -> int:
    return sum(numbers)


def _product(*numbers: int) -> int:
    return math.prod(numbers)


OPERATIONS: Final[Mapping[str, Callable[..., int]]] = MappingProxyType(
    {
        "add": _sum,
        "mul": _product,
        "floordiv": operator.floordiv,
        "mod": operator.mod,
        "pow": operator.pow,
        "max": max,
        "min": min,
    }
)
_SIGNS: Final = {"add": " + ", "mul": "*", "floordiv": "//", "mod": " % ", "pow": "**"}
_EXPONENT_CEILING: Final = 64


def symbols_in(dim: Dim) -> Iterator[str]:
    """Yield the names of the symbols of a dimension, with repeats, from left to right."""
    if isinstance(dim, str):
        yield dim
    elif isinstance(dim, Expr):
        for arg in dim.args:
            yield from symbols_in(arg)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Compute a dimension from the sizes of its symbols.

    Raises:
        KeyError: a symbol has no size.
        ArithmeticError: a division by zero, or a power that is not sensible for a size.
    """
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        return sizes[dim]
    numbers = [evaluate(arg, sizes) for arg in dim.args]
    if dim.op == "pow" and not 0 <= numbers[1] <= _EXPONENT_CEILING:
        raise OverflowError(f"the exponent {numbers[1]} is not between 0 and {_EXPONENT_CEILING}")
    return OPERATIONS[dim.op](*numbers)


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
