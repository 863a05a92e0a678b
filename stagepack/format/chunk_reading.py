"""Read files by chunk in threads: to hash them, to compare them with their digests, or into memory, or both at once."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from stagepack.errors import DigestError, Problem
from stagepack.format.chunks import CHUNK_BYTES, ByteProgress, FileChunk, chunk_count, file_chunks, file_entry
from stagepack.format.manifest import File
from stagepack.format.threads import map_in_threads

# Of buffers between 256 KiB and 16 MiB, those of 1 to 4 MiB were the fastest: they fit the second cache of a core.
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file to be read.

    Attributes:
        entry: its manifest entry.
        descriptor: its file descriptor. Its position is neither used nor changed.
        destination: where its bytes go, as many as the file has; None to compare them only.
    """

    entry: File
    descriptor: int
    destination: memoryview | None = None


def read_chunks(reads: Sequence[FileRead], *, compare: bool, progress: ByteProgress | None = None) -> list[Problem]:
    """Read files by chunk, in as many threads as there are processors.

    compare: compare each chunk with its digest (D2). With a destination, the bytes in the destination are the ones compared.
    progress: called by the threads with the number of bytes that were read.
    The result is the problems, in the order of the files; of each file the first one. Without problems, the destinations are filled.
    """
    reader = _PieceReader(progress)

    def read_chunk(task: tuple[FileRead, FileChunk]) -> Problem | None:
        read, chunk = task
        hasher = blake3()
        try:
            for piece in reader.pieces(read.descriptor, chunk.start, chunk.end, read.destination):
                if compare:
                    hasher.update(piece)
        except EOFError as error:
            return Problem(rule="D1", where=chunk.entry.name, message=str(error))
        return chunk.problem(hasher.hexdigest()) if compare else None

    tasks = [(read, chunk) for read in reads for chunk in file_chunks(read.entry)]
    problem_of_file: dict[str, Problem] = {}
    for problem in map_in_threads(read_chunk, tasks):
        if problem is not None:
            problem_of_file.setdefault(problem.where, problem)
    return list(problem_of_file.values())


def hash_file(path: Path, file_name: str, progress: ByteProgress | None = None) -> File:
    """Return the manifest entry of a file. Reads the file in threads, by chunk.

    progress: called by the threads with the number of bytes that were hashed.
    """
    if not path.is_file():
        raise DigestError([Problem(rule="D1", where=file_name, message="not a plain file")])
    reader = _PieceReader(progress)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def hash_chunk(start: int) -> str:
            hasher = blake3()
            for piece in reader.pieces(file.fileno(), start, min(start + CHUNK_BYTES, size)):
                hasher.update(piece)
            return hasher.hexdigest()

        try:
            digests = map_in_threads(hash_chunk, [index * CHUNK_BYTES for index in range(chunk_count(size))])
        except EOFError as error:
            raise DigestError([Problem(rule="D1", where=file_name, message=str(error))]) from None
    return file_entry(file_name, size, digests)


class _PieceReader:
    """Reads ranges of files in pieces that fit the cache of a core. Without a destination, each thread reads into one buffer of its own."""

    def __init__(self, progress: ByteProgress | None) -> None:
        self._progress = progress
        self._thread_state = threading.local()

    def pieces(
        self, descriptor: int, start: int, end: int, destination: memoryview | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a file from `start` to `end`."""
        if destination is None and not hasattr(self._thread_state, "buffer"):
            self._thread_state.buffer = memoryview(bytearray(_PIECE_BYTES))
        while start < end:
            size = min(end - start, _PIECE_BYTES)
            piece = self._thread_state.buffer[:size] if destination is None else destination[start : start + size]
            size = os.preadv(descriptor, [piece], start)
            if not size:
                raise EOFError("the file was cut short while it was read")
            start += size
            yield piece[:size]
            if self._progress is not None:
                self._progress(size)
