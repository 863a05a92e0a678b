"""Tensors as the bytes that travel, and back, with the strides that they had.

A kernel may add in another order for other strides. So a receiver restores them: bit for bit, the stages compute what they compute in one
process.

- What goes first on a route for a request or command: words, and the data of small values.
"""

import ctypes
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack_loaders.distributed.route_layout import SmallTensor, ValueLayout, has_overlap, is_dense
from stagepack_loaders.exchange import to_array
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

# Views with more holes than this become row-major, so that strides do not decide how much memory is taken.
_LARGEST_EXTENT_RATIO = 8
_SMALL_EXTENT = 1024  # elements
_SMALLEST_KEPT_BYTES = 2**18  # smaller memory comes from the heap, which is used again anyway
# Of `ReceiveMemory`, in use or not; again of the unused blocks of the links from a process. `process_memory` counts both.
LARGEST_KEPT_BYTES = 2**27
_FREE_REFERENCES = 2  # of the list, and of the call that asks
_TENSOR_DTYPES = {name: getattr(torch, name) for name in ITEM_SIZE}
_SCALAR_TENSOR_DTYPES = {"symint": torch.int64, "symfloat": torch.float64, "symbool": torch.int64}


def to_host_tensor(value: Any, edge: Edge) -> torch.Tensor:
    """Return the value of an edge as a tensor in the memory of the host; the same memory if it is there already."""
    if edge.dtype in SCALAR_DTYPES:
        return torch.tensor([value], dtype=_SCALAR_TENSOR_DTYPES[edge.dtype])
    tensor: torch.Tensor = to_array(value, edge, TORCH_ARRAYS)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{edge.name}: expected a dense tensor with data, found {tensor.layout} on {tensor.device}")
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def is_row_major(value: Any, edge: Edge, shape: tuple[int, ...]) -> bool:
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


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as bytes, in the order of its memory if it is dense, else row-major."""
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def from_bytes(memory: torch.Tensor, edge: Edge, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the value of an edge on its bytes; the reverse of `to_bytes`.

    memory: the bytes, aligned for the dtype.
    """
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
    if has_overlap(distinct_shape, strides) or extent > _LARGEST_EXTENT_RATIO * flat.numel() + _SMALL_EXTENT:
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


def write_input(value: Any, content: torch.Tensor, edge: Edge) -> None:
    """Write into an input what the model has written; into a copy of it where the pipeline in one process would, too: it is read-only."""
    with torch.no_grad():
        to_array(value, edge, TORCH_ARRAYS).copy_(content)


def allocate(byte_count: int) -> torch.Tensor:
    """Return memory for bytes, aligned for every dtype."""
    return torch.empty(byte_count, dtype=torch.uint8)


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
        while index < len(self._memories) and self._kept_bytes() + byte_count > LARGEST_KEPT_BYTES:
            if self._is_free(index):
                del self._memories[index]
            else:
                index += 1

    def _kept_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def _is_free(self, index: int) -> bool:
        return sys.getrefcount(self._memories[index]) <= _FREE_REFERENCES


class MessageHead:
    """What goes first on a route for a request or command.

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
        if layout.data_offset is None or not layout.byte_count:
            return torch.empty(0, dtype=torch.uint8)
        # Its storage is its own bytes alone, which is what is written when a caller saves it.
        return torch.frombuffer(self.view, dtype=torch.uint8, count=layout.byte_count, offset=layout.data_offset)
