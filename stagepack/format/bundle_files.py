"""The files of a bundle: the manifest, which is read when a bundle is opened, and the others on request."""

import bisect
import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from stagepack.errors import NotABundleError, StagepackError
from stagepack.format import limits
from stagepack.format.chunk_reads import Fill
from stagepack.format.chunks import File
from stagepack.format.file_checks import NotPlainFileError, near_path_hint, open_plain_file, read_limited
from stagepack.format.file_source import FileSource, FileStream
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest import Manifest
from stagepack.format.manifest_codec import parse_manifest
from stagepack.format.rules import MANIFEST_NAME, MODEL_CONFIG_NAME
from stagepack.format.weights import StoredTensor, parse_header_bytes, parse_weight_header

# What opening a file fails with if there is none, or a link to itself or a socket.
_NO_PLAIN_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the bundle in a folder."""
    return parse_manifest(read_document(folder, "bundle"), str(folder / MANIFEST_NAME))


def read_document(folder: Path, kind: str) -> bytes:
    """Read the document that lists the files of a folder: of a bundle, or of another kind."""
    path = folder / MANIFEST_NAME
    try:
        return read_limited(path, limits.MANIFEST_BYTES)
    except OSError as error:
        if isinstance(error, NotPlainFileError) or error.errno in _NO_PLAIN_FILE:
            expected = f"{folder}: not a stagepack {kind}: expected a folder with a file {MANIFEST_NAME}"
            raise NotABundleError(f"{expected}, found {_found_at(folder, path)} [M1]") from None
        raise NotABundleError(f"{path}: cannot be read: {error.strerror or error} [M1]") from None


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


class BundleFiles(ListedFiles):
    """The files of an open bundle; see `Bundle`."""

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        super().__init__(path, source=source)
        self.manifest = read_manifest(self.path)

    @property
    def document_format(self) -> str:
        """See `ListedFiles`."""
        return self.manifest.format

    @property
    def listed(self) -> Sequence[File]:
        """See `ListedFiles`."""
        return self.manifest.files

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest in hexadecimal. It identifies the bundle, because the manifest has the digests of all files."""
        return self.manifest.sha256

    @property
    def stored_digest(self) -> str:
        """The digest of the bundle in the folder, of which deltas may make this one."""
        return self.digest if self.patches is None else self.patches.base_digest

    def is_replaced(self) -> bool:
        """Whether the folder has another bundle than the one that was opened, for example one with ONNX models."""
        try:
            return read_manifest(self.path).sha256 != self.stored_digest
        except StagepackError:
            return False

    @property
    def location(self) -> str:
        """The folder of the bundle, or its URL; of a bundle that deltas make, with their locations."""
        return super().location if self.patches is None else f"{super().location} with {self.patches.location}"

    def changed_tensors(self, file_name: str) -> list[str]:
        """Return the names of the stored tensors of a weight file that deltas change; see `stagepack.load`.

        Args:
            file_name: the name of a weight file.

        Returns:
            The names in the order of the file; empty if the folder of the bundle has the file itself.

        Raises:
            FileNotListedError, DigestError, FormatError, RemoteError: see `read_headers`.
        """
        ranges = [] if self.patches is None else self.patches.changed_ranges(self._entry(file_name).name)
        if not ranges:
            return []
        [(_, tensors)] = self.read_headers([file_name])
        starts, ends = [start for start, _ in ranges], [*itertools.accumulate((end for _, end in ranges), max)]
        # Ranges ascend by their starts; a tensor is changed if one that begins before its end does not end before its start.
        return [
            tensor.name
            for tensor in tensors.values()
            if (before := bisect.bisect_left(starts, tensor.end)) and ends[before - 1] > tensor.start
        ]

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


def _parse_header(fill: Fill, entry: File) -> dict[str, StoredTensor]:
    position = 0

    def read(byte_count: int) -> bytes:
        nonlocal position
        content = bytearray(min(byte_count, entry.size - position))
        fill(position, memoryview(content))
        position += len(content)
        return bytes(content)

    return parse_header_bytes(read, entry.size, entry.name)
