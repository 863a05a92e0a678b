"""Files that threads read by chunk: to compare them with their digests, or into memory, or both at once."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from stagepack.errors import Problem
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.file_source import FilePatch
from stagepack.format.rules import raise_problems
from stagepack.format.threads import map_in_threads

# Pieces of 1 to 4 MiB were the fastest between 128 KiB and 16 MiB: they fit the second cache of a core.
_PIECE_BYTES: Final = 2 * 2**20
# Called with the number of further bytes that are done; by several threads at a time.
ByteProgress = Callable[[int], None]
# Fills memory with the bytes of a file, from a position on.
Fill = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file to be read by its descriptor, whose position is neither used nor changed.

    Attributes:
        entry: its entry in the manifest.
        descriptor: the open file; None if a patch makes the file of nothing.
        destination: memory as long as the file; None to compare it only.
        populate: if the destination is a mapping of the file, brings parts of it into memory, so that an error of the disk is an `OSError`,
            and not the end of the process.
        patch: makes the bytes of the file from those of the open file, which is its origin; None if it is the file itself.
    """

    entry: File
    descriptor: int | None
    destination: memoryview | None = None
    populate: Fill | None = None
    patch: FilePatch | None = None

    def fill(self, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes of the file from `start` on; see `Fill`. `DigestError` if it is cut short or cannot be read (D1)."""
        try:
            self.fill_raw(start, memory)
        except (EOFError, OSError) as error:
            raise_problems([self.problem(error)])

    def problem(self, error: EOFError | OSError) -> Problem:
        """The problem of the file that an error of `fill_raw` is (D1)."""
        cause = f"the file cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        return Problem(rule="D1", where=self.entry.name, message=cause)

    def fill_raw(self, start: int, memory: memoryview) -> None:
        """See `fill`: with `EOFError` or `OSError` where the file cannot be read."""
        if self.patch is None:
            self._read(start, memory)
            return
        origin_size = 0 if self.patch.origin is None else self.patch.origin.size
        read_bytes = min(max(origin_size - start, 0), len(memory))
        self._read(start, memory[:read_bytes])
        memory[read_bytes:] = bytes(len(memory) - read_bytes)
        self.patch.apply(start, memory)

    def _read(self, start: int, memory: memoryview) -> None:
        position = 0
        while position < len(memory):
            assert self.descriptor is not None
            size = os.preadv(self.descriptor, [memory[position:]], start + position)
            if not size:
                raise EOFError("the file was cut short while it was read")
            position += size


def read_chunks(reads: Sequence[FileRead], *, compare: bool, progress: ByteProgress | None = None) -> list[Problem]:
    """Read files by chunk, in as many threads as there are processors.

    compare: compare each chunk with its digest (D2). With a destination, the bytes in the destination are the ones compared.
    The result is the problems, in the order of the files; of each file the first one. Without problems, the destinations are filled.
    """
    pieces = _Pieces()

    def read_chunk(task: tuple[FileRead, FileChunk]) -> Problem | None:
        read, chunk = task
        hasher = blake3()
        try:
            for piece in pieces.of(read, chunk):
                if compare:
                    hasher.update(piece)
                if progress is not None:
                    progress(len(piece))
        except (EOFError, OSError) as error:
            return read.problem(error)
        return chunk.problem(hasher.hexdigest()) if compare else None

    tasks = [(read, chunk) for read in reads for chunk in file_chunks(read.entry)]
    problem_of_file: dict[str, Problem] = {}
    for problem in map_in_threads(read_chunk, tasks):
        if problem is not None:
            problem_of_file.setdefault(problem.where, problem)
    return list(problem_of_file.values())


def fill_in_pieces(fill: Fill, start: int, memory: memoryview) -> Iterator[memoryview]:
    """Fill memory with the bytes of a file from `start` on; yield each piece while it is in the cache of the core."""
    for offset in range(0, len(memory), _PIECE_BYTES):
        piece = memory[offset : offset + _PIECE_BYTES]
        fill(start + offset, piece)
        yield piece


class _Pieces(threading.local):
    """The bytes of chunks in pieces; without a destination, in one buffer for each thread."""

    _buffer = memoryview(b"")

    def of(self, read: FileRead, chunk: FileChunk) -> Iterator[memoryview]:
        """Yield the bytes of a chunk, in order."""
        if read.destination is not None:
            memory = read.destination[chunk.start : chunk.end]
            yield from fill_in_pieces(read.populate or read.fill_raw, chunk.start, memory)
        else:
            self._buffer = self._buffer or memoryview(bytearray(_PIECE_BYTES))
            for start in range(chunk.start, chunk.end, _PIECE_BYTES):
                piece = self._buffer[: chunk.end - start]
                read.fill_raw(start, piece)
                yield piece
