"""Weight files in memory: mapped, so that they are ready at once and processes share them, or copied; or read in ranges."""

import contextlib
import errno
import mmap
import os
import re
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy
from blake3 import blake3

from stagepack.adapter.opened import OpenAdapter
from stagepack.errors import Problem
from stagepack.format.chunk_reads import FileRead, read_chunks
from stagepack.format.chunks import CHUNK_BYTES, File, check_content
from stagepack.format.file_checks import FILE_GROUP
from stagepack.format.file_source import FilePatch, FilePatches
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems, rule_error
from stagepack.format.weights import StoredTensor, parse_weight_header
from stagepack_loaders.base import Loading
from stagepack_loaders.file_leases import (
    can_populate,
    has_lease,
    map_with_lease,
    new_memory,
    populate,
)
from stagepack_loaders.mounts import devices_asked_once, is_of_kind

# Direct reads begin at a multiple of this in the file and in memory, and their length is one.
DIRECT_ALIGNMENT: Final = 4096
# How long the record of another start is kept after its last entry: machines may share a home folder.
_KEPT_SECONDS: Final = 30 * 86_400
_BOOT_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
# The folder of the record of verified files; empty to keep none.
VERIFIED_FILES_VARIABLE: Final = "STAGEPACK_VERIFIED_FILES"
_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs"})
_SETTLED_SECONDS = 2.0

