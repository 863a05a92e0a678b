"""Files that threads read by chunk: to compare them with their digests, or into memory, or both at once."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from stagepack.errors import Problem
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.threads import map_in_threads

# Buffers of 1 to 4 MiB were the fastest between 256 KiB and 16 MiB: they fit the second cache of a core.
_PIECE_BYTES: Final = 2**20
# Called with the number of further bytes that are done; by several threads at a time.
ByteProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file to be read by its descriptor, whose position is neither used nor changed."""

    entry: File
    descriptor: int
    destination: memoryview | None = None  # as long as the file; None to compare it only


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
            for piece in pieces.read(read.descriptor, chunk.start, chunk.end, read.destination):
                if compare:
                    hasher.update(piece)
                if progress is not None:
                    progress(len(piece))
        except EOFError as error:
            return Problem(rule="D1", where=chunk.entry.name, message=str(error))
        return chunk.problem(hasher.hexdigest()) if compare else None

    tasks = [(read, chunk) for read in reads for chunk in file_chunks(read.entry)]
    problem_of_file: dict[str, Problem] = {}
    for problem in map_in_threads(read_chunk, tasks):
        if problem is not None:
            problem_of_file.setdefault(problem.where, problem)
    return list(problem_of_file.values())


class _Pieces(threading.local):
    """Reads ranges of files in pieces that fit the cache of a core; without a destination, into one buffer for each thread."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_PIECE_BYTES))

    def read(
        self, descriptor: int, start: int, end: int, destination: memoryview | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a file from `start` to `end`."""
        while start < end:
            size = min(end - start, _PIECE_BYTES)
            piece = self._buffer[:size] if destination is None else destination[start : start + size]
            size = os.preadv(descriptor, [piece], start)
            if not size:
                raise EOFError("the file was cut short while it was read")
            start += size
            yield piece[:size]
