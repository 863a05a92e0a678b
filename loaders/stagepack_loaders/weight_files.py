"""Weight files in memory: mapped, so that they are ready at once and processes share them, or copied.

- Ranges of weight files, read by threads into memory that the caller gives.
"""

import contextlib
import errno
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy

from stagepack.errors import Problem
from stagepack.format.bundle_files import FileSource
from stagepack.format.chunks import ByteProgress, File, FileRead, read_chunks
from stagepack.format.file_checks import FILE_GROUP, open_plain_file
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems, rule_error
from stagepack.format.weights import StoredTensor, parse_weight_header
from stagepack_loaders.file_leases import has_lease, map_with_lease
from stagepack_loaders.mapped_memory import new_memory
from stagepack_loaders.verified_files import VerifiedFiles, write_back

# Direct reads begin at a multiple of this in the file and in memory, and their length is one.
DIRECT_ALIGNMENT: Final = 4096


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
                message = "the file was cut short while it was read"
                raise rule_error("D1", path.name, message)
        return _weight_file(content, path.name)


def open_weight_files(
    bundle: Bundle,
    file_names: Iterable[str],
    *,
    verify: bool,
    copy: bool,
    progress: ByteProgress | None = None,
    unchanged: ByteProgress | None = None,
) -> dict[str, WeightFile]:
    """Bring weight files of a bundle into memory.

    progress: called by several threads with the number of bytes that were read.
    """
    entries = [bundle.files[file_name] for file_name in dict.fromkeys(file_names)]
    bundle.fetch(entry.name for entry in entries)
    read_group = functools.partial(
        _read_group, bundle, verify=verify, copy=copy, progress=progress, unchanged=unchanged
    )
    contents, problems = _read_in_groups(entries, read_group)
    if bundle.replace_damaged(problems):
        contents, problems = _read_in_groups(entries, read_group)
    raise_problems(problems)
    return {file_name: _weight_file(content, file_name) for file_name, content in contents.items()}


def _read_in_groups(
    entries: Sequence[File],
    read_group: Callable[[Sequence[File]], tuple[dict[str, mmap.mmap], list[Problem]]],
) -> tuple[dict[str, mmap.mmap], list[Problem]]:
    """Return the content of each file by name, and the problems of those that differ from the manifest."""
    contents: dict[str, mmap.mmap] = {}
    problems: list[Problem] = []
    for group_start in range(0, len(entries), FILE_GROUP):
        group_contents, group_problems = read_group(entries[group_start : group_start + FILE_GROUP])
        contents |= group_contents
        problems += group_problems
    return contents, problems


def _read_group(
    bundle: Bundle,
    entries: Sequence[File],
    *,
    verify: bool,
    copy: bool,
    progress: ByteProgress | None,
    unchanged: ByteProgress | None,
) -> tuple[dict[str, mmap.mmap], list[Problem]]:
    """As `_read_in_groups`, for files that are all open at the same time."""
    with contextlib.ExitStack() as open_files:
        files = {entry.name: open_files.enter_context(open_plain_file(bundle.path, entry)) for entry in entries}
        contents, reads, mapped_reads = {}, [], []
        for entry in entries:
            descriptor = files[entry.name].fileno()
            try:
                content = None if copy else map_with_lease(descriptor, entry.name)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                content = None  # A lease is an open file of its own, of which this process can have no more.
            if content is None:
                content = new_memory(entry.size)
                reads.append(FileRead(entry, descriptor, memoryview(content)))
            else:
                mapped_reads.append(FileRead(entry, descriptor))
            contents[entry.name] = content
        problems = read_chunks(reads, compare=verify, progress=progress)
        if verify:
            problems += _compare_mapped(mapped_reads, progress, unchanged)
            # Then the bytes in memory may not be the ones that were compared.
            problems += [
                Problem(
                    rule="D2", where=read.entry.name, message="the file was changed while it was loaded: load it again"
                )
                for read in mapped_reads
                if not has_lease(contents[read.entry.name])
            ]
    return contents, problems


def _compare_mapped(
    reads: Sequence[FileRead], progress: ByteProgress | None, unchanged: ByteProgress | None
) -> list[Problem]:
    """Compare open files with their digests, but those that are unchanged since they were compared; return the problems."""
    record = VerifiedFiles()
    new_reads = []
    for read in reads:
        if not record.has(record.identity(read.descriptor, read.entry)):
            new_reads.append(read)
        elif unchanged is not None:
            unchanged(read.entry.size)
    for read in new_reads:
        write_back(read.descriptor)
    identities = [record.identity(read.descriptor, read.entry) for read in new_reads]
    problems = read_chunks(new_reads, compare=True, progress=progress)
    damaged_files = {problem.where for problem in problems}
    for read, identity in zip(new_reads, identities, strict=True):
        if read.entry.name not in damaged_files and record.identity(read.descriptor, read.entry) == identity:
            record.add(identity)
    return problems


