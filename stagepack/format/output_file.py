"""Files and folders that are written beside their name and put in place in one step, so that an error leaves what was there.

A temporary folder that a killed process left is removed by the next one: a process holds a lock on its folder as long as it lives, and the
system releases it at whatever end. On file systems without locks nothing is removed.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.file_writing import synchronize
from stagepack.format.own_folders import check_outside_bundles

_ATTEMPTS = 10
STANDARD_OUTPUT: Final = "-"
# A file in temporary folders, which a folder of the user with a similar name does not have.
_MARK_NAME: Final = ".stagepack-temporary"
_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


def check_output_file(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a path that no file may be written to, before any work is done.

    Pipes and terminals may be written always: they have no content. So may ``-``, which is standard output.
    """
    if is_standard_output(out) or _is_stream(out):
        return
    if os.path.isdir(out):
        raise WriteError(f"{out}: expected a file, found a folder: choose another name")
    if os.path.exists(out) and not os.path.isfile(out):
        raise WriteError(f"{out}: expected a file, found another kind: choose another name")
    if os.path.lexists(out) and not overwrite:
        raise OutputExistsError(f"{out}: already exists: choose another name, or replace the file (--overwrite)")
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir():
        raise WriteError(f"{out}: cannot be written: {target.parent} is no folder")
    check_outside_bundles(Path(out), "a file")


@contextlib.contextmanager
def output_file(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file, in the place of the one of that name if there is one.

    The ``with`` statement is given the path to write to. The file is put in place at its end, on disk and as a whole; an error in it
    leaves everything as it was. A link is followed, and pipes and terminals are written as they are. What is written to ``-`` goes to
    standard output.
    """
    if is_standard_output(out):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / "out"
            content = (Path(folder) / "out").read_bytes()
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    try:
        if _is_stream(out):
            yield Path(out)
            return
        target = Path(os.path.realpath(out))
        with TemporaryFolder(target) as temporary:
            new_file = temporary.path / target.name
            yield new_file
            if target.exists():
                shutil.copymode(target, new_file)
            synchronize(new_file)
            new_file.replace(target)
    except OSError as error:
        raise WriteError(f"{out}: cannot be written: {error.strerror}") from None


def is_standard_output(out: str | os.PathLike[str]) -> bool:
    """Whether the path of an output stands for standard output."""
    return os.fspath(out) == STANDARD_OUTPUT


def _is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a pipe, or a device without blocks such as a terminal or /dev/null."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


class TemporaryFolder:
    """A new folder, ``.NAME.TOKEN.part/NAME`` beside the output NAME. Use it in a ``with`` statement, which removes it.

    It may be renamed to the output before. The folder around it has a file by which it is known as ours.

    Attributes:
        path: the folder.
    """

    def __init__(self, out: Path) -> None:
        for leftover in siblings(out, "part"):
            _remove_abandoned(leftover)
        for _ in range(_ATTEMPTS):
            folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
            self.path = folder / out.name
            descriptors: list[int] = []
            # Before the folder exists: an interrupt may come before the `with` statement is entered.
            self._remove = weakref.finalize(self, _remove_own, folder, descriptors, os.getpid())
            folder.mkdir()
            descriptors += _lock(folder)
            # Another process may have found the folder before it was locked, and removed it.
            with contextlib.suppress(FileNotFoundError):
                (folder / _MARK_NAME).touch()
                self.path.mkdir()
                return
            self._remove()
        raise FileNotFoundError(f"{self.path}: was removed while it was created")

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the folder, if it was not renamed."""
        self._remove()


def _remove_own(folder: Path, descriptors: list[int], process: int) -> None:
    # A process that was forked has the object too.
    if os.getpid() == process and os.path.lexists(folder):  # its name may be too long to make it
        remove_folder(folder, _MARK_NAME)
        for descriptor in descriptors:
            os.close(descriptor)


def remove_folder(folder: Path, last_name: str) -> None:
    """Remove a folder, the file by which it is known as ours last, so that a process that is killed meanwhile leaves one that is known."""
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != last_name:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def siblings(out: Path, suffix: str) -> Iterator[Path]:
    """Yield the paths ``.NAME.TOKEN.SUFFIX`` beside an output NAME; none if its folder cannot be read."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.{suffix}")
    with contextlib.suppress(OSError):
        for file_name in sorted(os.listdir(out.parent)):
            if pattern.fullmatch(file_name):
                yield out.parent / file_name


def _lock(folder: Path) -> list[int]:
    """Lock a folder; return the descriptor that holds the lock, or nothing if that is not possible."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return []
    return [descriptor]


def _remove_abandoned(folder: Path) -> None:
    """Remove a temporary folder that no living process has locked. Without the mark, it is one only if it is empty."""
    for descriptor in _lock(folder):
        if (folder / _MARK_NAME).exists():
            remove_folder(folder, _MARK_NAME)
        else:
            with contextlib.suppress(OSError):
                folder.rmdir()
        os.close(descriptor)


def replace_folder(new_folder: Path, out: Path, replaced_folder: Path) -> None:
    """Give a folder the name of another one, which is at the path for the replaced one afterwards, or at that of the new one.

    If the process dies at any moment, the output is the old folder or the new one; where the system cannot exchange two folders, it may be
    missing.
    """
    try:
        if not exchange_paths(new_folder, out):
            os.rename(out, replaced_folder)
            os.rename(new_folder, out)
    # After an interrupt too, the output must be the old folder and not missing.
    except BaseException:
        if os.path.lexists(replaced_folder) and not os.path.lexists(out):
            os.rename(replaced_folder, out)
        raise


def exchange_paths(first: Path, second: Path) -> bool:
    """Exchange what two paths name, by ``renameat2`` of Linux (https://man7.org/linux/man-pages/man2/rename.2.html).

    second: another one, on the same file system.
    """
    rename = _renameat2()
    return rename is not None and not rename(
        _CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), _EXCHANGE
    )


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """The function of the C library; None if it has none."""
    if sys.platform != "linux":
        return None
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return rename
