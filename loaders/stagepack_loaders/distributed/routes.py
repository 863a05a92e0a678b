"""What travels between the processes of a pipeline, and how; every process computes it alike from the manifest. Imports no torch.

A route is what one process sends another one at one time: a head with the words of the request, the strides of each tensor and small
values, then each large value as a body. Both sides know the sizes of heads and bodies, so that a receiver can post its receives before
the data comes, and so that nothing that arrives decides how much memory it takes. A head has at most `head_capacity` bytes. Only sizes that
depend on data travel, in the head; they are checked against their ranges before the values that have them are received.
"""

import itertools
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from msgspec import Struct, structs

from stagepack.errors import InputError
from stagepack.format import limits
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.shapes import Symbol, evaluate_dim, format_range, row_major_strides, size_in_range
from stagepack.format.tree import value_names

# The rank of the process that is called, which has the inputs of the model and gets its results.
FRONT_RANK = 0
WORD_BYTES = 8
# The tag of messages by which the front announces requests with bodies, and that it closes; routes have the tags above.
ANNOUNCEMENT_TAG = 0
# The tag of messages by which the front cancels requests, and that it closes; above all tags of routes.
CANCEL_TAG = 2**20 + 1
_FIXED_WORDS = struct.Struct("<5q32s")
_ALIGNMENT = 64
_KEPT_LAYOUTS = 4096
_INLINE_BYTES = 64 * 1024  # of one route; copying them costs less than bodies


class ConnectionLostError(Exception):
    """A process of the group has gone. For the modules of this package, which raise `StageLostError` with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Values that one process sends to another one, after `source_stage` has run; before all stages if that is None.

    A route without edges tells the target of the request, or that the stage has run. Bodies of a route that joins devices go by these.
    """

    source_stage: int | None
    source_rank: int
    target_rank: int
    edges: tuple[Edge, ...]
    joins_devices: bool = False

    @property
    def head_tag(self) -> int:
        """The tag of heads; this number and the next two belong to no other route between the two processes."""
        return 1 if self.source_stage is None else 4 + 3 * self.source_stage

    @property
    def body_tag(self) -> int:
        """The tag of bodies of known size."""
        return self.head_tag + 1

    @property
    def late_tag(self) -> int:
        """The tag of values whose shape depends on data."""
        return self.head_tag + 2


