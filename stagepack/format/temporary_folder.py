"""Temporary folders beside an output, of which those that a killed process left are removed by the next one.

A process holds a lock on its folder as long as it lives, and the system releases it at whatever end: a folder that can be locked is left
over. On file systems without locks nothing is removed.

- Two paths of one file system that exchange what they name, in one step that no reader and no loss of power sees half done.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import secrets
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_ATTEMPTS = 10
_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


class TemporaryFolder:
    """A new folder, ``.NAME.TOKEN.part`` beside the output NAME. Use it in a ``with`` statement, which removes it.

    It may be renamed to the output before.

    Attributes:
        path: the folder.
    """

    def __init__(self, out: Path) -> None:
        for leftover in siblings(out, "part"):
            _remove_abandoned(leftover)
        for _ in range(_ATTEMPTS):
            self.path = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
            descriptors: list[int] = []
            # Before the folder exists: an interrupt may come before the `with` statement is entered.
            self._remove = weakref.finalize(self, _remove_own, self.path, descriptors, os.getpid())
            self.path.mkdir()
            descriptors += _lock(self.path)
            # Another process may have found the folder before it was locked, and removed it.
            if self.path.is_dir():
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
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        for descriptor in descriptors:
            os.close(descriptor)


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
    """Remove a folder that no living process has locked."""
    for descriptor in _lock(folder):
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


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
