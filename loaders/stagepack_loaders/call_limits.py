"""What a call of a bundle may take, as its user limits it: the size of a value, and the time without an answer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagepack.errors import OptionError, ValueSizeError
from stagepack.format.byte_sizes import parse_byte_size
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, evaluate_dim, format_shape
from stagepack.format.traversal import all_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for the calls of a bundle. None is no limit.

    Attributes:
        value_bytes: the largest size of a value, in bytes or as ``"2GiB"``. The bundle states the shapes of all values, so that inputs at
            which one would be larger are refused before anything is computed. Not limited: values whose size depends on data, and what
            operators take while they compute.
        stall_seconds: with `processes`, how long calls may be on their way without an answer to any of them, in seconds. Then a process
            counts as lost, and is ended: also one in a loop without an end.

    Raises:
        OptionError: a limit is not a number of bytes, or not a number of seconds above 0.

    Examples:
        >>> pipeline = stagepack.load("m.stagepack", limits=stagepack.Limits(value_bytes="2GiB"))
    """

    value_bytes: int | str | None = None
    stall_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        if self.value_bytes is not None:
            try:
                object.__setattr__(self, "value_bytes", parse_byte_size(self.value_bytes))
            except ValueError as error:
                raise OptionError(f"value_bytes: {error}") from None
        seconds = self.stall_seconds
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise OptionError(f"stall_seconds: expected more than 0 seconds, found {seconds!r}")


def checked_limits(limits: Any) -> Limits:
    """Return the limits that a caller gives, and those without a limit for None.

    Raises:
        OptionError: they are something else than `Limits`.
    """
    if not isinstance(limits, Limits | None):
        raise OptionError(f"limits: expected stagepack.Limits(...), found {limits!r}")
    return limits or Limits()


class ValueLimit:
    """The largest size that values of an entry point may have."""

    def __init__(self, bundle: Bundle, most_bytes: int) -> None:
        """Collect the shapes of all values, of which equal ones are looked at once.

        Args:
            bundle: the bundle, at an entry point. Its graphs are read.
            most_bytes: the limit.

        Raises:
            ValueSizeError: a value is larger at any sizes of the inputs.
            DigestError, FormatError: a graph is damaged.
        """
        self._most_bytes = most_bytes
        names: dict[tuple[str, tuple[Dim, ...]], str] = {}
        values: list[Value | Edge] = list(bundle.edges)
        for stage_number in range(len(bundle.stages)):
            values += all_values(bundle.graph(stage_number))
        for value in values:
            if value.dtype not in SCALAR_DTYPES:
                names.setdefault((value.dtype, value.shape), value.name)
        self._names = {key: name for key, name in names.items() if any(not isinstance(dim, int) for dim in key[1])}
        self._check({key: name for key, name in names.items() if key not in self._names}, {})

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check the values of a call.

        Args:
            sizes: the sizes of the symbols that the inputs determine.

        Raises:
            ValueSizeError: a value would be larger than the limit.
        """
        self._check(self._names, sizes)

    def _check(self, names: Mapping[tuple[str, tuple[Dim, ...]], str], sizes: Mapping[str, int]) -> None:
        byte_counts = {key: _byte_count(*key, sizes) for key in names}
        largest = max(byte_counts, key=byte_counts.__getitem__, default=None)
        if largest is None or byte_counts[largest] <= self._most_bytes:
            return
        dtype, shape = largest
        given = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        advice = f" with {given}: give smaller inputs, or raise value_bytes" if given else ": raise value_bytes"
        raise ValueSizeError(
            f"{names[largest]}: expected at most {self._most_bytes:,} bytes for a value, found {byte_counts[largest]:,}: "
            f"{dtype} {format_shape(shape)}{advice} of the limits"
        )


def value_limit(bundle: Bundle, limits: Limits) -> ValueLimit | None:
    """Return the limit for the values of a bundle; None if there is none.

    Raises:
        ValueSizeError: a value is larger at any sizes of the inputs.
    """
    return None if limits.value_bytes is None else ValueLimit(bundle, int(limits.value_bytes))


def _byte_count(dtype: str, shape: tuple[Dim, ...], sizes: Mapping[str, int]) -> float:
    """The size of a value; 0 if it depends on data, infinite if it is larger than any number of the format."""
    try:
        return math.prod(evaluate_dim(dim, sizes) for dim in shape) * ITEM_SIZE.get(dtype, 8)
    except (KeyError, ZeroDivisionError):
        return 0
    except ArithmeticError:
        return math.inf
