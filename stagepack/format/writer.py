"""Write a bundle atomically.

The files are written into a temporary folder beside the output, synchronized to disk, and the folder is renamed at the end. If the
process dies at any moment, the output is the old bundle or the new one, never a part of one; where the system cannot exchange two
folders, it may be missing, and the old bundle is then beside it.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from stagepack.errors import ExportWarning, OutputExistsError, StagepackError, WriteError, warn_caller
from stagepack.format.bundle_files import read_manifest
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.chunks import File
from stagepack.format.file_checks import (
    FileVersion,
    changed_file_error,
    checked_path,
    file_version,
    open_regular_file,
)
from stagepack.format.file_writing import FileRange, Piece, synchronize, write_pieces
from stagepack.format.manifest import Manifest
from stagepack.format.manifest_codec import (
    BUNDLE,
    BUNDLE_FORMAT,
    Document,
    DocumentKind,
    encode_manifest,
    kind_noun,
)
from stagepack.format.output_file import TemporaryFolder, remove_folder, replace_folder, siblings
from stagepack.format.own_folders import check_outside_bundles, check_replaceable, folder_format, other_files
from stagepack.format.rules import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    format_names,
    raise_problems,
    rule_error,
)
from stagepack.format.threads import map_in_threads
from stagepack.format.weights import TensorSpec, weight_file_header

# The content of a file or a tensor.
Pieces = Iterable[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Tensors to be written."""

    specs: Mapping[str, TensorSpec]  # the tensors by name, in the order in which they are written
    read: Callable[[str], Pieces]  # returns the bytes of a tensor, by its name


def check_output_path(
    out: str | os.PathLike[str],
    *,
    overwrite: bool,
    absorbed_names: Collection[str] = (),
    document_format: str = BUNDLE_FORMAT,
) -> None:
    """Refuse an output path that no bundle can be written to, before any work is done."""
    path = Path(os.path.abspath(checked_path(out, "out")))
    if os.path.lexists(path) and not overwrite:
        raise OutputExistsError(
            f"{out}: already exists: choose another name, or overwrite it (--overwrite; in Python overwrite=True)"
        )
    if os.path.lexists(path):
        check_replaceable(path, document_format)
        if lost_files := [file_name for file_name in other_files(path) if file_name not in absorbed_names]:
            raise OutputExistsError(
                f"{out}: has files that are not of the {kind_noun(document_format)}, and would be lost: {format_names(lost_files)}: move "
                "them out of the folder, or choose another name"
            )
    check_outside_bundles(path)
    if not path.parent.is_dir():
        raise WriteError(f"{out}: expected the folder {path.parent} to exist")