def _weight_file(content: mmap.mmap, file_name: str) -> WeightFile:
    return WeightFile(content, parse_weight_header(content, file_name))


class WeightReader(Protocol):
    """Reads bytes of the files of a bundle. It is called by several threads at a time."""

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        """Fill memory with the bytes of a file.

        Args:
            file_name: the name of the file in the bundle.
            start: the first byte.
            memory: writeable memory, as long as the range.

        Raises:
            DigestError: the file is missing, cannot be read, or ends before the range does.
        """


class FolderReader:
    """Reads the files of a folder. What the page cache lacks is read past it, where the file system can.

    A cold file of this machine was read at 0.5 GB/s through the page cache and at 2.0 GB/s past it.
    """

    def __init__(self, folder: Path, source: FileSource | None = None) -> None:
        self._folder = folder
        self._source = source
        self._lock = threading.Lock()
        self._without_direct: set[str] = set()
        self._descriptors: dict[str, int] = {}
        self._direct_descriptors: dict[str, int] = {}
        self._opened: list[int] = []
        weakref.finalize(self, _close_all, self._opened)

    def hold(self, file_names: Iterable[str]) -> list[str]:
        """Open files now: they are the ones that are read, also when another bundle takes the place of this one."""
        replaced = []
        for file_name in file_names:
            with contextlib.suppress(OSError):
                held, current = os.fstat(self._descriptor(file_name)), os.stat(self._folder / file_name)
                if not os.path.samestat(held, current):
                    replaced.append(file_name)
                    with self._lock:
                        del self._descriptors[file_name]
                        self._direct_descriptors.pop(file_name, None)
                    self._descriptor(file_name)
        return replaced

    def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
        """See `WeightReader`."""
        try:
            position = self._read_direct(file_name, start, memory)
            while position < len(memory):
                descriptor = self._descriptor(file_name)
                length = os.preadv(descriptor, [memory[position:]], start + position)
                if not length:
                    message = f"the file ends in the bytes {start} to {start + len(memory)}"
                    raise rule_error("D1", file_name, message)
                position += length
        except OSError as error:
            message = f"the file cannot be read: {error.strerror}"
            raise rule_error("D1", file_name, message) from None

    def _read_direct(self, file_name: str, start: int, memory: memoryview) -> int:
        """Read past the page cache the part of a range that is not in it. Return the number of bytes that were read."""
        address = numpy.frombuffer(memory, numpy.uint8).ctypes.data
        length = len(memory) - len(memory) % DIRECT_ALIGNMENT
        if start % DIRECT_ALIGNMENT or address % DIRECT_ALIGNMENT or not length or self._is_cached(file_name, start):
            return 0
        descriptor = None if file_name in self._without_direct else self._direct_descriptor(file_name)
        position = 0
        while descriptor is not None and position < length:
            try:
                read_length = os.preadv(descriptor, [memory[position:length]], start + position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system asks for a larger alignment. It is read through the page cache from now on.
                self._give_up_direct(file_name)
                return position
            position += read_length
            if read_length % DIRECT_ALIGNMENT or not read_length:
                break
        return position

    def _is_cached(self, file_name: str, start: int) -> bool:
        """Whether the first byte of a range can be read without waiting for the disk, or the system cannot tell."""
        descriptor = self._descriptor(file_name)
        if not hasattr(os, "RWF_NOWAIT"):
            return True
        try:
            os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _give_up_direct(self, file_name: str) -> None:
        """Read a file through the page cache from now on. Other threads may still use the descriptor."""
        with self._lock:
            self._without_direct.add(file_name)

    def _descriptor(self, file_name: str) -> int:
        """The open file."""
        with self._lock:
            if file_name not in self._descriptors:
                self._descriptors[file_name] = os.open(self._folder / file_name, os.O_RDONLY | os.O_CLOEXEC)
                self._opened.append(self._descriptors[file_name])
            return self._descriptors[file_name]

    def _direct_descriptor(self, file_name: str) -> int | None:
        """The same file, opened for direct reads; None where the file system has none."""
        descriptor = self._descriptor(file_name)
        with self._lock:
            if file_name not in self._direct_descriptors and hasattr(os, "O_DIRECT"):
                # Not by its path, where another file may be by now.
                with contextlib.suppress(OSError):
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
                    self._direct_descriptors[file_name] = os.open(f"/proc/self/fd/{descriptor}", flags)
                    self._opened.append(self._direct_descriptors[file_name])
            if file_name not in self._direct_descriptors:
                self._without_direct.add(file_name)
            return self._direct_descriptors.get(file_name)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
