"""The files of a bundle: the manifest, which is read when a bundle is opened, and the others on request."""

import copy
import errno
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from stagepack.errors import DigestError, FileNotListedError, NotABundleError, Problem, StagepackError
from stagepack.format import limits
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.chunks import File, check_content
from stagepack.format.file_checks import (
    FileVersion,
    NotPlainFileError,
    check_digests,
    near_path_hint,
    open_plain_file,
    read_limited,
    read_listed_file,
    read_plain_file,
)
from stagepack.format.file_source import FileSource, FileStream
from stagepack.format.manifest import Manifest
from stagepack.format.manifest_codec import parse_manifest
from stagepack.format.rules import (
    MANIFEST_NAME,
    MODEL_CONFIG_NAME,
    SIGNATURE_NAME,
    format_names,
    raise_problems,
    rule_error,
)
from stagepack.format.weights import StoredTensor, parse_header_bytes, parse_weight_header

# What opening a file fails with if there is none, or a link to itself or a socket.
_NO_PLAIN_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the bundle in a folder."""
    path = folder / MANIFEST_NAME
    try:
        content = read_limited(path, limits.MANIFEST_BYTES)
    except OSError as error:
        if isinstance(error, NotPlainFileError) or error.errno in _NO_PLAIN_FILE:
            expected = f"{folder}: not a stagepack bundle: expected a folder with a file {MANIFEST_NAME}"
            raise NotABundleError(f"{expected}, found {_found_at(folder, path)} [M1]") from None
        raise NotABundleError(f"{path}: cannot be read: {error.strerror or error} [M1]") from None
    return parse_manifest(content, str(path))


def _found_at(folder: Path, manifest_path: Path) -> str:
    """What is at a path that is no bundle."""
    if not os.path.lexists(folder):
        if ":/" in str(folder):
            return "no such path: stagepack.open and stagepack.load take a URL"
        return f"no such path{near_path_hint(folder, f'*/{MANIFEST_NAME}')}"
    if manifest_path.is_symlink():
        return f"a link to {os.readlink(manifest_path)[:200]!r}, which is no file"
    if folder.is_symlink() and not folder.exists():
        return "a link that leads nowhere"
    if not folder.is_dir():
        return f"a file: give its folder {folder.parent}" if folder.name == MANIFEST_NAME else "a file"
    if os.path.lexists(manifest_path):
        return "something else of this name"
    if any((folder / file_name).exists() for file_name in (MODEL_CONFIG_NAME, "modules.json")):
        return "the folder of a Hugging Face model: write its bundle by stagepack export"
    return "a folder without it"


class BundleFiles:
    """The files of an open bundle; see `Bundle`."""

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        self.path = Path(path)
        self.source = source
        self.manifest = read_manifest(self.path)
        self.compares_digests = True

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

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest in hexadecimal. It identifies the bundle, because the manifest has the digests of all files."""
        return self.manifest.sha256

    @cached_property
    def files(self) -> dict[str, File]:
        """The entries of the files that the manifest lists, by file name."""
        return {file.name: file for file in self.manifest.files}

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
        raise_problems(problems)
        return content

    def _read_content(self, entry: File) -> tuple[bytes, list[Problem]]:
        """The content of a file, and how it differs from the manifest."""
        try:
            content = read_listed_file(self.path, entry)
        except DigestError as error:
            return b"", list(error.problems)
        return content, check_content(entry, content) if self.compares_digests else []

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

    def is_replaced(self) -> bool:
        """Whether the folder has another bundle than the one that was opened, for example one with ONNX models."""
        try:
            return read_manifest(self.path).sha256 != self.digest
        except StagepackError:
            return False

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
        if self.source is not None:
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
        problems = check_digests(self.path, entries, progress, versions)
        if self.replace_damaged(problems):
            problems = check_digests(self.path, entries, progress, versions)
        return problems

    def replace_damaged(self, problems: Iterable[Problem]) -> bool:
        """Download files again that were damaged in the cache.

        Args:
            problems: the problems of files that differ from the manifest.

        Returns:
            Whether files were downloaded: there are problems, and the bundle is a remote one.

        Raises:
            RemoteError, DigestError, WriteError: see `fetch`.
        """
        damaged = [self._entry(problem.where) for problem in problems]
        if not damaged or self.source is None:
            return False
        self.source.discard(damaged)
        self.source.fetch(damaged)
        return True

    def _entry(self, file_name: str) -> File:
        if file_name not in self.files:
            listed = format_names(sorted(self.files))
            raise FileNotListedError(f"{self.location}: expected one of the files {listed}, found {file_name[:200]!r}")
        return self.files[file_name]

    def stream(self, file_names: Iterable[str]) -> FileStream | None:
        """Begin to download files of a remote bundle; return a handle that reads them while they arrive. None for a local bundle.

        Args:
            file_names: the names of files that the manifest lists, in the order in which they are needed.

        Raises:
            FileNotListedError: the manifest does not list a file.
        """
        entries = [self._entry(file_name) for file_name in dict.fromkeys(file_names)]
        return None if self.source is None else self.source.stream(entries)

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
        if stream is None:
            with open_plain_file(self.path, entry) as file:
                return parse_weight_header(file, entry.name)
        position = 0

        def read(byte_count: int) -> bytes:
            nonlocal position
            content = bytearray(min(byte_count, entry.size - position))
            stream.read_into(entry.name, position, memoryview(content))
            position += len(content)
            return bytes(content)

        return parse_header_bytes(read, entry.size, entry.name)
