"""Files of a folder that a document lists with their digests: of a bundle, a delta or an adapter. They are read on request."""

import contextlib
import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Self

from stagepack.errors import DigestError, FileNotListedError, Problem
from stagepack.format import limits
from stagepack.format.chunk_reads import ByteProgress, FileRead, Fill
from stagepack.format.chunks import File, check_content
from stagepack.format.file_checks import (
    FileVersion,
    check_digests,
    open_plain_file,
    open_read,
    read_listed_file,
    read_plain_file,
)
from stagepack.format.file_source import FilePatches, FileSource, FileStream
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME, format_names, raise_problems, rule_error
from stagepack.format.weights import StoredTensor, parse_header_bytes, parse_weight_header

_PIECE_BYTES: Final = 8 * 2**20


class ListedFiles(ABC):
    """The files that the document ``manifest.json`` of a folder lists.

    Attributes:
        path: the folder.
        source: where the files come from that the folder does not have; None for a local folder.
        patches: makes files of those in the folder; None if the folder has the files themselves.
        compares_digests: files are compared with their digests when they are read.
    """

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        self.path = Path(path)
        self.source = source
        self.patches: FilePatches | None = None
        self.compares_digests = True

    @property
    @abstractmethod
    def digest(self) -> str:
        """The SHA-256 of the document in hexadecimal."""

    @property
    @abstractmethod
    def document_format(self) -> str:
        """The format that the document states."""

    @property
    @abstractmethod
    def listed(self) -> Sequence[File]:
        """The entries of the files."""

    @property
    def location(self) -> str:
        """The folder of the bundle, or the URL of a remote one."""
        return str(self.path) if self.source is None else self.source.location

    def without_digests(self) -> Self:
        """Return the same bundle, whose graphs and other files are read without a comparison with their digests.

        The rules of the format are checked all the same. `check_digests` and `verify` still compare.
        """
        unverified_bundle = copy.copy(self)
        unverified_bundle.compares_digests = False
        return unverified_bundle

    @cached_property
    def files(self) -> dict[str, File]:
        """The entries of the files that the manifest lists, by file name."""
        return {file.name: file for file in self.listed}

    def read(self, file_name: str, max_bytes: int = limits.GRAPH_BYTES) -> bytes:
        """Read a whole file into memory and compare it with its digest. Use it for files other than weight files.

        Bundles of `without_digests` do not compare.

        Args:
            file_name: the name of a file that the manifest lists.
            max_bytes: refuse a larger file.

        Raises:
            FileNotListedError: the manifest does not list the file.
            DigestError: the file is missing or differs from the one that the manifest lists.
            LimitError: the manifest states more than `max_bytes`.
        """
        entry = self._entry(file_name)
        if entry.size > max_bytes:
            raise rule_error("L1", file_name, f"expected at most {max_bytes} bytes, found {entry.size}")
        self.fetch([file_name])
        content, problems = self._read_content(entry)
        if self.replace_damaged(problems):
            content, problems = self._read_content(entry)
        raise_problems(self.causes(problems))
        return content

    def _read_content(self, entry: File) -> tuple[bytes, list[Problem]]:
        """The content of a file, and how it differs from the manifest."""
        try:
            content = self._read_listed(entry)
        except DigestError as error:
            return b"", list(error.problems)
        return content, check_content(entry, content) if self.compares_digests else []

    def _read_listed(self, entry: File) -> bytes:
        if self.patches is None or self.patches.patch_of(entry.name) is None:
            return read_listed_file(self.path, entry)
        content = bytearray(entry.size)
        with contextlib.ExitStack() as open_files:
            self.open_read(open_files, entry.name).fill(0, memoryview(content))
        return bytes(content)

    def has_own(self, file_name: str) -> bool:
        """Whether the folder has a file itself, neither as a link nor to be made of another one."""
        is_patched = self.patches is not None and self.patches.patch_of(file_name) is not None
        return not is_patched and not (self.path / file_name).is_symlink()

    def open_read(self, open_files: contextlib.ExitStack, file_name: str) -> FileRead:
        """Open a file until the end of a ``with`` statement, to read it by chunk."""
        return open_read(open_files, self.path, self._entry(file_name), self.patches)

    def pieces(self, file_name: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file from one position to another, without a comparison with its digest."""
        self.fetch([file_name])
        with contextlib.ExitStack() as open_files:
            read = self.open_read(open_files, file_name)
            for position in range(start, end, _PIECE_BYTES):
                content = bytearray(min(_PIECE_BYTES, end - position))
                read.fill(position, memoryview(content))
                yield bytes(content)

    def read_signature(self) -> bytes | None:
        """Return the content of ``model.sig``, the signature over all other files; None if the bundle has none. It is not verified.

        Raises:
            FormatError: it is not a plain file, or too large.
            RemoteError: the signature of a remote bundle cannot be downloaded.
        """
        if self.source is not None:
            return self.source.read_signature()
        return read_plain_file(self.path, SIGNATURE_NAME, limits.SIGNATURE_BYTES)

    def check_digests(self, file_names: Iterable[str], progress: ByteProgress | None = None) -> dict[str, FileVersion]:
        """Compare files with their digests, in as many threads as there are processors.

        Args:
            file_names: the names of files that the manifest lists.
            progress: called by the threads with the number of bytes that were compared.

        Returns:
            The version of each file, by name: a file that still has it has the bytes that were compared.

        Raises:
            FileNotListedError: the manifest does not list a file.
            DigestError: files are missing or differ from those that the manifest lists.
        """
        versions: dict[str, FileVersion] = {}
        entries = [self._entry(file_name) for file_name in file_names]
        raise_problems(self.digest_problems(entries, progress, versions))
        return versions

    def unlisted_files(self) -> list[str]:
        """Return the names of the files and folders beside the bundle's (D4), in order: no method reads them, no signature is over them."""
        try:
            found_names = os.listdir(self.path)
        except FileNotFoundError:  # all files are missing: `check_digests` says so
            return []
        return sorted(set(found_names) - set(self.files) - {MANIFEST_NAME, SIGNATURE_NAME})

    def unlisted_problems(self) -> list[Problem]:
        """Return a problem for each of the unlisted files (D4)."""
        message = "the file is not listed in the manifest"
        return [Problem(rule="D4", where=file_name[:200], message=message) for file_name in self.unlisted_files()]

    def fetch(self, file_names: Iterable[str]) -> None:
        """Download files of a remote bundle, several at a time, unless its folder in the cache has them. A local bundle has all files.

        Args:
            file_names: the names of files that the manifest lists.

        Raises:
            FileNotListedError: the manifest does not list a file.
            RemoteError: a file cannot be downloaded.
            DigestError: the server has other files than the manifest lists.
            WriteError: the cache cannot be written.
        """
        if self.patches is not None:
            self.patches.fetch(file_names)
        elif self.source is not None:
            self.source.fetch([self._entry(file_name) for file_name in file_names])

    def digest_problems(
        self, entries: Sequence[File], progress: ByteProgress | None, versions: dict[str, FileVersion] | None = None
    ) -> list[Problem]:
        """Compare files with their digests. Damaged files in the cache of a remote bundle are downloaded again, once.

        Args:
            entries: the files.
            progress: called by several threads with the number of bytes that were compared.
            versions: gets the version that each file had before it was read, by file name.

        Returns:
            The problems of the files that differ.

        Raises:
            RemoteError, DigestError, WriteError: see `fetch`.
        """
        self.fetch(entry.name for entry in entries)
        problems = check_digests(self.path, entries, progress, versions, self.patches)
        if self.replace_damaged(problems):
            problems = check_digests(self.path, entries, progress, versions, self.patches)
        return self.causes(problems)

    def causes(self, problems: list[Problem]) -> list[Problem]:
        """Return the problems of what files are made of in the place of those of the files."""
        if self.patches is None:
            return problems
        return [cause for problem in problems for cause in self.patches.damage(problem.where) or [problem]]

    def replace_damaged(self, problems: Iterable[Problem]) -> bool:
        """Download files again that were damaged in the cache.

        Args:
            problems: the problems of files that differ from the manifest.

        Returns:
            Whether files were downloaded: there are problems, and the bundle is a remote one.

        Raises:
            RemoteError, DigestError, WriteError: see `fetch`.
        """
        if self.source is None or self.patches is not None:
            return False
        damaged = [self._entry(problem.where) for problem in problems]
        if not damaged:
            return False
        self.source.discard(damaged)
        self.source.fetch(damaged)
        return True

    def stream(self, file_names: Iterable[str]) -> FileStream | None:
        """Begin to download files of a remote bundle; return a handle that reads them while they arrive. None for a local bundle.

        Args:
            file_names: the names of files that the manifest lists, in the order in which they are needed.

        Raises:
            FileNotListedError: the manifest does not list a file.
        """
        entries = [self._entry(file_name) for file_name in dict.fromkeys(file_names)]
        return None if self.source is None or self.patches is not None else self.source.stream(entries)

    def read_headers(
        self, file_names: Iterable[str], stream: FileStream | None = None
    ) -> list[tuple[str, dict[str, StoredTensor]]]:
        """Read the headers of weight files.

        Args:
            file_names: the names of the weight files.
            stream: reads files while they are downloaded, from `stream`; None to download them first.

        Returns:
            The name of each file, and its tensors by name, in the order of the file.

        Raises:
            FileNotListedError: the manifest does not list a file.
            DigestError: a file is missing, cannot be read, or has another size.
            FormatError: a header breaks a rule.
            RemoteError, WriteError: see `fetch`.
        """
        file_names = tuple(file_names)
        if stream is None:
            self.fetch(file_names)
        return [(file_name, self._read_header(self._entry(file_name), stream)) for file_name in file_names]

    def _read_header(self, entry: File, stream: FileStream | None) -> dict[str, StoredTensor]:
        if stream is not None:
            return _parse_header(partial(stream.read_into, entry.name), entry)
        if self.patches is None:
            with open_plain_file(self.path, entry) as file:
                return parse_weight_header(file, entry.name)
        with contextlib.ExitStack() as open_files:
            return _parse_header(self.open_read(open_files, entry.name).fill, entry)

    def _entry(self, file_name: str) -> File:
        if file_name not in self.files:
            listed = format_names(sorted(self.files))
            raise FileNotListedError(f"{self.location}: expected one of the files {listed}, found {file_name[:200]!r}")
        return self.files[file_name]


def _parse_header(fill: Fill, entry: File) -> dict[str, StoredTensor]:
    position = 0

    def read(byte_count: int) -> bytes:
        nonlocal position
        content = bytearray(min(byte_count, entry.size - position))
        fill(position, memoryview(content))
        position += len(content)
        return bytes(content)

    return parse_header_bytes(read, entry.size, entry.name)
