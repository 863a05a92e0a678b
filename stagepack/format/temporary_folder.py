"""Temporary folders beside an output, of which those that a killed process left are removed by the next one.

A process holds a lock on its folder as long as it lives, and the system releases it at whatever end: a folder that can be locked is left
over. On file systems without locks nothing is removed.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_ATTEMPTS = 10


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
