"""Values as the bytes of a head and bodies, and back, with the strides that they had.

A kernel may add in another order for other strides. So a receiver restores them: bit for bit, the stages compute what they compute in one
process.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol, is_dense
from stagepack_loaders.distributed.process_group import MessageHead, allocate
from stagepack_loaders.distributed.routes import RouteLayout, SmallTensor, ValueLayout, check_late_shapes, control_bytes
from stagepack_loaders.distributed.shared_blocks import LARGEST_KEPT_BYTES
from stagepack_loaders.exchange import to_array
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

# Views with more holes than this become row-major, so that strides do not decide how much memory is taken.
_LARGEST_EXTENT_RATIO = 8
_SMALL_EXTENT = 1024  # elements
_SMALLEST_KEPT_BYTES = 2**18  # smaller memory comes from the heap, which is used again anyway
_FREE_REFERENCES = 2  # of the list, and of the call that asks
_TENSOR_DTYPES = {name: getattr(torch, name) for name in ITEM_SIZE}
_SCALAR_TENSOR_DTYPES = {"symint": torch.int64, "symfloat": torch.float64, "symbool": torch.int64}


@dataclass(slots=True, kw_only=True)
class PackedValues:
    """What goes on a route for one request or command. `late_bodies` are the data of values whose shape depends on data."""

    head: MessageHead
    bodies: list[torch.Tensor] = field(default_factory=list)
    late_bodies: list[torch.Tensor] = field(default_factory=list)

    @property
    def byte_count(self) -> int:
        """The bytes of head and bodies."""
        return len(self.head.view) + sum(body.nbytes for body in self.bodies + self.late_bodies)


def pack_values(
    layout: RouteLayout,
    values: Mapping[str, Any],
    symbols: Sequence[Symbol],
    *,
    copies: bool,
    head: MessageHead | None = None,
) -> PackedValues:
    """Return the head and bodies with the values of a route. `head` has the size that the layout says; None for new memory."""
    if head is None:
        head = MessageHead(layout.head_bytes)
    bodies: list[torch.Tensor] = []
    late_bodies: list[torch.Tensor] = []
    late_shapes: list[tuple[Edge, tuple[int, ...]]] = []
    for value_layout in layout.values:
        edge, value = value_layout.edge, values[value_layout.edge.name]
        if value_layout.shape is not None and _is_row_major(value, edge, value_layout.shape):
            memory = value  # nearly all values: the fewer calls, the shorter the hop
            value_layout.strides_words.pack_into(head.view, value_layout.strides_offset, *value.stride())
        else:
            keeps_device = layout.keeps_device and value_layout.data_offset is None
            memory = _pack_other(value_layout, _to_tensor(value, edge, keeps_device=keeps_device), head, late_shapes)
        if value_layout.data_offset is not None:
            head.write_data(value_layout.data_offset, memory)
        elif memory.nbytes:
            target_bodies = late_bodies if value_layout.shape is None else bodies
            target_bodies.append(memory.clone() if copies else memory)
    if late_shapes:
        check_late_shapes(late_shapes, symbols)
    return PackedValues(head=head, bodies=bodies, late_bodies=late_bodies)


def _pack_other(
    layout: ValueLayout, tensor: torch.Tensor, head: MessageHead, late_shapes: list[tuple[Edge, tuple[int, ...]]]
) -> torch.Tensor:
    """The bytes of a tensor that is not row-major, of known shape and on the host."""
    edge = layout.edge
    memory = _to_bytes(tensor)
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
    return PackedValues(head=MessageHead(layout.head_bytes), bodies=[allocate(count) for count in layout.body_bytes])


def pack_command(symbols: Sequence[Symbol]) -> PackedValues:
    """Return the head of a command, which has no values."""
    return PackedValues(head=MessageHead(control_bytes(symbols)))


def _to_tensor(value: Any, edge: Edge, *, keeps_device: bool) -> torch.Tensor:
    """The value of an edge as a tensor, in the memory of the host unless it keeps its device; the same memory if it is there already."""
    if edge.dtype in SCALAR_DTYPES:
        return torch.tensor([value], dtype=_SCALAR_TENSOR_DTYPES[edge.dtype])
    tensor: torch.Tensor = to_array(value, edge, TORCH_ARRAYS)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{edge.name}: expected a dense tensor with data, found {tensor.layout} on {tensor.device}")
    tensor = tensor.detach()
    return (tensor if keeps_device else tensor.cpu()).resolve_conj().resolve_neg()


def _is_row_major(value: Any, edge: Edge, shape: tuple[int, ...]) -> bool:
    """Whether the bytes of a value can be sent as they are: a row-major tensor in the memory of the host."""
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout == torch.strided
        and value.shape == shape
        and value.dtype == _TENSOR_DTYPES[edge.dtype]
        and value.is_contiguous()
        and not value.is_neg()
        and not value.is_conj()
    )


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes, in the order of its memory if it is dense, else row-major."""
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def from_bytes(memory: torch.Tensor, edge: Edge, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the value of an edge on its bytes, which are aligned for the dtype."""
    if edge.dtype in SCALAR_DTYPES:
        scalar = memory.view(_SCALAR_TENSOR_DTYPES[edge.dtype]).item()
        return bool(scalar) if edge.dtype == "symbool" else scalar
    flat = memory.view(_TENSOR_DTYPES[edge.dtype])
    if is_dense(shape, strides) or not flat.numel():
        return flat.as_strided(tuple(shape), tuple(strides))
    tensor = flat.view(tuple(shape))
    # The elements without repetitions, in memory with the holes that a view of a larger tensor has.
    distinct_shape = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(distinct_shape, strides, strict=True))
    if _has_overlap(distinct_shape, strides) or extent > _LARGEST_EXTENT_RATIO * flat.numel() + _SMALL_EXTENT:
        return tensor
    distinct_elements = flat.new_empty(extent).as_strided(distinct_shape, tuple(strides))
    distinct_elements.copy_(tensor[tuple(slice(size) for size in distinct_shape)])
    return distinct_elements.expand(tuple(shape))


def large_row_major(memory: torch.Tensor, edge: Edge, shape: Sequence[int]) -> torch.Tensor:
    """Return a row-major tensor on its bytes, as `from_bytes` does for any strides."""
    return memory.view(_TENSOR_DTYPES[edge.dtype]).view(tuple(shape))


def small_row_major(message: memoryview, layout: SmallTensor) -> torch.Tensor:
    """Return a row-major tensor on the memory of the message that it came with."""
    dtype = _TENSOR_DTYPES[layout.dtype]
    flat = torch.frombuffer(message, dtype=dtype, count=layout.element_count, offset=layout.offset)
    return flat if len(layout.shape) == 1 else flat.view(layout.shape)


def _has_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may be at one address; negative strides count as an overlap."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def write_back_input(value: Any, content: torch.Tensor, edge: Edge) -> None:
    """Write into an input what the model has written; into a copy of it where the pipeline in one process would, too: it is read-only."""
    with torch.no_grad():
        to_array(value, edge, TORCH_ARRAYS).copy_(content)


class ReceiveMemory:
    """Memory for bodies that arrive. It is used again when no tensor is on it any more: fresh memory of the system is slow to touch.

    Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._memories: list[Any] = []  # numpy arrays: a tensor made by `from_numpy` counts as a reference of its array
        self._lock = threading.Lock()

    def take(self, byte_count: int) -> torch.Tensor:
        """Return memory for bytes, aligned for every dtype."""
        if not _SMALLEST_KEPT_BYTES <= byte_count <= LARGEST_KEPT_BYTES:
            return allocate(byte_count)
        with self._lock:
            for index in range(len(self._memories)):
                if self._is_free(index) and byte_count <= self._memories[index].nbytes <= 2 * byte_count:
                    self._memories.append(self._memories.pop(index))  # the last used one last
                    return torch.from_numpy(self._memories[-1][:byte_count])
            used_bytes = sum(
                self._memories[index].nbytes for index in range(len(self._memories)) if not self._is_free(index)
            )
            if used_bytes + byte_count > LARGEST_KEPT_BYTES:
                return allocate(byte_count)
            self._drop_free_memories(byte_count)
            self._memories.append(allocate(byte_count).numpy())
            return torch.from_numpy(self._memories[-1][:byte_count])

    def _drop_free_memories(self, byte_count: int) -> None:
        """Give the memory that was used first and is free back to the system, until there is room for more."""
        index = 0
        kept_bytes = sum(memory.nbytes for memory in self._memories)
        while index < len(self._memories) and kept_bytes + byte_count > LARGEST_KEPT_BYTES:
            if self._is_free(index):
                kept_bytes -= self._memories.pop(index).nbytes
            else:
                index += 1

    def _is_free(self, index: int) -> bool:
        return sys.getrefcount(self._memories[index]) <= _FREE_REFERENCES
