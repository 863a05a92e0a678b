"""Sizes of values at the sizes of the example."""

import math
from collections.abc import Iterable, Mapping

from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol, evaluate_dim

# Counted for a symbolic scalar, and for a value whose size cannot be computed.
_SCALAR_BYTES = 8
# No memory has more; a stranger's bundle may state dimensions whose product is larger than any number of a file.
_MAX_BYTES = 2**53


def example_sizes(symbols: Iterable[Symbol]) -> dict[str, int]:
    """Return the size of each symbol in the example, by name.

    A size that depends on the data has none in the example; it counts as the minimum of its range, and at least as 1.
    """
    return {
        symbol.name: symbol.example if symbol.example is not None else max(symbol.min or 1, 1) for symbol in symbols
    }


def value_bytes(value: Value | Edge, sizes: Mapping[str, int]) -> int:
    """Return the size of a value in bytes.

    The result is the number of elements times the size of one, at most 2**53; 8 for a symbolic scalar and for a value whose shape cannot be
        evaluated.
    """
    if value.dtype in SCALAR_DTYPES:
        return _SCALAR_BYTES
    try:
        element_count = math.prod(evaluate_dim(dim, sizes) for dim in value.shape)
    except (ArithmeticError, KeyError):
        return _SCALAR_BYTES
    return min(max(0, element_count) * ITEM_SIZE.get(value.dtype, 8), _MAX_BYTES)
