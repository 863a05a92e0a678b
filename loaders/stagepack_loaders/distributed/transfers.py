"""Send and receive the values of a route."""

import ctypes
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.control import (
    WORD_BYTES,
    ControlKind,
    ControlMessage,
    control_bytes,
    read_control,
    write_control,
)
from stagepack_loaders.distributed.process_group import ConnectionLostError, ProcessGroup, Transfer
from stagepack_loaders.distributed.route_layout import (
    RequestLayout,
    RouteLayout,
    ValueLayout,
    check_late_shapes,
    head_capacity,
)
from stagepack_loaders.distributed.routes import Route
from stagepack_loaders.distributed.tensor_memory import (
    ReceiveMemory,
    allocate,
    from_bytes,
    from_row_major,
    is_row_major,
    to_bytes,
    to_host_tensor,
)


class MessageHead:
    """The first message of a route.

    Attributes:
        memory: its bytes.
        view: the same.
    """

    def __init__(self, byte_count: int) -> None:
        self.memory = allocate(byte_count)
        self.view = memoryview(self.memory.numpy())  # type: ignore[arg-type] # numpy arrays are buffers
        self._address = self.memory.data_ptr()

    def write(self, offset: int, words: Sequence[int]) -> None:
        """Write words at an offset in bytes."""
        struct.pack_into(f"<{len(words)}q", self.view, offset, *words)

    def read(self, offset: int, count: int) -> tuple[int, ...]:
        """Return the words at an offset in bytes."""
        return struct.unpack_from(f"<{count}q", self.view, offset)

    def write_data(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy the bytes of a contiguous tensor to an offset in bytes."""
        ctypes.memmove(self._address + offset, tensor.data_ptr(), tensor.nbytes)

    def data(self, layout: ValueLayout) -> torch.Tensor:
        """The data of a value; empty for a value without elements that is not there."""
        if layout.data_offset is None:
            return self.memory[:0]
        return self.memory[layout.data_offset : layout.data_offset + layout.byte_count]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedValues:
    """The messages of a route for one request or command.

    Attributes:
        head: the first one.
        bodies: those of large values.
        late_bodies: those of values whose shape depends on data.
    """

    head: MessageHead
    bodies: list[torch.Tensor] = field(default_factory=list)
    late_bodies: list[torch.Tensor] = field(default_factory=list)

    @property
    def byte_count(self) -> int:
        """The bytes of all messages."""
        return sum(memory.nbytes for memory in (self.head.memory, *self.bodies, *self.late_bodies))


def pack_values(
    layout: RouteLayout, values: Mapping[str, Any], symbols: Sequence[Symbol], *, copies: bool
) -> PackedValues:
    """Return the messages with the values of a route.

    Args:
        layout: the messages of the route for the request.
        values: the values by edge name.
        symbols: the symbols of the manifest, for the ranges of sizes that depend on data.
        copies: whether the memory of the values may change before they arrive.

    Raises:
        InputError: a value is not a dense tensor, or its shape is not the recorded one.
    """
    head = MessageHead(layout.head_bytes)
    bodies: list[torch.Tensor] = []
    late_bodies: list[torch.Tensor] = []
    late_shapes: list[tuple[Edge, tuple[int, ...]]] = []
    for value_layout in layout.values:
        edge, value = value_layout.edge, values[value_layout.edge.name]
        if value_layout.shape is not None and is_row_major(value, edge, value_layout.shape):
            memory = value  # nearly all values: the fewer calls, the shorter the hop
            value_layout.strides_words.pack_into(head.view, value_layout.strides_offset, *value.stride())
        else:
            memory = _pack_other(value_layout, value, head, late_shapes)
        if value_layout.data_offset is not None:
            head.write_data(value_layout.data_offset, memory)
        elif memory.nbytes:
            target_bodies = late_bodies if value_layout.shape is None else bodies
            target_bodies.append(memory.clone() if copies else memory)
    if late_shapes:
        check_late_shapes(late_shapes, symbols)
    return PackedValues(head=head, bodies=bodies, late_bodies=late_bodies)


def _pack_other(
    layout: ValueLayout, value: Any, head: MessageHead, late_shapes: list[tuple[Edge, tuple[int, ...]]]
) -> torch.Tensor:
    """The bytes of a value that is no row-major tensor of known shape on the host."""
    edge = layout.edge
    tensor = to_host_tensor(value, edge)
    memory = to_bytes(tensor)
    if layout.shape is None:
        late_shapes.append((edge, tuple(tensor.shape)))
        head.write(layout.strides_offset, [*tensor.stride(), *tensor.shape])
    elif memory.numel() != layout.byte_count:
        raise InputError(f"{edge.name}: expected the shape {list(layout.shape)}, found {list(tensor.shape)}")
    elif edge.dtype not in SCALAR_DTYPES:
        head.write(layout.strides_offset, tensor.stride())
    return memory


def pack_failure(layout: RouteLayout) -> PackedValues:
    """Return the messages of a request that has failed: those whose receives the target has posted, without content."""
    bodies = [allocate(value_layout.byte_count) for value_layout in layout.bodies]
    return PackedValues(head=MessageHead(layout.head_bytes), bodies=bodies)


def pack_command(symbols: Sequence[Symbol]) -> PackedValues:
    """Return the message of a command, which has no values."""
    return PackedValues(head=MessageHead(control_bytes(symbols)))


def send_values(
    group: ProcessGroup, route: Route, message: ControlMessage, packed_values: PackedValues
) -> list[Transfer]:
    """Send a request or command on a route, without waiting until it arrives.

    Raises:
        ConnectionLostError: the other process has gone.
    """
    write_control(packed_values.head.view, message)
    return [
        group.send(packed_values.head.memory, route.target_rank, route.head_tag),
        *(group.send(body, route.target_rank, route.body_tag) for body in packed_values.bodies),
        *(group.send(body, route.target_rank, route.late_tag) for body in packed_values.late_bodies),
    ]


class RouteReceivers:
    """Receives what the routes to a process bring, request by request."""

    def __init__(self, group: ProcessGroup, routes: Sequence[Route], symbols: Sequence[Symbol]) -> None:
        """Expect the first messages of the routes that end at this process.

        Args:
            group: the processes.
            routes: all routes of the pipeline.
            symbols: the symbols of the manifest.
        """
        memory = ReceiveMemory()
        self._receivers = [
            _RouteReceiver(group, route, symbols, memory) for route in routes if route.target_rank == group.rank
        ]
        self._last_number = 0

    def post_bodies(self, layout: RequestLayout) -> None:
        """Post the receives of the large values of a request. May be called from another thread, in the order of the requests."""
        for receiver in self._receivers:
            receiver.post_bodies(layout.of_route[receiver.route])

    def next_message(self) -> ControlMessage | None:
        """Wait for the next request or command.

        Returns:
            It; its kind is `FAIL` if it has failed on one of its ways. None if no route ends at this process.

        Raises:
            ConnectionLostError: a process that sends has gone, or is another program.
        """
        messages = [receiver.next_message() for receiver in self._receivers]
        self._last_number += 1
        for message in messages:
            if message.number != self._last_number or message.size_words != messages[0].size_words:
                raise ConnectionLostError(f"expected message {self._last_number}, found {message}")
        return max(messages, key=lambda message: message.kind == ControlKind.FAIL, default=None)

    def values(self, layout: RequestLayout) -> dict[str, Any]:
        """Wait for the values of the request of `next_message`.

        Args:
            layout: how they travel; `post_bodies` was, or is being, called with it.

        Returns:
            The values by edge name, without those of routes on whose way it has failed.

        Raises:
            ConnectionLostError: a process that sends has gone, or sends sizes out of their ranges.
        """
        values: dict[str, Any] = {}
        for receiver in self._receivers:
            values |= receiver.values(layout.of_route[receiver.route])
        return values


class _RouteReceiver:
    """Receives what a route brings, in the order in which it is sent.

    One first message is always expected. The receives of large values are posted by `post_bodies`, as soon as the sizes of a request are
    known, so that they arrive while the process works on another request.
    """

    def __init__(self, group: ProcessGroup, route: Route, symbols: Sequence[Symbol], memory: ReceiveMemory) -> None:
        """Expect a first message."""
        self.route = route
        self._group = group
        self._symbols = symbols
        self._memory = memory
        self._head_capacity = head_capacity(route.edges, symbols)
        self._expected_heads: deque[tuple[MessageHead, Transfer]] = deque()
        self._posted_bodies: SimpleQueue[list[tuple[torch.Tensor, Transfer]]] = SimpleQueue()
        self._expect_head()

    def post_bodies(self, layout: RouteLayout) -> None:
        if layout.bodies:
            self._posted_bodies.put(
                [self._receive(value_layout.byte_count, self.route.body_tag) for value_layout in layout.bodies]
            )

    def next_message(self) -> ControlMessage:
        """Wait for the next first message."""
        self._expect_head()
        self._head, transfer = self._expected_heads.popleft()
        transfer.wait()
        self._message = read_control(self._head.view, len(self._symbols))
        return self._message

    def values(self, layout: RouteLayout) -> dict[str, Any]:
        """Wait for the values that belong to the last first message; none if the request has failed."""
        bodies = [_arrived(body) for body in self._posted_bodies.get()] if layout.bodies else []
        if self._message.kind == ControlKind.FAIL:
            return {}
        shapes, late_bodies = self._receive_late_bodies(layout)
        memories = {value_layout.edge.name: memory for value_layout, memory in late_bodies}
        memories |= {value_layout.edge.name: memory for value_layout, memory in zip(layout.bodies, bodies, strict=True)}
        return {
            value_layout.edge.name: self._value(
                value_layout,
                shapes.get(value_layout.edge.name, value_layout.shape or ()),
                memories.get(value_layout.edge.name),
            )
            for value_layout in layout.values
        }

    def _expect_head(self) -> None:
        head = MessageHead(self._head_capacity)
        transfer = self._group.receive(head.memory, self.route.source_rank, self.route.head_tag)
        self._expected_heads.append((head, transfer))

    def _receive(self, byte_count: int, tag: int) -> tuple[torch.Tensor, Transfer]:
        memory = self._memory.take(byte_count)
        return memory, self._group.receive(memory, self.route.source_rank, tag)

    def _receive_late_bodies(
        self, layout: RouteLayout
    ) -> tuple[dict[str, tuple[int, ...]], list[tuple[ValueLayout, torch.Tensor]]]:
        """Read the shapes that depend on data from the first message, check them, and receive these values."""
        late_layouts = [value_layout for value_layout in layout.values if value_layout.shape is None]
        if not late_layouts:
            return {}, []
        shapes: dict[str, tuple[int, ...]] = {}
        for value_layout in late_layouts:
            dim_count = len(value_layout.edge.shape)
            shape = self._head.read(value_layout.strides_offset + dim_count * WORD_BYTES, dim_count)
            shapes[value_layout.edge.name] = shape
        late_values = [(value_layout.edge, shapes[value_layout.edge.name]) for value_layout in late_layouts]
        try:
            byte_counts = check_late_shapes(late_values, self._symbols)
        except InputError as error:  # the sender has checked them
            raise ConnectionLostError(f"the data of another program: {error}") from None
        bodies = [
            (value_layout, self._receive(byte_count, self.route.late_tag))
            for value_layout, byte_count in zip(late_layouts, byte_counts, strict=True)
            if byte_count
        ]
        return shapes, [(value_layout, _arrived(body)) for value_layout, body in bodies]

    def _value(self, layout: ValueLayout, shape: tuple[int, ...], body: torch.Tensor | None) -> Any:
        strides = layout.strides_words.unpack_from(self._head.view, layout.strides_offset)
        is_row_major_tensor = strides == layout.row_major_strides and layout.edge.dtype not in SCALAR_DTYPES
        if is_row_major_tensor and layout.data_offset is not None and layout.byte_count:
            return from_row_major(self._head.view, layout.data_offset, layout.edge, shape)
        memory = self._head.data(layout) if body is None else body
        if strides and min(strides) < 0:
            raise ConnectionLostError(f"the data of another program: {layout.edge.name} has the strides {strides}")
        return from_bytes(memory, layout.edge, shape, strides)


def _arrived(body: tuple[torch.Tensor, Transfer]) -> torch.Tensor:
    memory, transfer = body
    transfer.wait()
    return memory
