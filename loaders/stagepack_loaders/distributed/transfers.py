"""Send and receive the values of a route: in one machine by a link, between machines by gloo, between devices by a channel."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.device_groups import Connections, DeviceChannel
from stagepack_loaders.distributed.local_links import LinkReceiver
from stagepack_loaders.distributed.packing import (
    PackedValues,
    ReceiveMemory,
    from_bytes,
    large_row_major,
    small_row_major,
)
from stagepack_loaders.distributed.process_group import MessageHead, ProcessGroup, Transfer
from stagepack_loaders.distributed.routes import (
    WORD_BYTES,
    ConnectionLostError,
    ControlKind,
    ControlMessage,
    RequestLayout,
    Route,
    RouteLayout,
    ValueLayout,
    aligned,
    check_late_shapes,
    head_capacity,
    read_control,
    write_control,
)


class RouteSenders:
    """Sends what some routes from a process bring. One thread at a time uses it."""

    def __init__(self, connections: Connections, routes: Sequence[Route]) -> None:
        self._group = connections.group
        senders, channels = connections.links.senders, connections.channels
        self._links = {route: senders[route] for route in routes if route in senders}
        self._channels = {route: channels[route] for route in routes if route in channels}

    def has_link(self, route: Route) -> bool:
        """Whether a route ends at a process of this machine: heads may change as soon as they are sent, and `send` may wait."""
        return route in self._links

    def copies_bodies(self, route: Route) -> bool:
        """Whether values may change as soon as they are sent."""
        return route in self._links and route not in self._channels

    def has_room(self, route: Route) -> bool:
        """Whether `send` on a route with a link would not wait for the other process."""
        return self._links[route].has_room()

    def send(self, route: Route, message: ControlMessage, packed_values: PackedValues) -> list[Transfer]:
        """Send a request or command on a route, without waiting until it arrives; a link waits until the other process has room for it.

        The result is the messages whose values must not change before they have arrived.
        """
        write_control(packed_values.head.view, message)
        channel = self._channels.get(route)
        if channel is None:
            return self._send_by_host(route, message, packed_values)
        transfers = self._send_by_host(route, message, PackedValues(head=packed_values.head))
        if message.kind != ControlKind.FAIL:
            bodies = packed_values.bodies + packed_values.late_bodies
            self._group.sent_bytes += sum(body.nbytes for body in bodies)
            transfers += channel.send(bodies)
        return transfers

    def _send_by_host(self, route: Route, message: ControlMessage, packed_values: PackedValues) -> list[Transfer]:
        link = self._links.get(route)
        if link is not None:
            bodies = [] if message.kind == ControlKind.FAIL else packed_values.bodies + packed_values.late_bodies
            self._group.sent_bytes += len(packed_values.head.view) + sum(body.nbytes for body in bodies)
            link.send(packed_values.head.view, bodies)
            return []
        return [
            self._group.send(packed_values.head.memory, route.target_rank, route.head_tag),
            *(self._group.send(body, route.target_rank, route.body_tag) for body in packed_values.bodies),
            *(self._group.send(body, route.target_rank, route.late_tag) for body in packed_values.late_bodies),
        ]

    def limit_untaken(self, message_count: int) -> None:
        """Wait until other processes of this machine have taken all messages with bodies but so many of each route."""
        for link in self._links.values():
            link.limit_untaken(message_count)

    def finish(self) -> None:
        """Wait until links and channels have delivered all messages, when the routes have brought that the pipeline closes."""
        for link in self._links.values():
            link.finish()
        for channel in self._channels.values():
            channel.finish()


class RouteReceivers:
    """Receives what the routes to a process bring, request by request."""

    def __init__(self, connections: Connections, routes: Sequence[Route], symbols: Sequence[Symbol]) -> None:
        memory, links = ReceiveMemory(), connections.links.receivers
        self._receivers: list[_RouteReceiver] = []
        for route in routes:
            if route.target_rank != connections.group.rank:
                continue
            receiver: _RouteReceiver
            if route in links:
                receiver = _LocalReceiver(route, symbols, memory, links[route])
            else:
                receiver = _GroupReceiver(route, symbols, memory, connections.group)
            if (channel := connections.channels.get(route)) is not None:
                receiver = _DeviceReceiver(receiver, channel)
            self._receivers.append(receiver)
        self._last_number = 0

    def post_bodies(self, layout: RequestLayout) -> None:
        """Post the receives of the bodies of a request. May be called from another thread, in the order of the requests."""
        for receiver in self._receivers:
            receiver.post_bodies(layout.of_route[receiver.route].body_bytes)

    def next_message(self) -> ControlMessage | None:
        """Wait for the next request or command, whose kind is `FAIL` if it has failed on one of its ways.

        The result is None if no route ends at this process.
        """
        self._last_number += 1
        result = None
        for receiver in self._receivers:
            message = receiver.next_message()
            if result is None:
                result = message
            if message.number != self._last_number or message.size_words != result.size_words:
                raise ConnectionLostError(f"expected message {self._last_number}, found {message}")
            if message.kind == ControlKind.FAIL:
                result = message
        return result

    def values(self, layout: RequestLayout, *, copies: bool = False) -> dict[str, Any]:
        """Wait for the values of the request of `next_message`.

        copies: copy values out of memory that is shared with another process, and out of heads, which are larger, so that the caller may
            keep them, and fork.
        """
        values: dict[str, Any] = {}
        for receiver in self._receivers:
            values |= receiver.values(layout.of_route[receiver.route], copies=copies)
        return values


class _RouteReceiver(ABC):
    """Receives what one route brings, in the order in which it is sent."""

    def __init__(self, route: Route, symbols: Sequence[Symbol], memory: ReceiveMemory) -> None:
        self.route = route
        self.symbols = symbols
        self.memory = memory

    @abstractmethod
    def post_bodies(self, byte_counts: Sequence[int]) -> None:
        """Have the bodies of a message arrive while the process works on another request."""

    @abstractmethod
    def next_head(self) -> MessageHead:
        """Wait for the next head."""

    @abstractmethod
    def _bodies(self, byte_counts: Sequence[int], *, copies: bool) -> list[torch.Tensor]:
        """Wait for the posted bodies of the last message; return memory that is not shared if `copies`."""

    @abstractmethod
    def _late_bodies(self, byte_counts: Sequence[int], *, copies: bool) -> list[torch.Tensor]:
        """Wait for the values that belong to it and whose sizes it has told."""

    @abstractmethod
    def _discard_bodies(self, byte_counts: Sequence[int]) -> None:
        """Wait for the posted values of a request that has failed."""

    @abstractmethod
    def end(self) -> None:
        """No more messages come."""

    def next_message(self) -> ControlMessage:
        """Wait for the next head."""
        self._head = self.next_head()
        self._message = read_control(self._head.view, len(self.symbols))
        if self._message.kind == ControlKind.CLOSE:
            self.end()
        return self._message

    def values(self, layout: RouteLayout, *, copies: bool) -> dict[str, Any]:
        """Wait for the values of the last message; none if the request has failed."""
        if self._message.kind == ControlKind.FAIL:
            self._discard_bodies(layout.body_bytes)
            return {}
        memories: dict[str, torch.Tensor] = {}
        if layout.bodies:
            bodies = self._bodies(layout.body_bytes, copies=copies)
            memories = {
                value_layout.edge.name: memory for value_layout, memory in zip(layout.bodies, bodies, strict=True)
            }
        shapes = {}
        if layout.late_values:
            shapes = self._receive_late_bodies(layout.late_values, memories, copies=copies)
        values = {}
        for value_layout in layout.values:
            name = value_layout.edge.name
            shape = shapes[name] if value_layout.shape is None else value_layout.shape
            values[name] = self._value(value_layout, shape, memories.get(name), copies=copies)
        return values

    def _receive_late_bodies(
        self, late_layouts: Sequence[ValueLayout], memories: dict[str, torch.Tensor], *, copies: bool
    ) -> dict[str, tuple[int, ...]]:
        """Read the shapes that depend on data from the head, check them, and receive these values."""
        shaped_edges = []
        for value_layout in late_layouts:
            dim_count = len(value_layout.edge.shape)
            shape = self._head.read(value_layout.strides_offset + dim_count * WORD_BYTES, dim_count)
            shaped_edges.append((value_layout.edge, shape))
        try:
            byte_counts = check_late_shapes(shaped_edges, self.symbols)
        except InputError as error:  # the sender has checked them
            raise ConnectionLostError(f"the data of another program: {error}") from None
        names = [edge.name for (edge, _), byte_count in zip(shaped_edges, byte_counts, strict=True) if byte_count]
        bodies = self._late_bodies([byte_count for byte_count in byte_counts if byte_count], copies=copies)
        memories |= zip(names, bodies, strict=True)
        return {edge.name: shape for edge, shape in shaped_edges}

    def _value(self, layout: ValueLayout, shape: tuple[int, ...], body: torch.Tensor | None, *, copies: bool) -> Any:
        strides = layout.strides_words.unpack_from(self._head.view, layout.strides_offset)
        if layout.small_tensor is not None and strides == layout.row_major_strides:
            tensor = small_row_major(self._head.view, layout.small_tensor)
            return tensor.clone() if copies else tensor  # a caller who keeps it does not keep the head
        if body is not None and strides == layout.row_major_strides:
            return large_row_major(body, layout.edge, shape)
        memory = body
        if memory is None:
            memory = self._head.data(layout).clone() if copies else self._head.data(layout)
        if strides and min(strides) < 0:
            raise ConnectionLostError(f"the data of another program: {layout.edge.name} has the strides {strides}")
        return from_bytes(memory, layout.edge, shape, strides)


class _GroupReceiver(_RouteReceiver):
    """Receives by gloo. The receive of one head is always posted."""

    def __init__(self, route: Route, symbols: Sequence[Symbol], memory: ReceiveMemory, group: ProcessGroup) -> None:
        super().__init__(route, symbols, memory)
        self._group = group
        self._head_capacity = head_capacity(route.edges, symbols)
        self._expected_heads: deque[tuple[MessageHead, Transfer]] = deque()
        self._posted_bodies: SimpleQueue[list[tuple[torch.Tensor, Transfer]]] = SimpleQueue()
        self._expect_head()

    def post_bodies(self, byte_counts: Sequence[int]) -> None:
        if byte_counts:
            self._posted_bodies.put([self._receive(count, self.route.body_tag) for count in byte_counts])

    def next_head(self) -> MessageHead:
        self._expect_head()
        head, transfer = self._expected_heads.popleft()
        transfer.wait()
        return head

    def _bodies(self, byte_counts: Sequence[int], *, copies: bool = False) -> list[torch.Tensor]:
        return [_arrived(*body) for body in self._posted_bodies.get()] if byte_counts else []

    def _late_bodies(self, byte_counts: Sequence[int], *, copies: bool = False) -> list[torch.Tensor]:
        return [_arrived(*body) for body in [self._receive(count, self.route.late_tag) for count in byte_counts]]

    def _discard_bodies(self, byte_counts: Sequence[int]) -> None:
        self._bodies(byte_counts)

    def end(self) -> None:
        pass

    def _expect_head(self) -> None:
        head = MessageHead(self._head_capacity)
        transfer = self._group.receive(head.memory, self.route.source_rank, self.route.head_tag)
        self._expected_heads.append((head, transfer))

    def _receive(self, byte_count: int, tag: int) -> tuple[torch.Tensor, Transfer]:
        memory = self.memory.take(byte_count)
        return memory, self._group.receive(memory, self.route.source_rank, tag)


def _arrived(memory: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    transfer.wait()
    return memory


class _LocalReceiver(_RouteReceiver):
    """Receives by a link. Bodies are there as soon as the head of their message."""

    def __init__(self, route: Route, symbols: Sequence[Symbol], memory: ReceiveMemory, link: LinkReceiver) -> None:
        super().__init__(route, symbols, memory)
        self._link = link
        self._content: torch.Tensor | None = None  # the bodies that are not taken yet

    def post_bodies(self, byte_counts: Sequence[int]) -> None:
        pass

    def next_head(self) -> MessageHead:
        self._content = None  # so that its memory can be returned
        head, self._content = self._link.receive()
        return head

    def _bodies(self, byte_counts: Sequence[int], *, copies: bool) -> list[torch.Tensor]:
        bodies = []
        for byte_count in byte_counts:
            if self._content is None or self._content.nbytes < byte_count:
                raise ConnectionLostError("the data of another program: bodies are missing")
            body = self._content[:byte_count]
            bodies.append(self.memory.take(byte_count).copy_(body) if copies else body)
            self._content = self._content[aligned(byte_count) :]
        return bodies

    def _late_bodies(self, byte_counts: Sequence[int], *, copies: bool) -> list[torch.Tensor]:
        return self._bodies(byte_counts, copies=copies)

    def _discard_bodies(self, byte_counts: Sequence[int]) -> None:
        pass

    def end(self) -> None:
        self._link.end()


class _DeviceReceiver(_RouteReceiver):
    """Receives bodies by a channel, once another receiver has their head."""

    def __init__(self, heads: _RouteReceiver, channel: DeviceChannel) -> None:
        super().__init__(heads.route, heads.symbols, heads.memory)
        self._heads = heads
        self._channel = channel

    def post_bodies(self, byte_counts: Sequence[int]) -> None:
        pass

    def next_head(self) -> MessageHead:
        return self._heads.next_head()

    def _bodies(self, byte_counts: Sequence[int], *, copies: bool) -> list[torch.Tensor]:
        return self._channel.receive(byte_counts)

    def _late_bodies(self, byte_counts: Sequence[int], *, copies: bool) -> list[torch.Tensor]:
        return self._channel.receive(byte_counts)

    def _discard_bodies(self, byte_counts: Sequence[int]) -> None:
        pass

    def end(self) -> None:
        self._heads.end()


class QueuedSenders:
    """Sends at once what its receiver has room for, and the rest in a thread.

    A caller that waited could be the one that takes the results, for which the processes of the stages wait. One thread at a time calls
    `send`, another one `run`.
    """

    def __init__(self, senders: RouteSenders) -> None:
        self._senders = senders
        self._queue: SimpleQueue[tuple[Route, ControlMessage, PackedValues] | None] = SimpleQueue()
        self._unsent_count = 0
        self._lock = threading.Lock()

    def send(self, route: Route, message: ControlMessage, packed_values: PackedValues) -> list[Transfer]:
        """Send a request or command on a route, now or when those before it are sent and the receiver has room; see `RouteSenders.send`."""
        if not self._senders.has_link(route):
            return self._senders.send(route, message, packed_values)
        with self._lock:
            if self._unsent_count or not self._senders.has_room(route):
                self._unsent_count += 1
                self._queue.put((route, message, packed_values))
                return []
        return self._senders.send(route, message, packed_values)

    def run(self) -> None:
        """Send what is queued, until `end` is called."""
        while (unsent := self._queue.get()) is not None:
            self._senders.send(*unsent)
            del unsent  # its values are not kept until the next one comes
            with self._lock:
                self._unsent_count -= 1

    def end(self) -> None:
        """Have `run` return when what is queued is sent."""
        self._queue.put(None)

    def finish(self) -> None:
        """See `RouteSenders.finish`; `run` has returned."""
        self._senders.finish()
