"""The page cache: evict files from it, and see how much of them it holds."""

import ctypes
import mmap
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def evict(path: Path) -> None:
    """Write a file back to the disk and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_up(path: Path) -> None:
    """Read a file into the page cache."""
    buffer = bytearray(2**22)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def resident_share(path: Path) -> float:
    """Return the share of a file's pages that is in the page cache, from 0 to 1, as the tool fincore counts it.

    Raises:
        OSError: the system does not tell.
    """
    size = path.stat().st_size
    if not size:
        return 0.0
    page_states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        try:
            if _LIBC.mincore(address, size, page_states):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            _LIBC.munmap(address, size)
    return sum(state & 1 for state in bytes(page_states)) / len(page_states)