def stages_of_rank(rank_of_stage: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the stages that a process runs."""
    return tuple(number for number, stage_rank in enumerate(rank_of_stage) if stage_rank == rank)


def find_routes(
    entry_point: EntryPoint, rank_of_stage: Sequence[int], written_inputs: Mapping[int, Collection[str]]
) -> tuple[Route, ...]:
    """Return all routes, in the order in which a request uses them. Each process but the front has some that end and some that begin there.

    written_inputs: the inputs of the model whose memory a stage writes, by stage number. Their content goes back to the caller.
    """
    other_ranks = sorted(set(rank_of_stage) - {FRONT_RANK})
    routes = [
        Route(source_stage=None, source_rank=FRONT_RANK, target_rank=target_rank, edges=edges)
        for target_rank in other_ranks
        if (edges := _edges_to(entry_point, None, target_rank, rank_of_stage))
    ]
    results = set(value_names(entry_point.signature.result))
    for stage_number, source_rank in enumerate(rank_of_stage):
        edges_of_target = {
            target_rank: _edges_to(entry_point, stage_number, target_rank, rank_of_stage) for target_rank in other_ranks
        }
        edges_of_target[FRONT_RANK] = tuple(
            edge
            for edge in entry_point.edges
            if (edge.producer == stage_number and edge.name in results)
            or edge.name in written_inputs.get(stage_number, ())
        )
        sends = {target: edges for target, edges in edges_of_target.items() if edges and target != source_rank}
        is_last_of_rank = stage_number == stages_of_rank(rank_of_stage, source_rank)[-1]
        if not sends and source_rank != FRONT_RANK and is_last_of_rank:
            sends[FRONT_RANK] = ()
        routes += [
            Route(source_stage=stage_number, source_rank=source_rank, target_rank=target, edges=edges)
            for target, edges in sends.items()
        ]
    reached_ranks = {route.target_rank for route in routes}
    unasked_routes = [
        Route(source_stage=None, source_rank=FRONT_RANK, target_rank=rank, edges=())
        for rank in other_ranks
        if rank not in reached_ranks
    ]
    return (*unasked_routes, *routes)


def _edges_to(
    entry_point: EntryPoint, producer: int | None, target_rank: int, rank_of_stage: Sequence[int]
) -> tuple[Edge, ...]:
    """The edges of one producer that stages of a process use."""
    return tuple(
        edge
        for edge in entry_point.edges
        if edge.producer == producer and any(rank_of_stage[consumer] == target_rank for consumer in edge.consumers)
    )


class ControlKind(IntEnum):
    """What a process is to do."""

    RUN = 1
    FAIL = 2  # send on that the request has failed
    END_SEQUENCE = 3
    RESET_STATE = 4
    SEED = 5
    CLOSE = 6
    START_TRACE = 7
    STOP_TRACE = 8
    CANCEL = 9  # nobody waits for the answer to the request of this number; sent beside the routes
    STAGE_VERSION = 10  # load a version, which the store of the group describes; sent beside the routes
    SWITCH_VERSION = 11  # a version is the newest from now on
    END_VERSION = 12  # no call runs on a version any more


# Kinds of messages with the values of a request; the others are commands.
REQUEST_KINDS = (ControlKind.RUN, ControlKind.FAIL)
_KINDS = {kind.value: kind for kind in ControlKind}


class ControlMessage(Struct, frozen=True, kw_only=True):
    """One request or command. All processes get the messages in the order of their numbers, without a gap.

    sequence: whose state is used or ended; 0 for the state of the stage itself.
    version: what the request runs on, or the command is about.
    size_words: the sizes of the symbols that the inputs determine, by `encode_sizes`; empty for commands.
    trace_words: the identity of the request, by `RequestTrace.words`; empty for none.
    """

    kind: ControlKind
    number: int
    sequence: int = 0
    seed: int = 0
    version: int = 0
    size_words: bytes = b""
    trace_words: bytes = b""

    def failed(self) -> "ControlMessage":
        """The request after a stage has failed on it."""
        return structs.replace(self, kind=ControlKind.FAIL)


def control_bytes(symbols: Sequence[Symbol]) -> int:
    """The size of the words with which a head begins."""
    return _FIXED_WORDS.size + _size_struct(len(symbols)).size


def write_control(memory: memoryview, message: ControlMessage) -> None:
    """Write the words of a message at the beginning of some memory."""
    words = (message.kind, message.number, message.sequence, message.seed, message.version)
    _FIXED_WORDS.pack_into(memory, 0, *words, message.trace_words)
    if message.size_words:
        memory[_FIXED_WORDS.size : _FIXED_WORDS.size + len(message.size_words)] = message.size_words


def read_control(memory: memoryview, symbol_count: int) -> ControlMessage:
    """Return the message at the beginning of some memory."""
    kind, number, sequence, seed, version, trace_words = _FIXED_WORDS.unpack_from(memory)
    if kind not in _KINDS:
        raise ConnectionLostError(f"expected a control message, found the kind {kind}")
    size_words = b""
    if symbol_count and kind in REQUEST_KINDS:
        size_words = bytes(memory[_FIXED_WORDS.size : _FIXED_WORDS.size + 2 * WORD_BYTES * symbol_count])
    return ControlMessage(
        kind=_KINDS[kind],
        number=number,
        sequence=sequence,
        seed=seed,
        version=version,
        size_words=size_words,
        trace_words=trace_words if any(trace_words) else b"",
    )


def encode_sizes(sizes: Mapping[str, int], symbols: Sequence[Symbol]) -> bytes:
    """Return two words for each symbol: whether its size is known, and the size."""
    words = [word for symbol in symbols for word in (symbol.name in sizes, sizes.get(symbol.name, 0))]
    return _size_struct(len(symbols)).pack(*words)


def decode_sizes(size_words: bytes, symbols: Sequence[Symbol]) -> dict[str, int]:
    """Return the sizes of symbols; the reverse of `encode_sizes`."""
    words = _size_struct(len(symbols)).unpack(size_words)
    sizes = {}
    for symbol, is_known, size in zip(symbols, words[::2], words[1::2], strict=True):
        if is_known:
            if not size_in_range(symbol, size):
                raise ConnectionLostError(f"expected {format_range(symbol)} for {symbol.name!r}, found {size}")
            sizes[symbol.name] = size
    return sizes


def _size_struct(symbol_count: int) -> struct.Struct:
    return struct.Struct(f"<{2 * symbol_count}q")


@dataclass(frozen=True, slots=True)
class SmallTensor:
    """A tensor with elements whose data are in the head of a route, at an offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    element_count: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLayout:
    """Where a value is in the head and bodies of its route. Offsets are in bytes.

    shape: None if it depends on data; then the head has it after the strides, and `byte_count` is 0.
    data_offset: None for a value that is a body.
    row_major_strides: those that the value most often has.
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
    """The head and bodies of a route, on their device or not; `late_values` have a shape that depends on data, and `bodies` do not."""

    head_bytes: int
    values: tuple[ValueLayout, ...]
    bodies: tuple[ValueLayout, ...]
    body_bytes: tuple[int, ...]
    late_values: tuple[ValueLayout, ...]
    keeps_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLayout:
    """The heads and bodies of all routes for requests of certain sizes, and the processes that post receives for bodies."""

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
        layouts = {
            route: replace(route_layout(route.edges, sizes, first_offset), keeps_device=route.joins_devices)
            for route in self._routes
        }
        body_ranks = frozenset(
            route.target_rank
            for route, layout in layouts.items()
            if layout.bodies and not layout.keeps_device and route not in self._local_routes
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
    return control_bytes(symbols) + words_bytes + _INLINE_BYTES + (_ALIGNMENT + WORD_BYTES) * len(edges)


def route_layout(edges: Sequence[Edge], sizes: Mapping[str, int], first_offset: int) -> RouteLayout:
    """Return the layout of values. `first_offset` is the bytes of the head before the strides."""
    shapes = [_shape(edge, sizes) for edge in edges]
    word_counts = [len(edge.shape) * (1 if shape is not None else 2) for edge, shape in zip(edges, shapes, strict=True)]
    strides_offsets = list(
        itertools.accumulate(word_counts, lambda offset, words: offset + words * WORD_BYTES, initial=first_offset)
    )
    offset, inline_bytes = strides_offsets.pop(), 0
    layouts: list[ValueLayout] = []
    for edge, shape, strides_offset in zip(edges, shapes, strides_offsets, strict=True):
        byte_count = 0 if shape is None else _byte_count(edge, shape)
        data_offset = small_tensor = None
        is_number = edge.dtype in SCALAR_DTYPES  # always in the head: bodies are tensors
        if shape is not None and (is_number or inline_bytes + byte_count <= _INLINE_BYTES):
            data_offset = aligned(offset)
            offset = data_offset + byte_count
            inline_bytes += 0 if is_number else byte_count
            if byte_count and not is_number:
                small_tensor = SmallTensor(edge.dtype, shape, math.prod(shape), data_offset)
        layouts.append(
            ValueLayout(
                edge=edge,
                shape=shape,
                strides_offset=strides_offset,
                data_offset=data_offset,
                byte_count=byte_count,
                small_tensor=small_tensor,
                row_major_strides=row_major_strides(shape or ()),
                strides_words=struct.Struct(f"<{len(edge.shape)}q"),
            )
        )
    bodies = tuple(layout for layout in layouts if layout.data_offset is None and layout.byte_count)
    return RouteLayout(
        head_bytes=offset,
        values=tuple(layouts),
        bodies=bodies,
        body_bytes=tuple(layout.byte_count for layout in bodies),
        late_values=tuple(layout for layout in layouts if layout.shape is None),
    )


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What `check_values` looks at of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def check_late_shapes(values: Sequence[tuple[Edge, tuple[int, ...]]], symbols: Sequence[Symbol]) -> list[int]:
    """Check shapes that depend on data, which the manifest bounds but does not determine; return the bytes of each value."""
    byte_counts = [_byte_count(edge, shape) for edge, shape in values]
    arguments = {edge.name: BoundArgument(edge.name, _Shaped(shape, edge.dtype)) for edge, shape in values}
    check_values([edge for edge, _ in values], arguments, symbols)
    return byte_counts


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
    """The bytes of a value."""
    if edge.dtype in SCALAR_DTYPES:
        return WORD_BYTES
    element_count = math.prod(shape)
    if any(size < 0 for size in shape) or element_count > limits.TENSOR_ELEMENTS:
        raise InputError(f"{edge.name}: expected a tensor that the format allows, found the shape {list(shape)}")
    return element_count * ITEM_SIZE[edge.dtype]
