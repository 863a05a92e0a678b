"""How large values are at the sizes of the example."""

import math
from collections.abc import Iterable, Mapping

from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol, evaluate_dim


def example_sizes(symbols: Iterable[Symbol]) -> dict[str, int]:
    """The sizes of the example; for one that only the data tells, its least value, at least 1."""
    return {
        symbol.name: symbol.example if symbol.example is not None else max(symbol.min or 1, 1) for symbol in symbols
    }


def value_bytes(value: Value | Edge, sizes: Mapping[str, int]) -> int:
    """The bytes of a value at these sizes; a number counts as 8, and so does a value whose size cannot be computed."""
    if value.dtype in SCALAR_DTYPES:
        return 8
    try:
        return max(0, math.prod(evaluate_dim(dim, sizes) for dim in value.shape)) * ITEM_SIZE.get(value.dtype, 8)
    except (ArithmeticError, KeyError):
        return 8
