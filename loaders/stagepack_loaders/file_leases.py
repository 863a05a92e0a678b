"""Files that are mapped and stay as they are: the kernel holds up whoever is about to change one, until this process has a copy.

A mapped file would change under the tensors on it: one that is overwritten in place would change the weights, and one that is cut short
would end the process (SIGBUS). So each mapped file has a read lease (https://man7.org/linux/man-pages/man2/fcntl.2.html, "Leases").
Before another process, or this one, opens the file for writing or truncates it, the kernel sends a signal and makes that process wait,
up to /proc/sys/fs/lease-break-time (45 s). In that time a thread of this module puts memory of this process, with the same bytes, in the
place of the mapping, at the same address, and gives the lease up. Renames over the file and its removal change nothing: the mapping
keeps the file.

A lease does not stop everything. A process that is not run for longer than the kernel waits loses the lease, as does one without memory
for the copy, and one that opens the file for writing itself while it holds the GIL: then the thread cannot run. Its calls raise a
`DigestError` from then on. ``open`` with ``O_RDONLY | O_TRUNC`` cuts a file short and breaks no lease. A thread that writes into the
mapped weights at the very moment when they are copied may have its write lost. A child that `os.fork` makes takes leases of its own,
before the fork. A child that C code forks has none.

Which memory of a mapped file this process has written to, the kernel tells in ``/proc/self/pagemap``
(https://docs.kernel.org/admin-guide/mm/pagemap.html): the first write to a page that is mapped privately gives the process a page of its
own. So writes of all kinds are seen, those that pass by torch too. All pages of a mapping that was replaced count as written: they may
not be those of the file any more.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import struct
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy

from stagepack.errors import DigestError, Problem
from stagepack_loaders.elements import Array
from stagepack_loaders.mounts import is_of_kind

# File systems whose files only change through this kernel. Other machines change the files of network file systems.
_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs"})
# Constants of <fcntl.h> and <sys/mman.h> that the modules fcntl and mmap lack.
_F_SETOWN_EX, _F_OWNER_TID = 15, 0
_MAP_FIXED, _MREMAP_MAYMOVE, _MREMAP_FIXED, _MADV_POPULATE_READ = 0x10, 1, 2, 22
_PROTECTION: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED: Final = ctypes.c_void_p(-1).value
_LARGE_PAGE_BYTES: Final = 2**21
_PAGEMAP_PATH: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
# Bits of an entry: the page is in memory, in swap; it belongs to a file.
_PRESENT, _SWAPPED, _OF_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))


@dataclass(eq=False, slots=True)
class _Lease:
    """The lease of a mapped file.

    Attributes:
        descriptor: an open file of its own, which has the lease.
        keeper_count: how many keep the file as it is; see `kept_files`.
        end: ends the lease; called when nobody uses the mapping any more.
    """

    descriptor: int
    file_name: str
    memory: weakref.ref[mmap.mmap]
    keeper_count: int = 0
    end: Any = field(init=False)

    def is_broken(self) -> bool:
        """Whether somebody waits for the end of the lease."""
        return fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK


_leases: set[_Lease] = set()
# Their files were changed before they were copied.
_lost: set[_Lease] = set()
# Held while a mapping is replaced, and while the process forks.
_lock = threading.RLock()
# During a fork: the leases of the child, with their mappings and descriptors.
_forking: list[tuple[_Lease, mmap.mmap, int]] = []


class _Watch:
    """The thread that the kernel tells of changes. Its signal goes to this thread alone, and is blocked there, so that no handler runs."""

    def __init__(self) -> None:
        # The default action of the signal ends the process: the thread must never run without blocking it.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        try:
            thread = threading.Thread(target=self._run, name="stagepack file leases", daemon=True)
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        assert thread.native_id is not None
        self.thread_id = thread.native_id

    def receive_signal_of(self, descriptor: int) -> None:
        """Have the signal of a lease sent to the thread."""
        fcntl.fcntl(descriptor, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, self.thread_id))

    def _run(self) -> None:
        while True:
            signal.sigwait({signal.SIGIO})
            _detach_broken()


_watch: _Watch | None = None


def map_with_lease(descriptor: int, file_name: str) -> mmap.mmap | None:
    """Map a file copy-on-write, with a lease that lasts as long as the mapping.

    None if there is no lease: another user owns the file, somebody has it open for writing, the file system is not a local one, or the
    kernel is not Linux.
    """
    global _watch
    status = os.fstat(descriptor)
    if sys.platform != "linux" or not is_of_kind(status.st_dev, _FILE_SYSTEMS):
        return None
    with _lock:
        if _watch is None:
            _watch = _Watch()
        lease_descriptor = os.dup(descriptor)
        if not _take_lease(lease_descriptor, _watch):
            os.close(lease_descriptor)
            return None
        memory = map_file(lease_descriptor)
        lease = _Lease(lease_descriptor, file_name, weakref.ref(memory))
        lease.end = weakref.finalize(memory, _end, lease)
        lease.end.atexit = False
        _leases.add(lease)
    return memory


def has_lease(memory: mmap.mmap) -> bool:
    """Whether a mapping of `map_with_lease` still has the bytes of its file, which nobody has changed."""
    return any(lease.memory() is memory for lease in list(_leases))


@contextlib.contextmanager
def kept_files(memories: Mapping[Path, mmap.mmap]) -> Iterator[None]:
    """Leave files as they are, while other code reads them by their paths: who is about to change one waits until the end."""
    with _lock:
        lease_of_memory = {id(lease.memory()): lease for lease in _leases}
        leases = {path: lease_of_memory.get(id(memory)) for path, memory in memories.items()}
        kept_leases = [lease for lease in leases.values() if lease is not None]
        for lease in kept_leases:
            lease.keeper_count += 1
    try:
        _check_paths(leases)
        yield
        _check_paths(leases)
    finally:
        with _lock:
            for lease in kept_leases:
                lease.keeper_count -= 1
        _detach_broken()


def _check_paths(leases: Mapping[Path, _Lease | None]) -> None:
    for path, lease in leases.items():
        if lease is None or not path.exists() or not os.path.samestat(os.fstat(lease.descriptor), path.stat()):
            message = "the file was replaced while it was loaded: load the bundle again"
            raise DigestError([Problem(rule="D1", where=path.name, message=message)])


def check_files_in_use() -> None:
    """Check that all files that are mapped are as they were when they were mapped, or copied as they were."""
    if _lost:
        message = "the file was changed while it was in use, and could not be copied before: load the bundle again"
        raise DigestError([Problem(rule="D2", where=lease.file_name, message=message) for lease in list(_lost)])


def _take_lease(descriptor: int, watch: _Watch) -> bool:
    """Give an open file a lease, of whose end the kernel tells a thread; return whether the kernel grants it."""
    try:
        watch.receive_signal_of(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def _detach_broken() -> None:
    """Replace the mappings of all files that somebody waits for."""
    with _lock:
        for lease in list(_leases):
            # In use while it is replaced: otherwise other memory could have its address by then.
            memory = lease.memory()
            if memory is not None and not lease.keeper_count and lease.is_broken():
                _detach(lease, memory)


def _detach(lease: _Lease, memory: mmap.mmap) -> None:
    """Put a copy in the place of a mapping, and give up the lease."""
    # First of all: what reads the file once the lease is given up must find that it has none (`has_lease`).
    _leases.discard(lease)
    try:
        replace_by_copy(memory, lease.descriptor)
        # An error if the kernel has ended the lease: what was copied may have been changed before.
        fcntl.fcntl(lease.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, EOFError, MemoryError):
        _lost.add(lease)
    else:
        lease.end()


def _end(lease: _Lease) -> None:
    _leases.discard(lease)
    _lost.discard(lease)
    os.close(lease.descriptor)


def _before_fork() -> None:
    """Take leases for the child. Until it has a thread of its own, the kernel tells this process, and waits for the child."""
    _lock.acquire()
    for lease in list(_leases):
        memory = lease.memory()
        if memory is None:
            continue
        with contextlib.suppress(OSError):
            child_descriptor = os.open(f"/proc/self/fd/{lease.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            if _watch is not None and _take_lease(child_descriptor, _watch):
                _forking.append((lease, memory, child_descriptor))
                continue
            os.close(child_descriptor)
        _detach(lease, memory)


def _after_fork_in_parent() -> None:
    for _, _, child_descriptor in _forking:
        os.close(child_descriptor)
    _forking.clear()
    _lock.release()


def _after_fork_in_child() -> None:
    global _watch
    try:
        _watch = None
        for lease, _, child_descriptor in _forking:
            _watch = _watch or _Watch()
            os.close(lease.descriptor)
            lease.descriptor = child_descriptor
            _watch.receive_signal_of(child_descriptor)
        _forking.clear()
    finally:
        _lock.release()
    # The parent was told of these.
    _detach_broken()


def written_pages(address: int, byte_count: int) -> Array:
    """Return for each page of memory that is mapped privately from a file whether this process may have written to it. `Shape [page]`.

    True where the kernel does not tell. Pages that are mapped in part count as a whole.
    """
    first_page, end_page = address // mmap.PAGESIZE, -(-(address + byte_count) // mmap.PAGESIZE)
    page_count = end_page - first_page if byte_count else 0
    try:
        # Not kept open: the file stays the one of the process that opens it, also after a fork.
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
    # Linux 6.7 aligns memory of whole large pages. There, half as many page faults map 2 GB.
    spare_bytes = -byte_count % _LARGE_PAGE_BYTES if byte_count > _LARGE_PAGE_BYTES else 0
    memory = new_memory(byte_count + spare_bytes)
    memory.resize(byte_count)
    _call("mmap", _address(memory), byte_count, _PROTECTION, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0)
    return memory


def populate(memory: mmap.mmap, start: int, byte_count: int) -> None:
    """Bring a part of a mapped file, from a page on, into the page tables of this process.

    Raises OSError if the file was cut short or cannot be read: an access to the memory would end the process.
    """
    if _function("madvise")(_address(memory) + start, byte_count, _MADV_POPULATE_READ):
        number = ctypes.get_errno()
        raise OSError(number, "it was cut short, or its disk fails" if number == errno.EFAULT else os.strerror(number))


@cache
def can_populate() -> bool:
    """Whether the kernel has what `populate` needs: Linux 5.14."""
    return not _function("madvise")(_address(memory := new_memory(1)), len(memory), _MADV_POPULATE_READ)


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
    address = _function(function_name)(*arguments)
    if address == _FAILED:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return address or 0


@cache
def _function(function_name: str) -> Any:
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    argument_types: dict[str, list[type]] = {
        "mmap": [pointer, size, integer, integer, integer, ctypes.c_long],
        "mremap": [pointer, size, size, integer, pointer],
        "munmap": [pointer, size],
        "madvise": [pointer, size, integer],
    }
    function = getattr(ctypes.CDLL(None, use_errno=True), function_name)
    function.argtypes, function.restype = argument_types[function_name], pointer
    return function


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
