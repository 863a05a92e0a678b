"""Which memory of a mapped file this process has written to.

A file that is mapped privately shares its pages with the page cache. The first write to a page gives the process a page of its own, which
the kernel tells in ``/proc/self/pagemap`` (https://docs.kernel.org/admin-guide/mm/pagemap.html). So writes of all kinds are seen, those
that pass by torch too. All pages of a mapping that was replaced by memory of the process (`stagepack_loaders.file_leases`) count as
written: they may not be those of the file any more.
"""

import mmap
import os
from typing import Final

import numpy

from stagepack_loaders.elements import Array

_PAGEMAP_PATH: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
# Bits of an entry: the page is in memory, in swap; it belongs to a file.
_PRESENT, _SWAPPED, _OF_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))


def may_be_written(address: int, byte_count: int) -> bool:
    """Whether this process may have written to memory that is mapped privately from a file. True where the kernel does not tell.

    byte_count: the number of bytes. Writes to the pages that they share with other bytes count too.
    """
    return bool(written_pages(address, byte_count).any())


def written_pages(address: int, byte_count: int) -> Array:
    """Return for each page of memory that is mapped privately from a file whether this process may have written to it. `Shape [page]`.

    byte_count: the number of bytes.
    """
    first_page, end_page = address // mmap.PAGESIZE, -(-(address + byte_count) // mmap.PAGESIZE)
    page_count = end_page - first_page if byte_count else 0
    try:
        # Not kept open: it is that of the process that opens it, also after a fork.
        descriptor = os.open(_PAGEMAP_PATH, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(descriptor, page_count * _ENTRY_BYTES, first_page * _ENTRY_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        content = b""
    if len(content) < page_count * _ENTRY_BYTES:
        return numpy.ones(page_count, bool)
    entries = numpy.frombuffer(content, numpy.uint64)
    written: Array = ((entries & (_PRESENT | _SWAPPED)) != 0) & ((entries & _OF_FILE) == 0)
    return written
