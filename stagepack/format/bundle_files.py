"""The files of a bundle: the manifest, which is read when a bundle is opened, and the others on request."""

import bisect
import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stagepack.errors import NotABundleError, StagepackError
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.file_checks import NotPlainFileError, near_path_hint, read_limited
from stagepack.format.file_source import FileSource
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest import Manifest
from stagepack.format.manifest_codec import parse_files, parse_manifest
from stagepack.format.rules import MANIFEST_NAME, MODEL_CONFIG_NAME, PEFT_SETTINGS_NAME

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


def read_file_list(folder: Path) -> tuple[File, ...]:
    """Read the list of the files of a folder, whatever kind of document it has; see `parse_files`."""
    return parse_files(read_document(folder, "bundle"))


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
    if (folder / PEFT_SETTINGS_NAME).exists():
        return "the folder of an adapter of peft: write it for its bundle by stagepack adapter"
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
