"""Memory that two processes of one machine share, in blocks that hold the bodies of one message each.

One process writes bodies into it, the other has tensors on it. The memory has no name, so nothing is left of it when both have ended. The
reader returns a block when no tensor is on it any more, and the writer uses it again: memory that the system has to clear first is slow to
touch. If too much is unused, the writer drops blocks, and the reader does when it is told.
"""

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch

from stagepack.errors import first_line

# Bytes of `ReceiveMemory`, in use or not; as many of the unused blocks of the links from a process. `process_memory` counts both.
LARGEST_KEPT_BYTES = 2**27

_SMALLEST_BLOCK = 2**18  # bytes
_FREE_REFERENCES = 2  # to an array: of its block, and of the call that asks


@dataclass(slots=True, eq=False)
class _Block:
    """A block as one process has it; a tensor on `array` counts as a reference of it."""

    array: Any
    address: int
    is_returned: bool = False  # by the reader, and not used again by the writer


def _map_block(descriptor: int, byte_count: int) -> _Block:
    file_bytes = os.fstat(descriptor).st_size
    if not 0 < byte_count <= file_bytes:
        raise ValueError(f"expected a block of at most {file_bytes} bytes, found {byte_count}")
    try:  # not by the module mmap, which keeps a file open for each mapping
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=byte_count, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(first_line(error)) from None
    return _Block(memory.numpy(), memory.data_ptr())


class _Blocks:
    """The blocks of one end of a link, by number. One thread at a time uses it."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    @property
    def used_count(self) -> int:
        """The number of blocks that the reader has not returned."""
        return sum(not block.is_returned for block in self._blocks.values())

    def clear(self) -> None:
        """Give all blocks back to the system as soon as no tensor is on them, when no more messages are sent."""
        self._blocks.clear()

    def _find(self, number: int) -> _Block:
        if number not in self._blocks:
            raise ValueError(f"expected one of {len(self._blocks)} blocks, found the number {number}")
        return self._blocks[number]


class UnusedBytes:
    """The memory of the unused blocks of all links from a process, whose threads change it."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def add(self, byte_count: int) -> None:
        """Count memory that is not used any more; less than 0 for memory that is used again, or dropped."""
        with self._lock:
            self._count += byte_count

    def are_too_many(self) -> bool:
        """Whether a block must be dropped."""
        return self._count > LARGEST_KEPT_BYTES


class WrittenBlocks(_Blocks):
    """The blocks of the process that writes, the last used one last."""

    def __init__(self, unused_bytes: UnusedBytes) -> None:
        super().__init__()
        self._unused_bytes = unused_bytes
        self._next_number = 0

    def take(self, byte_count: int) -> tuple[int, int, int | None]:
        """Return the number, the address and, if it is new, the file of a block for so many bytes that the reader does not use."""
        # The last used one of blocks of one size is in the caches.
        unused_sizes = {
            number: block.array.nbytes
            for number, block in reversed(self._blocks.items())
            if block.is_returned and byte_count <= block.array.nbytes
        }
        if unused_sizes:
            number = min(unused_sizes, key=unused_sizes.__getitem__)
            self._unused_bytes.add(-unused_sizes[number])
            self._blocks[number] = block = self._blocks.pop(number)
            block.is_returned = False
            return number, block.address, None
        capacity = max(byte_count, _SMALLEST_BLOCK)
        descriptor = os.memfd_create("stagepack", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, capacity)
            block = _map_block(descriptor, capacity)
        except OSError:
            os.close(descriptor)
            raise
        self._next_number += 1
        self._blocks[self._next_number] = block
        return self._next_number, block.address, descriptor

    def take_back(self, number: int) -> None:
        """Take a block that the reader has returned."""
        block = self._find(number)
        block.is_returned = True
        self._unused_bytes.add(block.array.nbytes)

    def drop_surplus(self) -> int:
        """Give the block that was used first back to the system if too much is unused; return its number, or 0 if none was dropped."""
        if self._unused_bytes.are_too_many():
            for number, block in self._blocks.items():
                if block.is_returned:
                    self._unused_bytes.add(-block.array.nbytes)
                    del self._blocks[number]
                    return number
        return 0


class ReadBlocks(_Blocks):
    """The blocks of the process that reads."""

    def add(self, number: int, descriptor: int, byte_count: int) -> None:
        """Add a new block."""
        self._blocks[number] = _map_block(descriptor, byte_count)

    def tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a block as a tensor of bytes."""
        block = self._find(number)
        block.is_returned = False
        return torch.from_numpy(block.array)

    def find_unused(self) -> list[int]:
        """Return the numbers of the blocks that no tensor is on any more, each once."""
        unused_numbers = []
        for number, block in self._blocks.items():
            if not block.is_returned and sys.getrefcount(block.array) <= _FREE_REFERENCES:
                block.is_returned = True
                unused_numbers.append(number)
        return unused_numbers

    def drop(self, number: int) -> None:
        """Give a block back to the system, which the writer has dropped."""
        self._find(number)
        del self._blocks[number]
