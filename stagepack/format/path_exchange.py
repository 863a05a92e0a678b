"""Two paths of one file system that exchange what they name, in one step that no reader and no loss of power sees half done."""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


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
