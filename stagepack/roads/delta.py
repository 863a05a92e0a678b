"""A bundle and its next version -> a delta: a folder with what differs."""

import contextlib
import os
from collections.abc import Sequence
from typing import Final

from stagepack.deltas.delta import Delta
from stagepack.deltas.document import (
    DELTA_FORMAT,
    DELTA_VERSION,
    RESULT_NAME,
    RESULT_SIGNATURE_NAME,
    WEIGHT_VERSION_CHARACTERS,
    ChangedFile,
    DeltaDocument,
)
from stagepack.deltas.encoding import EncodedFile, FileVersions, Segment, plain_segments, weight_segments
from stagepack.deltas.rules import check_document
from stagepack.errors import OptionError, StagepackError
from stagepack.format.bundle_files import read_document
from stagepack.format.chunk_reads import Fill
from stagepack.format.chunks import File
from stagepack.format.manifest_codec import ZERO_DIGEST
from stagepack.format.reader import Bundle
from stagepack.format.rules import FILE_NAME_PATTERN
from stagepack.format.writer import BundleWriter, DocumentKind
from stagepack.opening import BundleSource, errors_name_bundle, opened
from stagepack.roads.stored_bundle import check_is_written

DELTA: Final = DocumentKind(DELTA_FORMAT, check_document)
_WEIGHT_SUFFIX: Final = ".safetensors"
_DATA_SUFFIX: Final = ".changes"


@errors_name_bundle
def write_delta(
    bundle: BundleSource,
    new: BundleSource,
    *,
    out: str | os.PathLike[str],
    version: str = "",
    overwrite: bool = False,
) -> Delta:
    """Write what differs between a bundle and its next version into a folder of its own.

    Files and chunks of equal digests are not read, and all others once, compared with their digests, a chunk of 16 MiB at a time for each
    processor. For each changed tensor the smallest of three codes is taken, compressed by zstd: the gaps between changed elements with
    the XOR of their old and new values, the XOR of all elements, or the new elements. Other files are encoded alike, as bytes.

    Args:
        bundle: the bundle that the delta is applied to: its folder, its URL, or an opened bundle.
        new: the bundle that the delta makes of it.
        out: the folder to write.
        version: a name of the new version, such as the step of its trainer, of up to 256 characters.
        overwrite: replace a delta at `out`.

    Returns:
        The delta, opened.

    Raises:
        NotABundleError, VersionError, DigestError, FormatError: see `stagepack.open`.
        OptionError: both bundles are the same one, or the version is too long.
        OutputExistsError: `out` exists, and `overwrite` is not given, or it is no delta.
        WriteError: the delta cannot be written.

    Examples:
        >>> stagepack.delta("step-11.stagepack", "step-12.stagepack", out="step-12.delta", version="12")
    """
    old_bundle, new_bundle = opened(bundle), opened(new)
    if old_bundle.digest == new_bundle.digest:
        raise OptionError(f"{new_bundle.location}: is the same bundle, {new_bundle.digest}: there is nothing to write")
    check_version_name(version)
    result, signature = _stored_manifest(new_bundle)
    with BundleWriter(out, overwrite=overwrite, kind=DELTA) as writer:
        changed: list[ChangedFile] = []
        for entry in sorted(new_bundle.listed, key=lambda entry: entry.name.lower()):
            old_entry = old_bundle.files.get(entry.name)
            if entry != old_entry:
                changed.append(_write_changes(writer, old_bundle, new_bundle, entry, len(changed)))
        writer.write_file(RESULT_NAME, [result])
        if signature is not None:
            writer.write_file(RESULT_SIGNATURE_NAME, [signature])
        writer.finish(delta_document(old_bundle.digest, new_bundle.digest, version, changed))
    return Delta(out)


def check_version_name(version: str) -> None:
    """Refuse a version that no delta may have (Y2)."""
    if not isinstance(version, str) or len(version) > WEIGHT_VERSION_CHARACTERS or not version.isprintable():
        raise OptionError(
            f"version: expected a text of up to {WEIGHT_VERSION_CHARACTERS} printable characters, found {str(version)[:80]!r}"
        )


def delta_document(base: str, result: str, version: str, changed: Sequence[ChangedFile]) -> DeltaDocument:
    """Return the document of a delta, without its list of files and its digest."""
    return DeltaDocument(
        format=DELTA_FORMAT,
        version=DELTA_VERSION,
        base=base,
        result=result,
        weight_version=version,
        changed=tuple(changed),
        files=(),
        sha256=ZERO_DIGEST,
    )


def _stored_manifest(bundle: Bundle) -> tuple[bytes, bytes | None]:
    """The manifest of a bundle as it is stored, and the signature over it."""
    check_is_written(bundle)
    content = read_document(bundle.path, "bundle")
    with contextlib.suppress(StagepackError):  # a signature that cannot be had is left out
        return content, bundle.read_signature()
    return content, None


def _write_changes(writer: BundleWriter, old: Bundle, new: Bundle, entry: File, index: int) -> ChangedFile:
    """Write the data file of a changed file; return its entry."""
    old_entry = old.files.get(entry.name)
    with contextlib.ExitStack() as open_files:
        new.fetch([entry.name])
        read_old: Fill = _read_nothing
        if old_entry is not None:
            old.fetch([entry.name])
            read_old = old.open_read(open_files, entry.name).fill
        versions = FileVersions(
            name=entry.name,
            size=entry.size,
            segments=_segments(new, entry),
            read_new=new.open_read(open_files, entry.name).fill,
            old_entry=old_entry,
            read_old=read_old,
            new_entry=entry,
        )
        return write_file_changes(writer, versions, index)


def write_file_changes(writer: BundleWriter, versions: FileVersions, index: int) -> ChangedFile:
    """Write the data file of a changed file; return its entry."""
    encoded = EncodedFile(versions)
    data_name = f"{versions.name}{_DATA_SUFFIX}"
    if not FILE_NAME_PATTERN.fullmatch(data_name):
        data_name = f"{index}{_DATA_SUFFIX}"
    writer.write_file(data_name, encoded.frames())
    return ChangedFile(name=versions.name, data=data_name, parts=tuple(encoded.parts), tensors=tuple(encoded.tensors))


def _segments(bundle: Bundle, entry: File) -> list[Segment]:
    if entry.name.endswith(_WEIGHT_SUFFIX):
        [(_, tensors)] = bundle.read_headers([entry.name])
        return weight_segments(tensors, entry.size)
    return plain_segments(entry.size)


def _read_nothing(_start: int, memory: memoryview) -> None:
    assert not memory
