"""Digests of files by chunk, so that threads share one file and a range of it is checked alone (SPEC section 9).

A file is divided into chunks of 16 MiB. The digest of a chunk is its BLAKE3 hash. A file of one chunk has the digest of the chunk;
the digest of a larger file is a BLAKE3 hash over the digests of its chunks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3
from msgspec import Struct

from stagepack.errors import Problem
from stagepack.format.limits import Int64

CHUNK_BYTES: Final = 16 * 2**20
# Separates the digests of files of several chunks from the digests of files that contain a list of digests.
_ROOT_CONTEXT: Final = "stagepack 2026-11-22 digests of chunks"


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
    """Return the digest of a file from the digests of all its chunks, at least one, in hexadecimal."""
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
