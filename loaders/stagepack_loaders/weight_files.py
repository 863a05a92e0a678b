"""Weight files in memory: mapped, so that they are ready at once and processes share them, or copied."""

import contextlib
import errno
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagepack.errors import DigestError, Problem
from stagepack.format.chunk_reading import FileRead, read_chunks
from stagepack.format.chunks import ByteProgress
from stagepack.format.file_checks import FILE_GROUP, open_plain_file, raise_digest_problems
from stagepack.format.manifest import File
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor, parse_weight_header
from stagepack_loaders.file_leases import has_lease, map_with_lease
from stagepack_loaders.mapped_memory import new_memory
from stagepack_loaders.verified_files import VerifiedFiles, write_back


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
                raise DigestError([Problem(rule="D1", where=path.name, message=message)])
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
    raise_digest_problems(problems)
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