# Fills memory with the bytes of a file of the bundle, by its name, from a position on. Several threads call it at a time. It raises a
# `DigestError` if the file is missing, cannot be read, or ends before the memory is full.
ReadInto = Callable[[str, int, memoryview], None]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file in memory.

    Attributes:
        content: its bytes. Writing to them does not change the file.
        tensors: the positions of its tensors, by name.
    """

    content: mmap.mmap
    tensors: Mapping[str, StoredTensor]


def map_weight_file(path: Path) -> WeightFile:
    """Map a weight file copy-on-write, or copy it if it can have no lease; see `stagepack_loaders.file_leases`."""
    with path.open("rb") as file:
        content = map_with_lease(file.fileno(), path.name)
        if content is None:
            content = new_memory(os.fstat(file.fileno()).st_size)
            if file.readinto(content) < len(content):
                raise rule_error("D1", path.name, "the file was cut short while it was read")
    return WeightFile(content, parse_weight_header(content, path.name))


def map_adapter_file(adapter: OpenAdapter, *, verify: bool) -> WeightFile:
    """Map the file of the tensors of an adapter, which are where its header said when it was opened."""
    [entry] = adapter.listed
    file = map_weight_file(adapter.path / entry.name)
    raise_problems(check_content(entry, memoryview(file.content)) if verify else ())
    if file.tensors != adapter.tensors:
        raise rule_error("D2", entry.name, "the file was changed while it was loaded: load it again")
    return file


def open_weight_files(
    bundle: Bundle, file_names: Iterable[str], loading: Loading, *, verify: bool
) -> dict[str, WeightFile]:
    """Map weight files of a bundle, or copy those that can have no lease, and all with the option `copy`."""
    entries = [bundle.files[file_name] for file_name in dict.fromkeys(file_names)]
    bundle.fetch(entry.name for entry in entries)
    contents, problems = _read_files(bundle, entries, loading, verify=verify)
    if bundle.replace_damaged(problems):
        contents, problems = _read_files(bundle, entries, loading, verify=verify)
    raise_problems(problems)
    return {
        file_name: WeightFile(content, parse_weight_header(content, file_name))
        for file_name, content in contents.items()
    }


def _read_files(
    bundle: Bundle, entries: Sequence[File], loading: Loading, *, verify: bool
) -> tuple[dict[str, mmap.mmap], list[Problem]]:
    """Return the content of each file by name, and the problems of those that differ from the manifest."""
    contents: dict[str, mmap.mmap] = {}
    problems: list[Problem] = []
    for group_start in range(0, len(entries), FILE_GROUP):
        copied: list[FileRead] = []
        mapped: list[FileRead] = []
        patched: list[FileRead] = []
        with contextlib.ExitStack() as open_files, devices_asked_once():
            group = entries[group_start : group_start + FILE_GROUP]
            # Before leases take descriptors: a file that can have no lease is copied, but one that cannot be opened is an error.
            for read in [bundle.open_read(open_files, entry.name) for entry in group]:
                content = None if loading.options.copy else _map_if_possible(read)
                if content is None:
                    content = new_memory(read.entry.size)
                    copied.append(replace(read, destination=memoryview(content)))
                else:
                    (mapped if read.patch is None else patched).append(_mapped_read(read, content))
                contents[read.entry.name] = content
            problems += read_chunks([*copied, *patched], compare=verify, progress=loading.progress)
            if verify:
                problems += _compare_mapped(mapped, loading)
            # Without a lease, the bytes in memory may not be the ones that were compared or patched.
            message = "the file was changed while it was loaded: load it again"
            leased = [*(mapped if verify else ()), *patched]
            changed = [read.entry.name for read in leased if not has_lease(contents[read.entry.name])]
            problems += [Problem(rule="D2", where=file_name, message=message) for file_name in changed]
    return contents, bundle.causes(problems)


def _mapped_read(read: FileRead, content: mmap.mmap) -> FileRead:
    """A read that compares the bytes of a mapping, and makes them ready for their first use; patches are applied in the mapping.

    2 GB were read and hashed by two threads in 0.18 s, and the first answer then took 0.19 s, half of it for page faults. In the mapping
    they are hashed in 0.18 s, page faults included, and the answer takes 0.09 s.
    """
    if not can_populate():
        return read
    descriptor = _descriptor(read)

    def bring(start: int, memory: memoryview) -> None:
        # Page faults read a cold file in small parts: at a third of the speed.
        if not is_cached(descriptor, start):
            os.posix_fadvise(descriptor, start, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        populate(content, start, len(memory))
        if read.patch is not None:
            read.patch.apply(start, memory)

    return replace(read, destination=memoryview(content), populate=bring)


def _descriptor(read: FileRead) -> int:
    assert read.descriptor is not None
    return read.descriptor


def _map_if_possible(read: FileRead) -> mmap.mmap | None:
    """Map a file, or the file that it is made of in memory, if this is as long."""
    origin = read.entry if read.patch is None else read.patch.origin
    if origin is None or origin.size != read.entry.size or (read.patch is not None and not can_populate()):
        return None
    try:
        return map_with_lease(_descriptor(read), read.entry.name)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None  # A lease is an open file of its own, of which this process can have no more.


def _compare_mapped(reads: Sequence[FileRead], loading: Loading) -> list[Problem]:
    """Compare open files with their digests, but those that are unchanged since they were compared; return the problems."""
    record = VerificationRecord(VERIFIED_FILES_VARIABLE, "verified")
    new_reads = []
    for read in reads:
        if not record.has(_identity(read)):
            new_reads.append(read)
        elif loading.unchanged is not None:
            loading.unchanged(read.entry.size)
    identities = [_lasting_identity(read, record) for read in new_reads]
    problems = read_chunks(new_reads, compare=True, progress=loading.progress)
    damaged_files = {problem.where for problem in problems}
    for read, identity in zip(new_reads, identities, strict=True):
        if read.entry.name not in damaged_files and _identity(read) == identity:
            record.add(identity)
    return problems


def _lasting_identity(read: FileRead, record: "VerificationRecord") -> str | None:
    """The name of the entry of a file that any later write changes; None if the record takes none."""
    if not record.takes(_identity(read)):
        return None  # Synchronizing takes up to seconds just after a file was written.
    with contextlib.suppress(OSError):
        os.fsync(_descriptor(read))  # Later writes through mappings change the ctime.
    return _identity(read)


def _identity(read: FileRead) -> str | None:
    """The name of the entry of a file in the record; None if the file cannot have one."""
    status = os.fstat(_descriptor(read))
    is_owned = status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_settled = status.st_ctime + _SETTLED_SECONDS < time.time()
    if not is_owned or not is_settled or not is_of_kind(status.st_dev, _FILE_SYSTEMS):
        return None
    inode = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return blake3(repr((*inode, read.entry.size, read.entry.blake3)).encode()).hexdigest()


class VerificationRecord:
    """What this user has verified since the machine was started: empty files, whose names are hashes of all that they depend on.

    The folder of the record belongs to this user, and nobody else may write to it; otherwise it has no entries, and takes none.

    A file that is mapped need not be hashed again at each load. A record says: the content of this inode had this digest, when the kernel
    gave it this change time. Every write changes the change time (ctime), and nobody but root can set it back. The record holds only under
    conditions that make this true, and is not used otherwise:

    - The file belongs to this user or to root, and nobody else may write to it.
    - The file system is one of the kernel's own that changes the ctime at writes through shared mappings too. (tmpfs does not.) The file
      was written back before it was hashed, so that a later write to any of its pages is seen.
    - The ctime is seconds older than the comparison: two writes within a tick of the kernel's clock have the same one.
    - The machine has not been restarted since: then every byte comes from the disk again.
    """

    def __init__(self, variable: str, folder_name: str) -> None:
        self._folder = _record_folder(variable, folder_name)

    def takes(self, identity: str | None) -> bool:
        """Whether something of this identity can be recorded."""
        return self._folder is not None and identity is not None

    def has(self, identity: str | None) -> bool:
        """Whether something of this identity was verified."""
        return self._folder is not None and identity is not None and (self._folder / identity).is_file()

    def add(self, identity: str | None) -> None:
        """Record that something was verified. Its identity must have been the same before and after that."""
        if self._folder is not None and identity is not None:
            # Without space or the right to write, it is verified again.
            with contextlib.suppress(OSError):
                os.close(os.open(self._folder / identity, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def _record_folder(variable: str, folder_name: str) -> Path | None:
    """The folder of the record of this start of the machine; None if there can be none."""
    try:
        boot_id = _BOOT_ID_PATH.read_text().strip()
        chosen_folder = os.environ.get(variable)
        if chosen_folder == "":
            return None
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(chosen_folder).expanduser() if chosen_folder else cache_folder / "stagepack"
        records = root / folder_name
        for folder in (root, records, records / boot_id):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or writable:
                return None
        for old_record in records.iterdir():
            is_old = time.time() - old_record.lstat().st_mtime > _KEPT_SECONDS
            if old_record.name != boot_id and is_old and _BOOT_ID.fullmatch(old_record.name):
                shutil.rmtree(old_record, ignore_errors=True)
    # No home folder, no /proc, no right to write.
    except (OSError, RuntimeError):
        return None
    return records / boot_id


def is_cached(descriptor: int, position: int) -> bool:
    """Whether a byte of a file can be read without waiting for the disk, or the system cannot tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class FolderReader:
    """Reads ranges of the files of a folder. What the page cache lacks is read past it, where the file system can.

    A cold file of this machine was read at 0.5 GB/s through the page cache and at 2.0 GB/s past it.
    """

    def __init__(self, folder: Path, patches: FilePatches | None = None) -> None:
        self._folder = folder
        self._patches = patches
        self._lock = threading.Lock()
        self._files: dict[str, _OpenFile] = {}

    def hold(self, file_names: Iterable[str]) -> list[str]:
        """Open files now: they are the ones that are read, also when another bundle takes the place of this one.

        Those whose paths have other files than the open ones are opened anew; their names are returned.
        """
        replaced = []
        for file_name in file_names:
            if self._patch_of(file_name) is not None:
                continue
            with contextlib.suppress(OSError):
                open_file = os.fstat(self._file(file_name).descriptor)
                if not os.path.samestat(open_file, os.stat(self._folder / file_name)):
                    replaced.append(file_name)
                    with self._lock:
                        del self._files[file_name]
                    self._file(file_name)
        return replaced

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        """See `ReadInto`."""
        patch = self._patch_of(file_name)
        origin_bytes = len(memory)
        if patch is not None:
            origin_bytes = min(max(0 if patch.origin is None else patch.origin.size - start, 0), len(memory))
            memory[origin_bytes:] = bytes(len(memory) - origin_bytes)
        if origin_bytes:
            self._read_into(file_name, start, memory[:origin_bytes])
        if patch is not None:
            patch.apply(start, memory)

    def _patch_of(self, file_name: str) -> FilePatch | None:
        return None if self._patches is None else self._patches.patch_of(file_name)

    def _read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        try:
            file = self._file(file_name)
            position = file.read_direct(start, memory)
            while position < len(memory):
                length = os.preadv(file.descriptor, [memory[position:]], start + position)
                if not length:
                    message = f"the file ends in the bytes {start} to {start + len(memory)}"
                    raise rule_error("D1", file_name, message)
                position += length
        except OSError as error:
            message = f"the file cannot be read: {error.strerror}"
            raise rule_error("D1", file_name, message) from None

    def _file(self, file_name: str) -> "_OpenFile":
        with self._lock:
            if file_name not in self._files:
                self._files[file_name] = _OpenFile(self._folder / file_name)
            return self._files[file_name]


