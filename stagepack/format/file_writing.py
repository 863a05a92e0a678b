"""Write a file by several threads, each of which gathers, hashes and writes one chunk of it at a time."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from stagepack.format.chunk_reads import ByteProgress, Fill, fill_in_pieces
from stagepack.format.chunks import CHUNK_BYTES, File, chunk_digest, file_entry
from stagepack.format.file_checks import FileVersion, changed_file_error, file_version
from stagepack.format.threads import usable_cpu_count

# More do not write faster, and each has a buffer of one chunk.
_MOST_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """A range of the bytes of a file, to be copied."""

    path: Path
    start: int
    size: int
    # The file must still be this one when it is copied; None if nobody else writes it.
    version: FileVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledRange:
    """A range of bytes that a function fills memory with, in a thread of the writer."""

    fill: Fill
    start: int
    size: int


# Bytes of a call of write. Linux takes as much memory at once for its page cache as a call writes, up to its largest folio. Where memory is
# in small pieces, it searches long: 0.5 GB took 0.4 s of the kernel by calls of 32 KiB, and 1.1 s by calls of 256 KiB.
_WRITE_BYTES: Final = 2**15

# A part of the content of a file.
Piece = bytes | memoryview | FileRange | FilledRange


def write_pieces(path: Path, pieces: Iterable[Piece], progress: ByteProgress | None = None) -> File:
    """Write a new file in threads. The system begins to write it to disk, but may not have finished: see ``os.fsync``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        size, digests = _write_chunks(descriptor, pieces, progress)
    finally:
        os.close(descriptor)
    return file_entry(path.name, size, digests)


def write_at(descriptor: int, content: bytes | bytearray | memoryview, start: int) -> None:
    """Write bytes from a position of a file on. Several threads may write at the same time."""
    remaining = memoryview(content)
    while remaining:
        written = os.pwrite(descriptor, remaining[:_WRITE_BYTES], start)
        remaining, start = remaining[written:], start + written


def synchronize(path: Path) -> None:
    """Return when a file or a folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_chunks(descriptor: int, pieces: Iterable[Piece], progress: ByteProgress | None) -> tuple[int, list[str]]:
    """Write all chunks; return the size of the file and their digests."""
    thread_count = min(usable_cpu_count(), _MOST_THREADS)
    buffers = _Buffers()

    def write(start: int, chunk: list[Piece]) -> str:
        digest = _write_chunk(descriptor, start, chunk, buffers)
        if progress is not None:
            progress(sum(map(_size, chunk)))
        return digest

    chunks = _chunks(pieces)
    first_chunk = next(chunks)
    size = sum(map(_size, first_chunk))
    if size < CHUNK_BYTES:
        return size, [write(0, first_chunk)]
    digests: list[str] = []
    running: deque[Future[str]] = deque()
    with ThreadPoolExecutor(thread_count) as pool:
        running.append(pool.submit(write, 0, first_chunk))
        for chunk in chunks:
            if len(running) > thread_count:
                digests.append(running.popleft().result())
            running.append(pool.submit(write, size, chunk))
            size += sum(map(_size, chunk))
        digests += [future.result() for future in running]
    return size, digests


class _Buffers(threading.local):
    """A buffer of one chunk for each thread."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(CHUNK_BYTES))


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of each chunk; those of an empty file are none."""
    chunk: list[Piece] = []
    free_bytes, is_first = CHUNK_BYTES, True
    for piece in pieces:
        remaining = _as_bytes(piece)
        while size := _size(remaining):
            added, remaining = _divided(remaining, min(free_bytes, size))
            chunk.append(added)
            free_bytes -= _size(added)
            if not free_bytes:
                yield chunk
                chunk, free_bytes, is_first = [], CHUNK_BYTES, False
    if chunk or is_first:
        yield chunk


def _as_bytes(piece: Piece) -> Piece:
    if isinstance(piece, FileRange | FilledRange):
        return piece
    view = memoryview(piece)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else b""


def _size(piece: Piece) -> int:
    return piece.size if isinstance(piece, FileRange | FilledRange) else len(piece)


def _divided(piece: Piece, size: int) -> tuple[Piece, Piece]:
    """The first bytes of a piece, and the others."""
    if not isinstance(piece, FileRange | FilledRange):
        return piece[:size], piece[size:]
    return replace(piece, size=size), replace(piece, start=piece.start + size, size=piece.size - size)


def _write_chunk(descriptor: int, start: int, chunk: list[Piece], buffers: _Buffers) -> str:
    """Write a chunk from a position of the file on; return its digest."""
    if len(chunk) == 1 and isinstance(chunk[0], FilledRange):
        return _write_filled(descriptor, start, chunk[0], buffers.view)
    if len(chunk) == 1 and not isinstance(chunk[0], FileRange | FilledRange):
        content = memoryview(chunk[0])
    else:
        end = 0
        for piece in chunk:
            begin, end = end, end + _size(piece)
            if isinstance(piece, FileRange):
                _read_range(piece, buffers.view[begin:end])
            elif isinstance(piece, FilledRange):
                piece.fill(piece.start, buffers.view[begin:end])
            else:
                buffers.view[begin:end] = piece
        content = buffers.view[:end]
    digest = chunk_digest(content)
    write_at(descriptor, content, start)
    _begin_writing_back(descriptor, start, len(content))
    return digest


def _write_filled(descriptor: int, start: int, piece: FilledRange, buffer: memoryview) -> str:
    """Fill, hash and write a chunk in parts that stay in the cache of the core."""
    hasher = blake3()
    for part in fill_in_pieces(piece.fill, piece.start, buffer[: piece.size]):
        hasher.update(part)
        write_at(descriptor, part, start)
        start += len(part)
    _begin_writing_back(descriptor, start - piece.size, piece.size)
    return hasher.hexdigest()


def _begin_writing_back(descriptor: int, start: int, byte_count: int) -> None:
    # Linux begins to write these pages to disk now, while others are hashed, and not when the file is synchronized: measured for 2 GB,
    # 1.1 s in place of 1.7 s. It keeps them in memory, since they are not on disk yet.
    os.posix_fadvise(descriptor, start, byte_count, os.POSIX_FADV_DONTNEED)


def _read_range(piece: FileRange, buffer: memoryview) -> None:
    # Nobody waits for the writer of a pipe. A link is followed: links of the cache of Hugging Face lead to the file of this version.
    descriptor = os.open(piece.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_version(piece, descriptor)
        position = piece.start
        while buffer:
            count = os.preadv(descriptor, [buffer], position)
            if not count:
                raise OSError(f"{piece.path}: ends before byte {piece.start + piece.size}")
            position, buffer = position + count, buffer[count:]
        _check_version(piece, descriptor)
    finally:
        os.close(descriptor)


def _check_version(piece: FileRange, descriptor: int) -> None:
    if piece.version not in (None, file_version(descriptor)):
        raise changed_file_error(piece.path)
