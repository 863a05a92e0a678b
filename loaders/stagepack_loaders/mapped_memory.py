"""Memory that is mapped from a file, and replaced by memory of this process at the same address.

- Which memory of a mapped file this process has written to. A file that is mapped privately shares its pages with the page cache. The
  first write to a page gives the process a page of its own, which the kernel tells in ``/proc/self/pagemap``
  (https://docs.kernel.org/admin-guide/mm/pagemap.html). So writes of all kinds are seen, those that pass by torch too. All pages of a
  mapping that was replaced by memory of the process (`stagepack_loaders.file_leases`) count as written: they may not be those of the file
  any more.
"""

import ctypes
import mmap
import os
from functools import cache
from typing import Any, Final

import numpy

from stagepack_loaders.elements import Array

_PAGEMAP_PATH: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
# Bits of an entry: the page is in memory, in swap; it belongs to a file.
_PRESENT, _SWAPPED, _OF_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))
_PROTECTION: Final = mmap.PROT_READ | mmap.PROT_WRITE
# Of <sys/mman.h>; the module mmap lacks them.
_MAP_FIXED, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x10, 1, 2
_FAILED: Final = ctypes.c_void_p(-1).value


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


def new_memory(byte_count: int) -> mmap.mmap:
    """Return memory of this process.

    Large pages are not asked for: they are slow to get where memory is fragmented, and where a host has to find them for a virtual machine.
    There, 2 GB were read into large pages in 2.5 s, and into others in 0.8 s.
    """
    return mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def map_file(descriptor: int) -> mmap.mmap:
    """Map a file copy-on-write. The object has no descriptor of the file."""
    byte_count = os.fstat(descriptor).st_size
    memory = new_memory(byte_count)
    _call("mmap", _address(memory), byte_count, _PROTECTION, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0)
    return memory


def replace_by_copy(memory: mmap.mmap, descriptor: int) -> None:
    """Put memory of this process in the place of a mapped file: the bytes of the file, and the pages that were written as they are.

    Other threads may read the memory meanwhile. What they write may be lost.
    """
    page_count = -(-len(memory) // mmap.PAGESIZE)
    copy_bytes = page_count * mmap.PAGESIZE
    copy_address = _call("mmap", None, copy_bytes, _PROTECTION, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        copy = _pages(copy_address, page_count)
        # Not from the mapping: where the file was cut short, that would be a signal and not an error.
        _read(descriptor, copy.reshape(-1).data[: len(memory)])
        address = _address(memory)
        written = written_pages(address, copy_bytes)
        copy[written] = _pages(address, page_count)[written]
        _call("mremap", copy_address, copy_bytes, copy_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
    except BaseException:
        _call("munmap", copy_address, copy_bytes)
        raise


def _read(descriptor: int, destination: memoryview) -> None:
    position = 0
    while position < len(destination):
        read_bytes = os.preadv(descriptor, [destination[position:]], position)
        if not read_bytes:
            raise EOFError("the file was cut short")
        position += read_bytes


def _pages(address: int, page_count: int) -> Array:
    """The pages from an address on. `Shape [page, byte]`."""
    content: Any = (ctypes.c_uint8 * (page_count * mmap.PAGESIZE)).from_address(address)
    return numpy.frombuffer(content, numpy.uint8).reshape(page_count, mmap.PAGESIZE)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _call(function_name: str, *arguments: int | None) -> int:
    """Call a function of the C library that returns an address, or 0."""
    address = _functions()[function_name](*arguments)
    if address == _FAILED:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return address or 0


@cache
def _functions() -> dict[str, Any]:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    argument_types = {
        "mmap": [pointer, size, integer, integer, integer, ctypes.c_long],
        "mremap": [pointer, size, size, integer, pointer],
        "munmap": [pointer, size],
    }
    functions = {}
    for function_name, types in argument_types.items():
        function = functions[function_name] = getattr(library, function_name)
        function.argtypes, function.restype = types, pointer
    return functions