class BundleWriter:
    """Writes one bundle. Use it in a ``with`` statement and call `finish` last.

    If the statement is left before `finish` returned, everything that was written is removed.

    Examples:
        Write a bundle of one stage::

            with BundleWriter("m.stagepack", overwrite=False) as writer:
                writer.write_file("stage-0.msgpack", [encode_graph(trivially_folded(graph))])
                writer.write_tensors("stage-0.safetensors", specs, read_tensor)
                writer.finish(manifest)
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        overwrite: bool,
        absorbed_names: Collection[str] = (),
        kind: DocumentKind[Any] = BUNDLE,
    ) -> None:
        self._kind = kind
        self._check_output(checked_path(out, "out"), overwrite=overwrite, absorbed_names=absorbed_names)
        self._absorbed_names = absorbed_names
        self._out = Path(os.path.abspath(out))
        self._overwrite = overwrite
        self._file_entries: list[File] = []
        self._unsynchronized: list[Path] = []
        self._is_renamed = False
        try:
            self._locked_folder = TemporaryFolder(self._out)
        except OSError as error:
            raise WriteError(f"{out}: cannot write there: {error.strerror}: {self._out.parent}") from None
        self._temporary_folder = self._locked_folder.path
        self._replaced_folder = self._temporary_folder.parent.with_suffix(".old")

    def _check_output(self, path: Path, *, overwrite: bool, absorbed_names: Collection[str]) -> None:
        document_format = self._kind.document_format
        check_output_path(path, overwrite=overwrite, absorbed_names=absorbed_names, document_format=document_format)

    @property
    def folder(self) -> Path:
        """The temporary folder, which has the files that are written already."""
        return self._temporary_folder

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove an unfinished bundle, and convert an OSError to a `WriteError`."""
        self._locked_folder.__exit__(kind, error, trace)
        if os.path.lexists(self._out):
            # Folders of killed processes too: they are needed only as long as there is no output.
            for replaced_folder in siblings(self._out, "old"):
                is_own = folder_format(replaced_folder) == self._kind.document_format
                if is_own and not other_files(replaced_folder):
                    remove_folder(replaced_folder, MANIFEST_NAME)
        if isinstance(error, OSError) and self._is_renamed:
            raise WriteError(
                f"{self._out}: is written and complete, but the disk did not confirm that it keeps the name: {error.strerror or error}: "
                "after a loss of power the output may be missing or the former one: check the disk, and write the bundle again"
            ) from error
        if isinstance(error, OSError):
            raise WriteError(
                f"{self._out}: could not be written, nothing was changed: {error.strerror or error}"
            ) from error

    def write_file(self, file_name: str, pieces: Pieces, progress: ByteProgress | None = None) -> File:
        """Write one file in threads, and record its size and digests for the manifest. Its bytes must not change afterwards."""
        path = self._temporary_folder / file_name
        entry = write_pieces(path, pieces, progress)
        self._file_entries.append(entry)
        self._unsynchronized.append(path)
        return entry

    def discard_file(self, file_name: str) -> None:
        """Remove a file that was written."""
        path = self._temporary_folder / file_name
        path.unlink()
        self._unsynchronized.remove(path)
        self._file_entries = [entry for entry in self._file_entries if entry.name != file_name]

    def link_file(self, path: Path, entry: File, version: FileVersion | None = None) -> None:
        """Add a file of another bundle: as a hard link if the file system can, otherwise as a copy. Only a copy is hashed again.

        version: the file must still be this one, from `Bundle.check_digests`; None if nobody else writes it.
        """
        new_path = self._temporary_folder / entry.name
        try:
            # A link of a link would lead to a name that another program may remove.
            os.link(os.path.realpath(path), new_path)
        # The other bundle is on another file system, or the file system has no hard links.
        except OSError:
            self.write_file(entry.name, [FileRange(path=path, start=0, size=entry.size, version=version)])
            if self._file_entries[-1] != entry:
                message = "the file was changed after it was compared with its digest"
                raise rule_error("D2", entry.name, message) from None
            return
        if version is not None:
            with open_regular_file(new_path) as file:
                if not version.is_same_but_links(file_version(file.fileno())):
                    raise changed_file_error(path)
        self._file_entries.append(entry)

    def write_tensors(
        self,
        file_name: str,
        tensors: Iterable[TensorSpec],
        read_tensor: Callable[[str], Pieces],
        progress: ByteProgress | None = None,
    ) -> None:
        """Write a weight file. The bytes of each tensor are read once, by its name and in order."""
        specs = list(tensors)

        def pieces() -> Pieces:
            header, paddings = weight_file_header(specs)
            yield header
            for spec, padding in zip(specs, paddings, strict=True):
                yield bytes(padding)
                yield from read_tensor(spec.name)

        self.write_file(file_name, pieces(), progress)

    def write_draft(self, manifest: Manifest) -> None:
        """Write a manifest of the files that are written so far, so that the folder can be opened before it is finished."""
        (self._temporary_folder / MANIFEST_NAME).write_bytes(encode_manifest(self._with_files(manifest)))

    def _with_files(self, manifest: Document) -> Document:
        """The manifest with the list of files."""
        manifest = msgspec.structs.replace(manifest, files=tuple(self.entries))
        raise_problems(self._kind.check(manifest))
        return manifest

    @property
    def entries(self) -> list[File]:
        """The entries of the files that are written so far, by name."""
        return sorted(self._file_entries, key=lambda entry: entry.name)

    def finish(self, manifest: msgspec.Struct, *, replaced_digest: str | None = None) -> None:
        """Write the manifest, and rename the temporary folder to the output.

        replaced_digest: replace only the bundle with this digest; None for any bundle.
        """
        self.finish_encoded(encode_manifest(self._with_files(manifest)), replaced_digest=replaced_digest)

    def finish_encoded(self, manifest: bytes, *, replaced_digest: str | None = None) -> None:
        """Write a manifest as it is, and rename the temporary folder to the output; see `finish`."""
        (self._temporary_folder / MANIFEST_NAME).unlink(missing_ok=True)  # the manifest of a draft
        self.write_file(MANIFEST_NAME, [manifest])
        map_in_threads(synchronize, [*self._unsynchronized, self._temporary_folder])
        self._check_output(self._out, overwrite=self._overwrite, absorbed_names=self._absorbed_names)
        if replaced_digest is not None:
            _check_digest(self._out, replaced_digest)
        loses_signature = os.path.lexists(self._out / SIGNATURE_NAME) and not os.path.lexists(
            self.folder / SIGNATURE_NAME
        )
        # Without `overwrite`, an output that appears at this moment is not replaced: the system refuses to rename over it.
        if self._overwrite and os.path.lexists(self._out):
            replace_folder(self._temporary_folder, self._out, self._replaced_folder)
        else:
            os.rename(self._temporary_folder, self._out)
        self._is_renamed = True
        synchronize(self._out.parent)
        if loses_signature:
            noun = kind_noun(self._kind.document_format)
            message = f"{self._out}: the {noun} was signed, and is not any more, because it has changed: sign it again (stagepack sign)"
            warn_caller(ExportWarning(message))


def _check_digest(path: Path, digest: str) -> None:
    """Refuse to replace another bundle than the one that was changed."""
    try:
        found_digest = read_manifest(path).sha256
    except StagepackError as error:
        raise WriteError(f"{path}: the bundle that is changed was removed or damaged meanwhile: {error}") from None
    if found_digest != digest:
        raise WriteError(
            f"{path}: expected the bundle {digest}, found {found_digest}, which was written meanwhile: it is kept, nothing was changed: "
            "repeat the call"
        )
