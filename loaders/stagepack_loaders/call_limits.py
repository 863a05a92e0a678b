"""What a call of a bundle may take, as its user limits it: the size of a value, and the time without an answer."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stagepack.errors import OptionError, ValueSizeError
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.graph import Graph, Subgraph, Value
from stagepack.format.manifest import Edge
from stagepack.format.quantities import parse_byte_size
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, evaluate_dim, format_shape, symbol_names

# Operators whose results have the memory of an argument. Others, such as reshape, copy where they must.
_VIEWS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default",
        "detach.default",
        "expand.default",
        "permute.default",
        "select.int",
        "slice.Tensor",
        "squeeze.dim",
        "t.default",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for the calls of a bundle. None is no limit.

    Attributes:
        value_bytes: the largest size of a value, in bytes or as ``"2GiB"``. The bundle states the shapes of all values, so that inputs at
            which one would be larger are refused before anything is computed. Of batches that go in parts, it is the whole batch that
            counts. Not limited: values with a dimension that depends on data, what operators take while they compute, and what ONNX
            files compute otherwise than the graphs. It is for honest bundles: a hostile one may state other sizes than its operators
            have at other sizes than those of its example.
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
            object.__setattr__(self, "value_bytes", _parse_limit(self.value_bytes))
        seconds = self.stall_seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise OptionError(f"stall_seconds: expected more than 0 seconds, found {seconds!r}")


def _parse_limit(size: Any) -> int:
    is_size = isinstance(size, int | str) and not isinstance(size, bool)
    try:
        byte_count = parse_byte_size(size) if is_size else 0
    except ValueError as error:
        raise OptionError(f"value_bytes: {error}") from None
    if byte_count < 1:
        raise OptionError(f"value_bytes: expected a number of bytes of at least 1, such as 2GiB, found {size!r}")
    return byte_count


def checked_limits(limits: Any) -> Limits:
    """Return the limits that a caller gives, and those without a limit for None."""
    if not isinstance(limits, Limits | None):
        raise OptionError(f"limits: expected stagepack.Limits(...), found {limits!r}")
    return limits or Limits()


class ValueLimit:
    """The largest size that values of an entry point may have."""

    def __init__(self, bundle: Bundle, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        names: dict[tuple[str, tuple[Dim, ...]], str] = {}
        values: list[Value | Edge] = list(bundle.edges)
        symbols = set(bundle.entry_point.symbols)
        for stage_number in range(len(bundle.stages)):
            graph = bundle.graph(stage_number)
            values += _values_with_memory(graph)
            symbols.update(graph.symbols)
        self._data_dependent = {symbol.name for symbol in symbols if symbol.example is None}
        for value in values:
            if value.dtype not in SCALAR_DTYPES:
                names.setdefault((value.dtype, value.shape), value.name)
        self._names = {key: name for key, name in names.items() if any(not isinstance(dim, int) for dim in key[1])}
        self._check({key: name for key, name in names.items() if key not in self._names}, {})

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check the values of a call."""
        self._check(self._names, sizes)

    def _check(self, names: Mapping[tuple[str, tuple[Dim, ...]], str], sizes: Mapping[str, int]) -> None:
        byte_counts = {key: self._byte_count(*key, sizes) for key in names}
        largest = max(byte_counts, key=byte_counts.__getitem__, default=None)
        if largest is None or byte_counts[largest] <= self._most_bytes:
            return
        dtype, shape = largest
        given = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        found = f"{byte_counts[largest]:,}" if byte_counts[largest] < 2**63 else "more than any memory has"
        advice = f" with {given}: give smaller inputs, or allow larger values" if given else ": allow larger values"
        raise ValueSizeError(
            f"{names[largest]}: expected at most {self._most_bytes:,} bytes for a value, found {found}: "
            f"{dtype} {format_shape(shape)}{advice}"
        )

    def _byte_count(self, dtype: str, shape: tuple[Dim, ...], sizes: Mapping[str, int]) -> float:
        """The size of a value: 0 if it depends on data; infinite if no tensor has it, or the inputs do not tell it."""
        if not self._data_dependent.isdisjoint(name for dim in shape for name in symbol_names(dim)):
            return 0
        try:
            dims = [evaluate_dim(dim, sizes) for dim in shape]
        except (KeyError, ArithmeticError):
            return math.inf
        return math.prod(dims) * ITEM_SIZE.get(dtype, 8) if all(size >= 0 for size in dims) else math.inf


def value_limit(bundle: Bundle, limits: Limits) -> ValueLimit | None:
    """Return the limit for the values of a bundle; None if there is none."""
    return None if limits.value_bytes is None else ValueLimit(bundle, int(limits.value_bytes))


def _values_with_memory(graph: Graph) -> Iterator[Value]:
    """Yield the values of a graph and its subgraphs, but those that operators return which never copy."""
    bodies: list[Graph | Subgraph] = [graph, *graph.subgraphs]
    for body in bodies:
        yield from body.inputs
        for node in body.nodes:
            if graph.ops[node.op].name not in _VIEWS:
                yield from (value for value in node.outputs if value is not None)