class _OpenFile:
    """A file that several threads read. It is closed with the object."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._opened = [self.descriptor]
        self._reads_direct = hasattr(os, "O_DIRECT")
        weakref.finalize(self, _close_all, self._opened)

    def read_direct(self, start: int, memory: memoryview) -> int:
        """Read past the page cache the part of a range that is not in it. Return the number of bytes that were read."""
        address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
        length = len(memory) - len(memory) % DIRECT_ALIGNMENT
        if start % DIRECT_ALIGNMENT or address % DIRECT_ALIGNMENT or not length or is_cached(self.descriptor, start):
            return 0
        descriptor = self._direct_descriptor if self._reads_direct else None
        position = 0
        while descriptor is not None and position < length:
            try:
                read_length = os.preadv(descriptor, [memory[position:length]], start + position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system asks for a larger alignment. The file is read through the page cache from now on.
                self._reads_direct = False
                return position
            position += read_length
            if read_length % DIRECT_ALIGNMENT or not read_length:
                break
        return position

    @cached_property
    def _direct_descriptor(self) -> int | None:
        """The same file, opened for direct reads; None where the file system has none."""
        with contextlib.suppress(OSError):
            # Not by its path, where another file may be by now.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            self._opened.append(os.open(f"/proc/self/fd/{self.descriptor}", flags))
            return self._opened[-1]
        return None


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
