"""Memory that two processes of one machine share: one writes bodies into it, the other has tensors on it.

The memory has no name, so nothing is left of it when both have ended. A block holds the values of one message. The reader returns it when
no tensor is on it any more, and the writer uses it again: memory that the system has to clear first is slow to touch.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stagepack_loaders.distributed.tensor_memory import LARGEST_KEPT_BYTES

_SMALLEST_BLOCK = 2**18  # bytes
_FREE_REFERENCES = 2  # to an array: of its block, and of the call that asks


@dataclass(slots=True, eq=False)
class _Block:
    """A block as one process has it.

    Attributes:
        array: its memory; a tensor on it counts as a reference.
        address: where it begins.
        is_returned: whether the reader has returned it, and the writer has not used it again.
    """

    array: Any
    address: int
    is_returned: bool = False


def _map_block(descriptor: int, byte_count: int) -> _Block:
    file_bytes = os.fstat(descriptor).st_size
    if not 0 < byte_count <= file_bytes:
        raise ValueError(f"expected a block of at most {file_bytes} bytes, found {byte_count}")
    try:  # not by the module mmap, which keeps a file open for each mapping
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=byte_count, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from None
    return _Block(memory.numpy(), memory.data_ptr())


def _count_used(blocks: Mapping[int, _Block]) -> int:
    return sum(not block.is_returned for block in blocks.values())


class WrittenBlocks:
    """The blocks of the process that writes. One thread at a time uses it."""

    def __init__(self) -> None:
        """Begin without blocks."""
        self._blocks: dict[int, _Block] = {}
        self._next_number = 0

    @property
    def used_count(self) -> int:
        """The number of blocks that the reader has not returned."""
        return _count_used(self._blocks)

    def take(self, byte_count: int) -> tuple[int, int, int | None]:
        """Return a block that the reader does not use.

        Args:
            byte_count: the bytes that it must hold.

        Returns:
            Its number, its address, and for a new block its file descriptor, which the caller closes.

        Raises:
            OSError: the system has no more memory, or this process too many open files.
        """
        unused_blocks = (
            item for item in self._blocks.items() if item[1].is_returned and byte_count <= item[1].array.nbytes
        )
        smallest = min(unused_blocks, key=lambda item: item[1].array.nbytes, default=None)
        if smallest is not None:
            number, block = smallest
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

    def clear(self) -> None:
        """Give all blocks back to the system, when no more messages are sent."""
        self._blocks.clear()

    def take_back(self, number: int, *, is_kept: bool) -> None:
        """Use a block again, or give it back to the system, as the reader says."""
        if is_kept:
            self._blocks[number].is_returned = True
        else:
            del self._blocks[number]


@dataclass(slots=True)
class KeptBytes:
    """The unused memory of all routes to a process, in bytes."""

    count: int = 0


@dataclass(slots=True)
class ReadBlocks:
    """The blocks of the process that reads. One thread uses it.

    Attributes:
        kept_bytes: shared by all routes to the process.
    """

    kept_bytes: KeptBytes
    _blocks: dict[int, _Block] = field(default_factory=dict)

    @property
    def used_count(self) -> int:
        """The number of blocks that are not returned."""
        return _count_used(self._blocks)

    def add(self, number: int, descriptor: int, byte_count: int) -> None:
        """Add a new block.

        Raises:
            ValueError: the file of the descriptor is smaller.
            OSError: the system has no more memory, or this process too many open files.
        """
        self._blocks[number] = _map_block(descriptor, byte_count)

    def tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a block as a tensor of bytes.

        Raises:
            KeyError: there is no such block.
        """
        block = self._blocks[number]
        if block.is_returned:
            block.is_returned = False
            self.kept_bytes.count -= block.array.nbytes
        return torch.from_numpy(block.array)

    def clear(self) -> None:
        """Give all blocks back to the system as soon as no tensor is on them, when no more messages come."""
        self._blocks.clear()

    def find_unused(self) -> list[tuple[int, bool]]:
        """Return the blocks that no tensor is on any more, each once, and whether they are to be kept."""
        unused_blocks = []
        for number, block in list(self._blocks.items()):
            if block.is_returned or sys.getrefcount(block.array) > _FREE_REFERENCES:
                continue
            is_kept = self.kept_bytes.count + block.array.nbytes <= LARGEST_KEPT_BYTES
            if is_kept:
                block.is_returned = True
                self.kept_bytes.count += block.array.nbytes
            else:
                del self._blocks[number]
            unused_blocks.append((number, is_kept))
        return unused_blocks
