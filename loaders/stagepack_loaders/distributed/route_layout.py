"""How the values of a route travel: one message with the small ones, then one for each large one, those of known shape first.

Both sides compute the sizes of all messages from the manifest and the sizes of the symbols, so that a receiver can post its receives
before the data comes, and so that nothing that arrives decides how much memory it takes. The first message begins with a status word,
then the strides of each tensor. Only sizes that depend on data travel, in the first message; they are checked against their ranges before
the second is received.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagepack.errors import InputError
from stagepack.format import limits
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack_loaders.distributed.routes import Route

WORD_BYTES = 8
_ALIGNMENT = 64
_KEPT_LAYOUTS = 4096
_LARGEST_INLINE = 64 * 1024  # bytes; copying them costs less than a message of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLayout:
    """Where a value is in the messages of its route.

    Attributes:
        edge: the value.
        shape: its shape; None for one that depends on data.
        strides_offset: where its strides begin in the first message, in bytes; after them its sizes, if `shape` is None.
        data_offset: where its data begin in the first message, in bytes; None for a value with a message of its own.
        byte_count: the bytes of its data; 0 if its shape is not known.
    """

    edge: Edge
    shape: tuple[int, ...] | None
    strides_offset: int
    data_offset: int | None
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLayout:
    """The messages of a route for one request.

    Attributes:
        head_bytes: the size of the first message.
        values: the values, in the order of the route.
    """

    head_bytes: int
    values: tuple[ValueLayout, ...]

    def bodies(self) -> list[ValueLayout]:
        """The values of known shape that have messages of their own."""
        return [layout for layout in self.values if layout.data_offset is None and layout.byte_count]


class RouteLayouts:
    """The layouts of the routes of a pipeline, kept for the sizes of the last requests."""

    def __init__(self) -> None:
        """Begin without layouts."""
        self._layouts: dict[tuple[object, ...], RouteLayout] = {}

    def find(self, route: Route, sizes: Mapping[str, int]) -> RouteLayout:
        """Return the layout of a route; see `route_layout`.

        Raises:
            InputError: a tensor has more elements than the format allows.
        """
        key = (route.source_stage, route.target_rank, *sizes.values())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _KEPT_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout = route_layout(route.edges, sizes)
        return layout


def route_layout(edges: Sequence[Edge], sizes: Mapping[str, int]) -> RouteLayout:
    """Return the layout of values.

    Args:
        edges: the values.
        sizes: the sizes of the symbols that the inputs of the model determine.

    Raises:
        InputError: a tensor has more elements than the format allows.
    """
    shapes = [_shape(edge, sizes) for edge in edges]
    word_counts = [len(edge.shape) * (1 if shape is not None else 2) for edge, shape in zip(edges, shapes, strict=True)]
    strides_offsets = list(
        itertools.accumulate(word_counts, lambda offset, words: offset + words * WORD_BYTES, initial=WORD_BYTES)
    )
    offset = strides_offsets.pop()
    layouts: list[ValueLayout] = []
    for edge, shape, strides_offset in zip(edges, shapes, strides_offsets, strict=True):
        byte_count = 0 if shape is None else _byte_count(edge, shape)
        data_offset = None
        if shape is not None and byte_count <= _LARGEST_INLINE:
            data_offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            offset = data_offset + byte_count
        layouts.append(
            ValueLayout(
                edge=edge, shape=shape, strides_offset=strides_offset, data_offset=data_offset, byte_count=byte_count
            )
        )
    return RouteLayout(head_bytes=offset, values=tuple(layouts))


def check_late_shapes(values: Iterable[tuple[Edge, tuple[int, ...]]], symbols: Sequence[Symbol]) -> list[int]:
    """Check shapes that depend on data, which the manifest bounds but does not determine.

    Returns:
        The bytes of each value.

    Raises:
        InputError: a size is out of its range, or sizes contradict each other.
    """
    shaped_values = {edge.name: (edge, _Shaped(shape, edge.dtype)) for edge, shape in values}
    byte_counts = [_byte_count(edge, shaped_value.shape) for edge, shaped_value in shaped_values.values()]
    check_values(
        [edge for edge, _ in shaped_values.values()],
        {name: BoundArgument(name, shaped_value) for name, (_, shaped_value) in shaped_values.items()},
        symbols,
    )
    return byte_counts


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor uses each element of its memory once: its dimensions are in some order row-major without holes."""
    expected_stride = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected_stride:
            return False
        expected_stride *= size
    return True


def has_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may be at one address; negative strides count as an overlap."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What `check_values` looks at of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def _shape(edge: Edge, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of a value; None if it depends on data."""
    try:
        shape = tuple(evaluate_dim(dim, sizes) for dim in edge.shape)
    except KeyError:
        return None
    except ArithmeticError as error:
        raise InputError(f"{edge.name}: its shape cannot be computed for these inputs: {error}") from None
    _byte_count(edge, shape)
    return shape


def _byte_count(edge: Edge, shape: Sequence[int]) -> int:
    """The bytes of a value.

    Raises:
        InputError: a size is negative, or the tensor has more elements than the format allows.
    """
    if edge.dtype in SCALAR_DTYPES:
        return WORD_BYTES
    element_count = math.prod(shape)
    if any(size < 0 for size in shape) or element_count > limits.TENSOR_ELEMENTS:
        raise InputError(f"{edge.name}: expected a tensor that the format allows, found the shape {list(shape)}")
    return element_count * ITEM_SIZE[edge.dtype]
