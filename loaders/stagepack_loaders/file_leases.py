"""Files that are mapped and stay as they are: the kernel holds up whoever is about to change one, until this process has a copy.

A mapped file would change under the tensors on it: one that is overwritten in place would change the weights, and one that is cut short
would end the process (SIGBUS). So each mapped file has a read lease (https://man7.org/linux/man-pages/man2/fcntl.2.html, "Leases").
Before another process, or this one, opens the file for writing or truncates it, the kernel sends a signal and makes that process wait,
up to /proc/sys/fs/lease-break-time (45 s). In that time a thread of this module puts memory of this process, with the same bytes, in the
place of the mapping, at the same address, and gives the lease up. Renames over the file and its removal change nothing: the mapping
keeps the file.

What a lease does not stop, and what becomes of it:

- A process that is not run for longer than the kernel waits loses the lease, as does one without memory for the copy, and one that opens
  the file for writing itself while it holds the GIL: then the thread cannot run. Its calls raise a `DigestError` from then on.
- ``open`` with ``O_RDONLY | O_TRUNC`` cuts a file short and breaks no lease.
- A thread that writes into the mapped weights at the very moment when they are copied may have its write lost.
- A child that `os.fork` makes takes leases of its own, before the fork. One that C code forks has none.
"""

import contextlib
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
from pathlib import Path
from typing import Any, Final

from stagepack.errors import DigestError, Problem
from stagepack_loaders.mapped_memory import map_file, replace_by_copy
from stagepack_loaders.verified_files import is_of_kind

# Those of the kernel's own whose files only change through it. Of network file systems, other machines change the files.
_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs"})

# Of <fcntl.h>; the module fcntl lacks them.
_F_SETOWN_EX, _F_OWNER_TID = 15, 0


@dataclass(eq=False, slots=True)
class _Lease:
    """The lease of a mapped file.

    Attributes:
        descriptor: an open file of its own, which has the lease.
        file_name: its name.
        memory: the mapping.
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

    def _run(self) -> None:
        while True:
            signal.sigwait({signal.SIGIO})
            _detach_broken()


_watch: _Watch | None = None


def map_with_lease(descriptor: int, file_name: str) -> mmap.mmap | None:
    """Map a file copy-on-write, with a lease that lasts as long as the mapping.

    The result is the mapping; None if there is no lease: another user owns the file, somebody has it open for writing, the file system is
        not a local one, or the kernel is not Linux.
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
    """Whether a mapping of `map_with_lease` is still that of its file, which nobody has changed."""
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
    """Give an open file a lease, and tell the thread of its end; return whether the kernel grants it."""
    try:
        _set_owner(descriptor, watch)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def _set_owner(descriptor: int, watch: _Watch) -> None:
    """Have the signal of a lease sent to a thread."""
    fcntl.fcntl(descriptor, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, watch.thread_id))


def _detach_broken() -> None:
    """Replace the mappings of all files that somebody waits for."""
    with _lock:
        for lease in list(_leases):
            # In use while it is replaced: otherwise its address could be that of other memory by then.
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
            _set_owner(child_descriptor, _watch)
        _forking.clear()
    finally:
        _lock.release()
    # The parent was told of these.
    _detach_broken()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
