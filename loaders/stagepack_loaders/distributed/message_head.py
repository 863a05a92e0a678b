"""What goes first on a route for a request or command: words, and the data of small values."""

import ctypes
import struct
from collections.abc import Sequence

import torch

from stagepack_loaders.distributed.route_layout import ValueLayout
from stagepack_loaders.distributed.tensor_memory import allocate


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
