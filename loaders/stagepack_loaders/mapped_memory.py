"""Memory that is mapped from a file, and replaced by memory of this process at the same address."""

import ctypes
import mmap
import os
from functools import cache
from typing import Any, Final

import numpy

from stagepack_loaders.elements import Array
from stagepack_loaders.written_memory import written_pages

_PROTECTION: Final = mmap.PROT_READ | mmap.PROT_WRITE
# Of <sys/mman.h>; the module mmap lacks them.
_MAP_FIXED, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x10, 1, 2
_FAILED: Final = ctypes.c_void_p(-1).value


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
