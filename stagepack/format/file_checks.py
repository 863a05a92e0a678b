"""Compare the files in the folder of a bundle with the manifest (SPEC D1, D2)."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from stagepack.errors import DigestError, LimitError, Problem
from stagepack.format.chunk_reading import FileRead, read_chunks
from stagepack.format.chunks import ByteProgress
from stagepack.format.manifest import File


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


def open_plain_file(folder: Path, entry: File) -> BinaryIO:
    """Open a file of a bundle for reading, and compare its size with the manifest (D1).

    Args:
        folder: the folder of the bundle.
        entry: the manifest entry of the file.

    Raises:
        DigestError: the file is missing, is not a plain file or has another size.
    """
    raise_digest_problems(check_size(folder, entry))
    try:
        descriptor = os.open(folder / entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DigestError([Problem(rule="D1", where=entry.name, message=error.strerror or str(error))]) from None
    # What was opened may be another file than the one whose size was compared.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
        os.close(descriptor)
        raise DigestError([Problem(rule="D1", where=entry.name, message="the file was changed while it was opened")])
    return os.fdopen(descriptor, "rb", buffering=0)


def read_plain_file(folder: Path, file_name: str, max_bytes: int) -> bytes | None:
    """Read a file of a bundle that the manifest does not list; None if there is none.

    Args:
        folder: the folder of the bundle.
        file_name: the name of the file.
        max_bytes: refuse a larger file.

    Raises:
        DigestError: it is not a plain file, or cannot be read.
        LimitError: it is larger.
    """
    try:
        descriptor = os.open(folder / file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"expected a plain file: {error.strerror}"
        raise DigestError([Problem(rule="D1", where=file_name, message=message)]) from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DigestError([Problem(rule="D1", where=file_name, message="not a plain file")])
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        message = f"expected at most {max_bytes} bytes, found more"
        raise LimitError([Problem(rule="L1", where=file_name, message=message)])
    return content


def check_digests(folder: Path, entries: Iterable[File], progress: ByteProgress | None = None) -> list[Problem]:
    """Compare the size and the content of files with the manifest (D1 and D2). Reads the files in threads, by chunk.

    Args:
        folder: the folder of the bundle.
        entries: the manifest entries of the files.
        progress: called by the threads with the number of bytes that were compared.

    Returns:
        The problems in the order of the files; of each file the first one.
    """
    problem_of_file: dict[str, Problem | None] = {}
    with contextlib.ExitStack() as open_files:
        reads = []
        for entry in entries:
            problem_of_file[entry.name] = None
            try:
                file = open_files.enter_context(open_plain_file(folder, entry))
            except DigestError as error:
                problem_of_file[entry.name] = error.problems[0]
            else:
                reads.append(FileRead(entry, file.fileno()))
        for problem in read_chunks(reads, compare=True, progress=progress):
            problem_of_file[problem.where] = problem
    return [problem for problem in problem_of_file.values() if problem is not None]


def raise_digest_problems(problems: list[Problem]) -> None:
    """Raise one error with all the problems, if there are any.

    Raises:
        DigestError: `problems` is not empty.
    """
    if problems:
        raise DigestError(problems)
