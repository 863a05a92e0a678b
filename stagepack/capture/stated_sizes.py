"""Sizes as text, such as ``batch=2..512`` or ``4*h`` -> dimensions of ``torch.export``, and their sizes in the example.

A dimension has this grammar; the range belongs to the symbol::

    DIMENSION = [FACTOR "*"] SYMBOL [("+" | "-") NUMBER] ["=" MIN ".." [MAX]]
"""

import re
import sys
from dataclasses import dataclass, field
from typing import Final

from torch.export import Dim

from stagepack.errors import OptionError

_DIMENSION: Final = re.compile(
    r"(?:(?P<factor>\d+)\s*\*\s*)?(?P<symbol>[^\W\d]\w*)(?:\s*(?P<sign>[+-])\s*(?P<offset>\d+))?"
    r"(?:\s*=\s*(?P<min>\d+)\s*\.\.\s*(?P<max>\d+)?)?"
)
# How many sizes are tried for one that no other dimension of the example has.
_TRIED_SIZES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSize:
    """A size that may change: ``factor * symbol + offset``."""

    symbol: str
    factor: int
    offset: int

    def at(self, symbol_size: int) -> int:
        """Return the size for a size of its symbol."""
        return self.factor * symbol_size + self.offset

    def __str__(self) -> str:
        product = self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"
        return f"{product}{self.offset:+d}" if self.offset else product


@dataclass(slots=True)
class StatedSizes:
    """The dynamic sizes of all inputs."""

    # The range of each symbol; None if none is stated.
    _ranges: dict[str, tuple[int, int | None] | None] = field(default_factory=dict)
    # Each size, with the text that states it first.
    _sizes: dict[StatedSize, str] = field(default_factory=dict)
    # The dimension of each symbol, from which the dimensions of its sizes are derived.
    _dims: dict[str, Dim] = field(default_factory=dict)

    def add(self, input_text: str, dimension: str) -> StatedSize:
        """Add a dimension. A range may be stated anywhere, once."""
        stated = _DIMENSION.fullmatch(dimension.strip())
        if stated is None or not int(stated["factor"] or 1):
            raise OptionError(
                f"{input_text}: expected a size such as 64, batch, batch=2..512, 4*h or 2*n+1, found {dimension.strip() or 'nothing'}"
            )
        symbol, offset = stated["symbol"], int(f"{stated['sign'] or ''}{stated['offset'] or 0}")
        size = StatedSize(symbol=symbol, factor=int(stated["factor"] or 1), offset=offset)
        self._sizes.setdefault(size, input_text)
        self._ranges.setdefault(symbol, None)
        if stated["min"] is not None:
            self._state_range(input_text, symbol, (int(stated["min"]), int(stated["max"]) if stated["max"] else None))
        return size

    def _state_range(self, input_text: str, symbol: str, stated_range: tuple[int, int | None]) -> None:
        smallest, largest = stated_range
        if largest is not None and largest <= smallest:
            raise OptionError(
                f"{input_text}: expected a range of two sizes or more for {symbol}, found {smallest} to {largest}"
            )
        if self._ranges[symbol] not in (None, stated_range):
            raise OptionError(
                f"{input_text}: {symbol} has another range elsewhere: state it once, and then its name alone"
            )
        self._ranges[symbol] = stated_range

    def dim(self, size: StatedSize) -> Dim:
        """Return a size as ``torch.export`` takes it."""
        symbol = size.symbol
        smallest, largest = self._ranges[symbol] or (self._first_size(symbol), None)
        if size.at(smallest) < 0:
            raise OptionError(
                f"{self._sizes[size]}: {size} is {size.at(smallest)} where {symbol} is {smallest}: let the range of {symbol} begin at "
                f"{self._first_size(symbol)}"
            )
        if size.offset < 0 and largest is None:
            # torch.export 2.14 raises KeyError: 'max' where both n - 1 and n are sizes, unless the range of n has an end.
            raise OptionError(
                f"{self._sizes[size]}: {symbol} needs a range with an end: state it, such as {size}={self._first_size(symbol)}..512"
            )
        if size.at(smallest if largest is None else largest) >= sys.maxsize:
            raise OptionError(f"{self._sizes[size]}: {size} is no size of 64 bits: state a smaller range of {symbol}")
        dim = self._dims.setdefault(symbol, Dim(symbol, min=smallest, max=largest))
        return dim if size == StatedSize(symbol=symbol, factor=1, offset=0) else dim * size.factor + size.offset

    def _first_size(self, symbol: str) -> int:
        """The first size of a symbol at which no size over it is negative."""
        return max(0, *(-(size.offset // size.factor) for size in self._sizes if size.symbol == symbol))

    def example_sizes(self) -> dict[str, int]:
        """Return a size of each symbol: of its range, no 0 or 1, which torch may fix, and so that no dimensions are equal by chance."""
        chosen_sizes: dict[str, int] = {}
        used_sizes: set[int] = set()
        for index, (symbol, stated_range) in enumerate(self._ranges.items()):
            smallest, largest = stated_range or (self._first_size(symbol), None)
            sizes = [size for size in self._sizes if size.symbol == symbol]
            first = max(smallest, 2) + index
            last = first + _TRIED_SIZES if largest is None else min(largest, first + _TRIED_SIZES)
            tries = [*range(first, last + 1), *range(min(first - 1, last), max(smallest, 2) - 1, -1)]
            fitting = (
                tried
                for tried in tries
                if all(size.at(tried) > 1 and size.at(tried) not in used_sizes for size in sizes)
            )
            chosen_sizes[symbol] = next(fitting, min(first, last))
            used_sizes.update(size.at(chosen_sizes[symbol]) for size in sizes)
        return chosen_sizes
