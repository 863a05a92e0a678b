"""Send and receive the values of a route."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.process_group import ConnectionLostError, ProcessGroup, Transfer
from stagepack_loaders.distributed.route_layout import WORD_BYTES, RouteLayout, ValueLayout, check_late_shapes
from stagepack_loaders.distributed.routes import Route
from stagepack_loaders.distributed.tensor_memory import allocate, from_bytes, to_bytes, to_host_tensor

_VALUES_FOLLOW = 0
_REQUEST_FAILED = 1


def pack_values(
    layout: RouteLayout, values: Mapping[str, Any], symbols: Sequence[Symbol], *, copies: bool
) -> list[torch.Tensor]:
    """Return the messages with the values of a route.

    Args:
        layout: the messages of the route for the request.
        values: the values by edge name.
        symbols: the symbols of the manifest, for the ranges of sizes that depend on data.
        copies: whether the memory of the values may change before they arrive.

    Raises:
        InputError: a value is not a dense tensor, or its shape is not the recorded one.
    """
    head = _Head(layout.head_bytes)
    head.write(0, [_VALUES_FOLLOW])
    bodies: list[torch.Tensor] = []
    late_bodies: list[torch.Tensor] = []
    late_shapes: list[tuple[Edge, tuple[int, ...]]] = []
    for value_layout in layout.values:
        edge = value_layout.edge
        tensor = to_host_tensor(values[edge.name], edge)
        memory = to_bytes(tensor)
        if value_layout.shape is None:
            late_shapes.append((edge, tuple(tensor.shape)))
            head.write(value_layout.strides_offset, [*tensor.stride(), *tensor.shape])
        else:
            if memory.numel() != value_layout.byte_count:
                expected = list(value_layout.shape)
                raise InputError(f"{edge.name}: expected the shape {expected}, found {list(tensor.shape)}")
            if edge.dtype not in SCALAR_DTYPES:
                head.write(value_layout.strides_offset, tensor.stride())
        if value_layout.data_offset is not None:
            head.data(value_layout).copy_(memory)
        elif memory.numel():
            target_bodies = late_bodies if value_layout.shape is None else bodies
            target_bodies.append(memory.clone() if copies else memory)
    check_late_shapes(late_shapes, symbols)
    return [head.memory, *bodies, *late_bodies]


def pack_failure(layout: RouteLayout) -> list[torch.Tensor]:
    """Return messages that say that the request has failed: those whose receives the target has posted, without content."""
    head = _Head(layout.head_bytes)
    head.write(0, [_REQUEST_FAILED])
    return [head.memory, *(allocate(value_layout.byte_count) for value_layout in layout.bodies())]


def send_messages(group: ProcessGroup, route: Route, messages: Sequence[torch.Tensor]) -> list[Transfer]:
    """Send the messages of a route, without waiting until they arrive.

    Raises:
        ConnectionLostError: the other process has gone.
    """
    return [group.send(message, route.target_rank, route.tag) for message in messages]


class RouteReceiver:
    """The receives of the values of a route for one request. They are posted when it is made."""

    def __init__(self, group: ProcessGroup, route: Route, layout: RouteLayout, symbols: Sequence[Symbol]) -> None:
        """Post the receives whose sizes are known.

        Args:
            group: the processes.
            route: the route.
            layout: the messages of the route for the request.
            symbols: the symbols of the manifest, for the ranges of sizes that depend on data.
        """
        self.route = route
        self._group = group
        self._symbols = symbols
        self._layout = layout
        self._head = _Head(layout.head_bytes)
        self._bodies: dict[str, torch.Tensor] = {}
        self._transfers: list[Transfer] = [self._receive(self._head.memory)]
        for value_layout in layout.bodies():
            self._post_body(value_layout.edge, value_layout.byte_count)

    def wait(self) -> dict[str, Any] | None:
        """Wait for the values.

        Returns:
            The values by edge name; None if the request has failed on its way.

        Raises:
            ConnectionLostError: the process that sends has gone, or sends sizes out of their ranges.
        """
        self._transfers.pop(0).wait()
        has_failed = self._head.read(0, 1)[0] != _VALUES_FOLLOW
        shapes = {} if has_failed else self._receive_late_bodies()
        for transfer in self._transfers:
            transfer.wait()
        if has_failed:
            return None
        return {
            layout.edge.name: self._value(layout, shapes.get(layout.edge.name, layout.shape or ()))
            for layout in self._layout.values
        }

    def _receive(self, memory: torch.Tensor) -> Transfer:
        return self._group.receive(memory, self.route.source_rank, self.route.tag)

    def _post_body(self, edge: Edge, byte_count: int) -> None:
        self._bodies[edge.name] = body = allocate(byte_count)
        self._transfers.append(self._receive(body))

    def _receive_late_bodies(self) -> dict[str, tuple[int, ...]]:
        """Read the shapes that depend on data from the first message, check them, and post the receives of these values."""
        shapes: dict[str, tuple[int, ...]] = {}
        late_values = []
        for layout in self._layout.values:
            if layout.shape is None:
                dim_count = len(layout.edge.shape)
                shape = self._head.read(layout.strides_offset + dim_count * WORD_BYTES, dim_count)
                shapes[layout.edge.name] = shape
                late_values.append((layout.edge, shape))
        try:
            byte_counts = check_late_shapes(late_values, self._symbols)
        except InputError as error:  # the sender has checked them
            raise ConnectionLostError(f"the data of another program: {error}") from None
        for (edge, _), byte_count in zip(late_values, byte_counts, strict=True):
            if byte_count:
                self._post_body(edge, byte_count)
        return shapes

    def _value(self, layout: ValueLayout, shape: tuple[int, ...]) -> Any:
        body = self._bodies.get(layout.edge.name)
        memory = self._head.data(layout) if body is None else body
        strides = self._head.read(layout.strides_offset, len(layout.edge.shape))
        if strides and min(strides) < 0:
            raise ConnectionLostError(f"the data of another program: {layout.edge.name} has the strides {strides}")
        return from_bytes(memory, layout.edge, shape, strides)


class _Head:
    """The first message of a route.

    Attributes:
        memory: its bytes.
    """

    def __init__(self, byte_count: int) -> None:
        self.memory = allocate(byte_count)
        self._bytes = memoryview(self.memory.numpy())  # type: ignore[arg-type] # numpy arrays are buffers

    def write(self, offset: int, words: Sequence[int]) -> None:
        struct.pack_into(f"<{len(words)}q", self._bytes, offset, *words)

    def read(self, offset: int, count: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{count}q", self._bytes, offset)

    def data(self, layout: ValueLayout) -> torch.Tensor:
        """The data of a value; empty for a value without elements that is not there."""
        if layout.data_offset is None:
            return self.memory[:0]
        return self.memory[layout.data_offset : layout.data_offset + layout.byte_count]
