"""The rules on symbols, dimensions and types, which manifests and graphs share (SPEC S1 to S3)."""

from collections.abc import Iterator

from stagepack.format import limits
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.graph import (
    Value,
)
from stagepack.format.manifest import Edge
from stagepack.format.shapes import OPERATIONS, Dim, Expr, Symbol, format_range, size_in_range
from stagepack.format.validate.names import WORD_PATTERN, is_identifier
from stagepack.format.validate.problems import BrokenRule

_OF_MANY = frozenset({"add", "mul", "max", "min"})  # operations on two numbers or more; the others take two


def check_symbols(symbols: tuple[Symbol, ...]) -> Iterator[BrokenRule]:
    """Yield what is wrong with a table of symbols."""
    seen: set[str] = set()
    for symbol in symbols:
        if not is_identifier(symbol.name) or symbol.name in seen:
            yield "S1", "symbols", f"{symbol.name[:80]!r} is not an identifier, or stands twice"
        seen.add(symbol.name)
        if symbol.min is not None and symbol.max is not None and symbol.min > symbol.max:
            yield "S1", f"symbol {symbol.name[:80]}", f"min {symbol.min} is over max {symbol.max}"
        if symbol.example is not None and not size_in_range(symbol, symbol.example):
            message = f"the example's {symbol.example} is not {format_range(symbol)}"
            yield "S1", f"symbol {symbol.name[:80]}", message


def check_dim(dim: Dim, symbols: set[str], where: str, depth: int = 0) -> Iterator[BrokenRule]:
    """Yield what is wrong with a dimension."""
    if isinstance(dim, str):
        if dim not in symbols:
            yield "S2", where, f"the symbol {dim[:80]!r} is not declared"
    elif not isinstance(dim, Expr):
        if abs(dim) > limits.TENSOR_ELEMENTS:
            yield "S2", where, f"{dim} is too large"
    elif depth >= limits.NESTING_DEPTH:
        yield "L2", where, f"arithmetic is nested deeper than {limits.NESTING_DEPTH}"
    elif len(dim.args) > limits.EXPR_TERMS:
        yield "L1", where, f"{len(dim.args)} numbers in one operation are over the limit of {limits.EXPR_TERMS}"
    elif dim.op not in OPERATIONS or not 2 <= len(dim.args) <= (limits.EXPR_TERMS if dim.op in _OF_MANY else 2):
        yield "S3", where, f"{dim.op[:80]!r} of {len(dim.args)} numbers is not arithmetic"
    else:
        for arg in dim.args:
            yield from check_dim(arg, symbols, where, depth + 1)


def check_type(value: Value | Edge, symbols: set[str], rule: str, where: str) -> Iterator[BrokenRule]:
    """The rules on a dtype and a shape, which values and edges share."""
    if value.dtype not in ITEM_SIZE and value.dtype not in SCALAR_DTYPES and not WORD_PATTERN.fullmatch(value.dtype):
        yield rule, where, f"{value.dtype[:80]!r} is not a dtype"
    if (value.dtype in SCALAR_DTYPES and value.shape) or (value.dtype != "symint" and value.expr is not None):
        yield rule, where, f"a {value.dtype[:80]} has no shape, or no expr"
    if len(value.shape) > limits.RANK:
        yield "L1", where, f"{len(value.shape)} dimensions are over the limit of {limits.RANK}"
    for dim in value.shape:
        yield from check_dim(dim, symbols, where)
        if isinstance(dim, int) and dim < 0:
            yield "S2", where, f"{dim} is not a size"
    if value.expr is not None:
        yield from check_dim(value.expr, symbols, where)
