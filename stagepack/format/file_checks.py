"""Open the files of a bundle, and compare them with the manifest (SPEC D1, D2) and with their own former versions."""

import contextlib
import difflib
import errno
import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from stagepack.errors import DigestError, OptionError, Problem, StagepackError
from stagepack.format.chunk_reads import ByteProgress, FileRead, read_chunks
from stagepack.format.chunks import File
from stagepack.format.file_source import FilePatches
from stagepack.format.rules import raise_problems, rule_error

# Files that are open at the same time. Processes may often have no more than 1,024, or 256.
FILE_GROUP: Final = 64


class FileVersion(NamedTuple):
    """What differs when a file was replaced or written; see `file_version`."""

    device: int
    inode: int  # the number of the file there
    size: int  # in bytes
    content_time: int  # when the content last changed, in nanoseconds; programs can set it
    # When the content, the permissions or the number of links last changed, in nanoseconds; programs cannot set it. Last: the only field
    # that another link changes.
    status_time: int

    def is_same_but_links(self, version: "FileVersion") -> bool:
        """Whether the file is the same one, though it may have got another link since."""
        return version[:-1] == self[:-1]


def file_version(descriptor: int) -> FileVersion:
    """Return the version of an open file."""
    status = os.fstat(descriptor)
    return FileVersion(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def changed_file_error(path: Path) -> OSError:
    """The error for a file that is not the one any more that was opened or verified."""
    return OSError(f"{path}: was changed while it was read: repeat the call when it is complete")


class NotPlainFileError(OSError):
    """A path is a folder, a device or a pipe, or a link to one, or cannot be the path of a file."""


def check_size(folder: Path, entry: File) -> list[Problem]:
    """Compare the size of a file with the manifest (D1), without reading the file; return one problem, or none."""
    path = folder / entry.name
    try:
        status = path.stat()
    except OSError as error:
        message = "the file is missing"
        if path.is_symlink():
            message = f"it is a link to {os.readlink(path)[:200]!r}, which cannot be opened: {error.strerror}"
        return [Problem(rule="D1", where=entry.name, message=message)]
    if not stat.S_ISREG(status.st_mode):
        return [Problem(rule="D1", where=entry.name, message="not a plain file, nor a link to one")]
    if status.st_size != entry.size:
        message = f"expected {entry.size} bytes, found {status.st_size}"
        return [Problem(rule="D1", where=entry.name, message=message)]
    return []


def open_regular_file(path: Path) -> io.FileIO:
    """Open a file, or the file that a link leads to, for reading, without a buffer. Nobody waits for the writer of a pipe.

    Caches of Hugging Face and of DVC, and config maps of Kubernetes, are folders of links.
    """
    try:
        # Before it is opened too: to open a device can change its state.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise NotPlainFileError(errno.EINVAL, "it is a folder, a device or a pipe", str(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            cure = "raise the limit of open files (ulimit -n), or load fewer stages in one process"
            raise StagepackError(f"{path}: cannot be opened: {error.strerror}: {cure}") from None
        raise
    except ValueError as error:  # a null byte
        raise NotPlainFileError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainFileError(errno.EINVAL, "it is a folder, a device or a pipe", str(path))
    return io.FileIO(descriptor)


def checked_path(path: object, argument: str) -> Path:
    """Return the path that a caller gives as an argument; refuse what is none."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload] # checked here
        is_path = isinstance(text, str) and text != "" and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if not is_path:
        raise OptionError(f"{argument}: expected a path, found {type(path).__name__}: {path!r:.80}")
    return Path(text)


def open_plain_file(folder: Path, entry: File) -> io.FileIO:
    """Open a file of a bundle for reading, and compare its size with the manifest (D1)."""
    raise_problems(check_size(folder, entry))
    try:
        file = open_regular_file(folder / entry.name)
    except OSError as error:
        raise rule_error("D1", entry.name, error.strerror or str(error)) from None
    # What was opened may be another file than the one whose size was compared.
    if os.fstat(file.fileno()).st_size != entry.size:
        file.close()
        raise rule_error("D1", entry.name, "the file was changed while it was opened")
    return file


def read_listed_file(folder: Path, entry: File) -> bytes:
    """Read a file of a bundle as a whole, and compare its size with the manifest (D1)."""
    try:
        with open_plain_file(folder, entry) as file:
            content = _read_up_to(file, entry.size + 1)
    except OSError as error:
        raise rule_error("D1", entry.name, error.strerror or str(error)) from None
    if len(content) != entry.size:
        message = f"expected {entry.size} bytes, found {len(content)}: the file was changed while it was read"
        raise rule_error("D1", entry.name, message)
    return content


def read_plain_file(folder: Path, file_name: str, max_bytes: int) -> bytes | None:
    """Read a file of a bundle that the manifest does not list; None if there is none."""
    try:
        return read_limited(folder / file_name, max_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"expected a plain file: {error.strerror}"
        raise rule_error("D1", file_name, message) from None


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Read a plain file, unless it is too large."""
    with open_regular_file(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        if file_size > max_bytes:
            message = f"expected at most {max_bytes} bytes, found {file_size}"
            raise rule_error("L1", path.name, message)
        return _read_up_to(file, file_size)


def _read_up_to(file: io.FileIO, byte_count: int) -> bytes:
    """The next bytes of a file: fewer than `byte_count` only at its end."""
    with io.BufferedReader(file) as buffered:
        return buffered.read(byte_count)


def open_read(
    open_files: contextlib.ExitStack, folder: Path, entry: File, patches: FilePatches | None = None
) -> FileRead:
    """Open a file of a bundle, or the file that it is made of, until the end of a ``with`` statement."""
    patch = None if patches is None else patches.patch_of(entry.name)
    origin = entry if patch is None else patch.origin
    descriptor = None if origin is None else open_files.enter_context(open_plain_file(folder, origin)).fileno()
    return FileRead(entry, descriptor, patch=patch)


def check_digests(
    folder: Path,
    entries: Iterable[File],
    progress: ByteProgress | None = None,
    versions: dict[str, FileVersion] | None = None,
    patches: FilePatches | None = None,
) -> list[Problem]:
    """Compare the size and the content of files with the manifest (D1 and D2). Reads the files in threads, by chunk."""
    entries = list(entries)
    problem_of_file: dict[str, Problem | None] = {entry.name: None for entry in entries}
    for group_start in range(0, len(entries), FILE_GROUP):
        with contextlib.ExitStack() as open_files:
            reads = []
            for entry in entries[group_start : group_start + FILE_GROUP]:
                try:
                    read = open_read(open_files, folder, entry, patches)
                except DigestError as error:
                    problem_of_file[entry.name] = error.problems[0]
                else:
                    if versions is not None and read.descriptor is not None:
                        versions[entry.name] = file_version(read.descriptor)
                    reads.append(read)
            for problem in read_chunks(reads, compare=True, progress=progress):
                problem_of_file[problem.where] = problem
    return [problem for problem in problem_of_file.values() if problem is not None]


def near_path_hint(path: str | os.PathLike[str], pattern: str = "*") -> str:
    """Return ``: did you mean PATH?`` with the paths of close names in the same folder; nothing if there is none."""
    missing = Path(path)
    names: set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        names = {one.relative_to(missing.parent).parts[0] for one in missing.parent.glob(pattern)}
    close_names = difflib.get_close_matches(missing.name, names, cutoff=0.7)
    return f": did you mean {' or '.join(str(missing.parent / name) for name in close_names)}?" if close_names else ""
