"""Digests of files by chunk, so that threads share one file and a range of it is checked alone (SPEC section 9).

A file is divided into chunks of 16 MiB. The digest of a chunk is its BLAKE3 hash. The digest of a file of one chunk is that of the chunk;
the digest of a larger file is a BLAKE3 hash over the digests of its chunks.

- Files that threads read by chunk: to compare them with their digests, or into memory, or both at once.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3
from msgspec import Struct

from stagepack.errors import Problem
from stagepack.format.limits import Int64
from stagepack.format.threads import map_in_threads

CHUNK_BYTES: Final = 16 * 2**20
# Separates the digests of files of several chunks from those of files whose content is a list of digests.
_ROOT_CONTEXT: Final = "stagepack 2026-11-22 digests of chunks"
# Buffers of 1 to 4 MiB were the fastest between 256 KiB and 16 MiB: they fit the second cache of a core.
_PIECE_BYTES: Final = 2**20
# Called with the number of further bytes that are done; by several threads at a time.
ByteProgress = Callable[[int], None]


class File(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of the bundle.

    Attributes:
        name: its name in the folder of the bundle.
        size: its size in bytes.
        blake3: its digest, in hexadecimal: the BLAKE3 hash of its content, or of the digests of its chunks if it has several.
        chunks: the digests of its chunks of 16 MiB, in hexadecimal; empty for a file of one chunk.
    """

    name: str
    size: Int64
    blake3: str
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileChunk:
    """One chunk of a file, by its number from 0."""

    entry: File
    index: int

    @property
    def start(self) -> int:
        """The first byte of the chunk in the file."""
        return self.index * CHUNK_BYTES

    @property
    def end(self) -> int:
        """The byte after the last one of the chunk."""
        return min(self.start + CHUNK_BYTES, self.entry.size)

    @property
    def digest(self) -> str:
        """The digest that the manifest states."""
        return self.entry.chunks[self.index] if self.entry.chunks else self.entry.blake3

    def problem(self, actual_digest: str) -> Problem | None:
        """Return the D2 problem if the chunk has another digest than the manifest states, otherwise None."""
        if actual_digest == self.digest:
            return None
        location = f" in the bytes {self.start} to {self.end}" if self.entry.chunks else ""
        message = f"the content was changed{location}: expected blake3 {self.digest}, found {actual_digest}"
        return Problem(rule="D2", where=self.entry.name, message=message)

    def check(self, content: bytes | memoryview) -> Problem | None:
        """Return the D2 problem if the content of the chunk is not the one that the manifest states, otherwise None."""
        return self.problem(chunk_digest(content))


def chunk_count(size: int) -> int:
    """Return the number of chunks of a file of `size` bytes; an empty file has one."""
    return max(1, -(-size // CHUNK_BYTES))


def file_chunks(entry: File, start: int = 0, end: int | None = None) -> list[FileChunk]:
    """Return the chunks of a file that a range of its bytes touches, in order."""
    end = entry.size if end is None else min(end, entry.size)
    if not entry.size:
        return [FileChunk(entry, 0)]
    return [FileChunk(entry, index) for index in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))]


def chunk_digest(content: bytes | memoryview) -> str:
    """Return the digest of the content of a chunk, in hexadecimal. Releases the GIL."""
    return blake3(content).hexdigest()


def file_digest(chunk_digests: Sequence[str]) -> str:
    """Return the digest of a file from those of all its chunks, at least one, in hexadecimal."""
    if len(chunk_digests) == 1:
        return chunk_digests[0]
    return blake3(bytes.fromhex("".join(chunk_digests)), derive_key_context=_ROOT_CONTEXT).hexdigest()


def file_entry(file_name: str, size: int, chunk_digests: Sequence[str]) -> File:
    """Return the manifest entry of a file."""
    listed = tuple(chunk_digests) if len(chunk_digests) > 1 else ()
    return File(name=file_name, size=size, blake3=file_digest(chunk_digests), chunks=listed)


def check_content(entry: File, content: bytes | memoryview) -> list[Problem]:
    """Compare the whole content of a file with its size and digest (D1, D2); return one problem, or none."""
    if len(content) != entry.size:
        return [Problem(rule="D1", where=entry.name, message=f"expected {entry.size} bytes, found {len(content)}")]
    view = memoryview(content)
    problems = (chunk.check(view[chunk.start : chunk.end]) for chunk in file_chunks(entry))
    return [problem for problem in problems if problem is not None][:1]


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal. The file is read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
