"""Pack the values of a route into a head and bodies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.control import control_bytes
from stagepack_loaders.distributed.route_layout import RouteLayout, ValueLayout, check_late_shapes
from stagepack_loaders.distributed.tensor_memory import MessageHead, allocate, is_row_major, to_bytes, to_host_tensor


@dataclass(slots=True, kw_only=True)
class PackedValues:
    """What goes on a route for one request or command.

    Attributes:
        head: the head.
        bodies: the data of large values of known shape.
        late_bodies: the data of values whose shape depends on data.
    """

    head: MessageHead
    bodies: list[torch.Tensor] = field(default_factory=list)
    late_bodies: list[torch.Tensor] = field(default_factory=list)

    @property
    def byte_count(self) -> int:
        """The bytes of head and bodies."""
        byte_count = len(self.head.view)
        for body in self.bodies + self.late_bodies:
            byte_count += body.nbytes
        return byte_count


def pack_values(
    layout: RouteLayout,
    values: Mapping[str, Any],
    symbols: Sequence[Symbol],
    *,
    copies: bool,
    head: MessageHead | None = None,
) -> PackedValues:
    """Return the head and bodies with the values of a route.

    head: memory for the head, of the size that the layout says; None for new memory.
    """
    if head is None:
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
    """Return the head of a request that has failed, and the bodies whose receives the target may have posted, without content."""
    bodies = [allocate(value_layout.byte_count) for value_layout in layout.bodies]
    return PackedValues(head=MessageHead(layout.head_bytes), bodies=bodies)


def pack_command(symbols: Sequence[Symbol]) -> PackedValues:
    """Return the head of a command, which has no values."""
    return PackedValues(head=MessageHead(control_bytes(symbols)))
