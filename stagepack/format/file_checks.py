"""Compare the files in the folder of a bundle with the manifest (SPEC D1, D2)."""

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from stagepack.errors import DigestError, Problem
from stagepack.format.chunks import CHUNK_BYTES, ByteProgress, FileChunk, chunk_count, file_chunks, file_entry
from stagepack.format.manifest import File
from stagepack.format.threads import map_in_threads

# Of buffers between 256 KiB and 16 MiB, those of 1 to 4 MiB were the fastest: they fit the second cache of a core.
_PIECE_BYTES = 2**20


def is_plain_file(path: Path) -> bool:
    """Whether a path is a file, and neither a link nor a folder, device or pipe."""
    return path.is_file() and not path.is_symlink()


def check_size(folder: Path, entry: File) -> list[Problem]:
    """Compare the size of a file with the manifest (D1), without reading the file.

    Args:
        folder: The folder of the bundle.
        entry: The manifest entry of the file.

    Returns:
        One problem if the file is missing, is not a plain file or has another size; otherwise an empty list.
    """
    path = folder / entry.name
    try:
        actual_size = path.lstat().st_size
    except OSError:
        return [Problem(rule="D1", where=entry.name, message="the file is missing")]
    if not is_plain_file(path):
        return [Problem(rule="D1", where=entry.name, message="not a plain file")]
    if actual_size != entry.size:
        message = f"expected {entry.size} bytes, found {actual_size}"
        return [Problem(rule="D1", where=entry.name, message=message)]
    return []


def check_digests(folder: Path, entries: Iterable[File], progress: ByteProgress | None = None) -> list[Problem]:
    """Compare the size and the content of files with the manifest (D1 and D2). Reads the files in threads, by chunk.

    Args:
        folder: the folder of the bundle.
        entries: the manifest entries of the files.
        progress: called by the threads with the number of bytes that were compared.

    Returns:
        The problems in the order of the files; of each file the first one.
    """
    entries = list(entries)
    problem_of_file: dict[str, Problem | None] = {
        entry.name: next(iter(check_size(folder, entry)), None) for entry in entries
    }
    hasher = _RangeHasher(progress)

    def check_chunk(chunk: FileChunk) -> Problem | None:
        try:
            return chunk.problem(hasher.digest(folder / chunk.entry.name, chunk.start, chunk.end))
        except EOFError as error:
            return Problem(rule="D1", where=chunk.entry.name, message=str(error))

    chunks = [chunk for entry in entries if problem_of_file[entry.name] is None for chunk in file_chunks(entry)]
    for chunk, problem in zip(chunks, map_in_threads(check_chunk, chunks), strict=True):
        problem_of_file[chunk.entry.name] = problem_of_file[chunk.entry.name] or problem
    return [problem for problem in problem_of_file.values() if problem is not None]


def hash_file(path: Path, file_name: str, progress: ByteProgress | None = None) -> File:
    """Return the manifest entry of a file. Reads the file in threads, by chunk.

    Args:
        path: the file.
        file_name: its name in the bundle.
        progress: called by the threads with the number of bytes that were hashed.

    Raises:
        DigestError: the path is not a plain file, or the file was cut short while it was read.
        OSError: the file cannot be read.
    """
    if not is_plain_file(path):
        raise DigestError([Problem(rule="D1", where=file_name, message="not a plain file")])
    size = path.stat().st_size
    hasher = _RangeHasher(progress)
    starts = [index * CHUNK_BYTES for index in range(chunk_count(size))]
    try:
        digests = map_in_threads(lambda start: hasher.digest(path, start, min(start + CHUNK_BYTES, size)), starts)
    except EOFError as error:
        raise DigestError([Problem(rule="D1", where=file_name, message=str(error))]) from None
    return file_entry(file_name, size, digests)


class _RangeHasher:
    """Hashes ranges of files. Each thread reads into one buffer of its own."""

    def __init__(self, progress: ByteProgress | None) -> None:
        self._progress = progress
        self._thread_state = threading.local()

    def digest(self, path: Path, start: int, end: int) -> str:
        """Return the BLAKE3 hash of the bytes of a file from `start` to `end`, in hexadecimal.

        Raises:
            EOFError: the file ends before `end`.
        """
        hasher = blake3()
        for piece in self._pieces(path, start, end):
            hasher.update(piece)
            if self._progress is not None:
                self._progress(len(piece))
        return hasher.hexdigest()

    def _pieces(self, path: Path, start: int, end: int) -> Iterator[memoryview]:
        """Read a range in pieces that fit the cache of a core."""
        if not hasattr(self._thread_state, "buffer"):
            self._thread_state.buffer = memoryview(bytearray(_PIECE_BYTES))
        with open(path, "rb", buffering=0, opener=_open_plain_file) as file:
            file.seek(start)
            remaining = end - start
            while remaining:
                length = file.readinto(self._thread_state.buffer[:remaining])
                if not length:
                    raise EOFError("the file was cut short while it was read")
                remaining -= length
                yield self._thread_state.buffer[:length]


def _open_plain_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def raise_digest_problems(problems: list[Problem]) -> None:
    """Raise one error with all the problems, if there are any.

    Raises:
        DigestError: `problems` is not empty.
    """
    if problems:
        raise DigestError(problems)
