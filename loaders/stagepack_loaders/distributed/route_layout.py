"""How the values of a route travel: small ones in a head, each large one as a body after it.

Both sides compute the sizes of heads and bodies from the manifest and the sizes of the symbols, so that a receiver can post its receives
before the data comes, and so that nothing that arrives decides how much memory it takes. The head begins with the words of the
request (`control`), then the strides of each tensor. It has at most `head_capacity` bytes. Only sizes that depend on data travel, in the
head; they are checked against their ranges before the values that have them are received.
"""

import itertools
import math
import operator
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagepack.errors import InputError
from stagepack.format import limits
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack_loaders.distributed.control import WORD_BYTES, control_bytes, decode_sizes
from stagepack_loaders.distributed.routes import Route

_ALIGNMENT = 64
_KEPT_LAYOUTS = 4096
_INLINE_BYTES = 64 * 1024  # of one route; copying them costs less than bodies


@dataclass(frozen=True, slots=True)
class SmallTensor:
    """A tensor in the head of a route.

    Attributes:
        dtype: the name of its dtype.
        shape: its shape.
        element_count: the number of its elements, at least 1.
        offset: where its data begin, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    element_count: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLayout:
    """Where a value is in the head and bodies of its route.

    Attributes:
        edge: the value.
        shape: its shape; None for one that depends on data.
        strides_offset: where its strides begin in the head, in bytes; after them its sizes, if `shape` is None.
        data_offset: where its data begin in the head, in bytes; None for a value that is a body.
        byte_count: the bytes of its data; 0 if its shape is not known.
        small_tensor: what a tensor with elements in the head is; None for other values.
        row_major_strides: the strides that it most often has; empty if its shape is not known.
        strides_words: packs its strides.
    """

    edge: Edge
    shape: tuple[int, ...] | None
    strides_offset: int
    data_offset: int | None
    byte_count: int
    small_tensor: SmallTensor | None
    row_major_strides: tuple[int, ...]
    strides_words: struct.Struct


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLayout:
    """The head and bodies of a route for one request.

    Attributes:
        head_bytes: the size of the head.
        values: the values, in the order of the route.
        bodies: those of known shape that are bodies.
        body_bytes: the bytes of each of these.
        late_values: the values whose shape depends on data.
    """

    head_bytes: int
    values: tuple[ValueLayout, ...]
    bodies: tuple[ValueLayout, ...]
    body_bytes: tuple[int, ...]
    late_values: tuple[ValueLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLayout:
    """The heads and bodies of all routes for requests of certain sizes.

    Attributes:
        of_route: those of each route.
        body_ranks: the processes that post receives for bodies.
    """

    of_route: Mapping[Route, RouteLayout]
    body_ranks: frozenset[int]


class RequestLayouts:
    """The layouts of the routes of a pipeline, kept for the sizes of the last requests."""

    def __init__(
        self, routes: Sequence[Route], symbols: Sequence[Symbol], local_routes: Collection[Route] = frozenset()
    ) -> None:
        self._routes = routes
        self._local_routes = local_routes
        self._symbols = symbols
        self._layouts: dict[bytes, RequestLayout] = {}

    def find(self, size_words: bytes) -> RequestLayout:
        """Return the layout of requests."""
        layout = self._layouts.get(size_words)
        if layout is None:
            if len(self._layouts) >= _KEPT_LAYOUTS:
                self._layouts.clear()
            self._layouts[size_words] = layout = self._make_layout(decode_sizes(size_words, self._symbols))
        return layout

    def _make_layout(self, sizes: Mapping[str, int]) -> RequestLayout:
        first_offset = control_bytes(self._symbols)
        layouts = {route: route_layout(route.edges, sizes, first_offset) for route in self._routes}
        body_ranks = frozenset(
            route.target_rank for route, layout in layouts.items() if layout.bodies and route not in self._local_routes
        )
        return RequestLayout(of_route=layouts, body_ranks=body_ranks)


def aligned(byte_count: int) -> int:
    """Round up so that tensors of every dtype can follow."""
    return -(-byte_count // _ALIGNMENT) * _ALIGNMENT


def head_capacity(edges: Sequence[Edge], symbols: Sequence[Symbol]) -> int:
    """The largest size of a head of a route, in bytes."""
    fixed_layout = route_layout(edges, {}, control_bytes(symbols))
    if all(layout.shape is not None for layout in fixed_layout.values):
        return fixed_layout.head_bytes
    words_bytes = 2 * WORD_BYTES * sum(len(edge.shape) for edge in edges)
    return control_bytes(symbols) + words_bytes + _INLINE_BYTES + _ALIGNMENT * len(edges)


def route_layout(edges: Sequence[Edge], sizes: Mapping[str, int], first_offset: int) -> RouteLayout:
    """Return the layout of values.

    first_offset: the bytes of the head before the strides.
    """
    shapes = [_shape(edge, sizes) for edge in edges]
    word_counts = [len(edge.shape) * (1 if shape is not None else 2) for edge, shape in zip(edges, shapes, strict=True)]
    strides_offsets = list(
        itertools.accumulate(word_counts, lambda offset, words: offset + words * WORD_BYTES, initial=first_offset)
    )
    offset = strides_offsets.pop()
    inline_bytes = 0
    layouts: list[ValueLayout] = []
    for edge, shape, strides_offset in zip(edges, shapes, strides_offsets, strict=True):
        byte_count = 0 if shape is None else _byte_count(edge, shape)
        data_offset = None
        if shape is not None and inline_bytes + byte_count <= _INLINE_BYTES:
            data_offset = aligned(offset)
            offset = data_offset + byte_count
            inline_bytes += byte_count
        layouts.append(
            ValueLayout(
                edge=edge,
                shape=shape,
                strides_offset=strides_offset,
                data_offset=data_offset,
                byte_count=byte_count,
                small_tensor=None
                if shape is None or data_offset is None or not byte_count or edge.dtype in SCALAR_DTYPES
                else SmallTensor(edge.dtype, shape, math.prod(shape), data_offset),
                row_major_strides=_row_major_strides(shape or ()),
                strides_words=struct.Struct(f"<{len(edge.shape)}q"),
            )
        )
    bodies = tuple(layout for layout in layouts if layout.data_offset is None and layout.byte_count)
    body_bytes = tuple(layout.byte_count for layout in bodies)
    return RouteLayout(
        head_bytes=offset,
        values=tuple(layouts),
        bodies=bodies,
        body_bytes=body_bytes,
        late_values=tuple(layout for layout in layouts if layout.shape is None),
    )


def check_late_shapes(values: Iterable[tuple[Edge, tuple[int, ...]]], symbols: Sequence[Symbol]) -> list[int]:
    """Check shapes that depend on data, which the manifest bounds but does not determine.

    The result is the bytes of each value.
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


def _row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that PyTorch gives a new tensor: as if no dimension were empty."""
    sizes = (max(size, 1) for size in reversed(shape[1:]))
    return tuple(reversed(list(itertools.accumulate(sizes, operator.mul, initial=1)))) if shape else ()


def _byte_count(edge: Edge, shape: Sequence[int]) -> int:
    """The bytes of a value."""
    if edge.dtype in SCALAR_DTYPES:
        return WORD_BYTES
    element_count = math.prod(shape)
    if any(size < 0 for size in shape) or element_count > limits.TENSOR_ELEMENTS:
        raise InputError(f"{edge.name}: expected a tensor that the format allows, found the shape {list(shape)}")
    return element_count * ITEM_SIZE[edge.dtype]
