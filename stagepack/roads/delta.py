"""A bundle and its next version -> a delta: a folder with what differs."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard, cast

from stagepack.deltas.delta import DELTA, Delta
from stagepack.deltas.document import (
    DELTA_FORMAT,
    DELTA_VERSION,
    RESULT_NAME,
    RESULT_SIGNATURE_NAME,
    WEIGHT_VERSION_CHARACTERS,
    ChangedFile,
    DeltaDocument,
    is_weight_version,
)
from stagepack.deltas.encoding import EncodedFile, FileVersions, Segment, plain_segments, weight_segments
from stagepack.errors import OptionError, StagepackError, UnchangedError
from stagepack.format.bundle_files import read_document
from stagepack.format.chunk_reads import Fill
from stagepack.format.chunks import File
from stagepack.format.manifest_codec import ZERO_DIGEST, stated_and_actual_digest
from stagepack.format.own_folders import folder_format
from stagepack.format.reader import Bundle
from stagepack.format.writer import BundleWriter
from stagepack.opening import BundleSource, errors_name_bundle, opened
from stagepack.remote.url import is_url, split_entry_point
from stagepack.roads.stored_bundle import check_is_written

if TYPE_CHECKING:
    import torch

    from stagepack.roads.distributed_weights import DistributedWeights

_WEIGHT_SUFFIX: Final = ".safetensors"


@errors_name_bundle
def write_delta(
    bundle: BundleSource,
    new: "BundleSource | Mapping[str, torch.Tensor] | DistributedWeights",
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
        new: the bundle that the delta makes of it. Or other weights for its graphs: tensors by name, as ``state_dict()`` has them, or the
            path of a checkpoint: a file or folder of safetensors or of torch, of ``torch.distributed.checkpoint``, or of transformers;
            or the folder of a delta that Slime or ModelExpress has published, on the version of `bundle`. Or what `stagepack.train`
            returned: all its processes call this, each writes what changes in the weights that it has, and all must reach `out` by
            its path. Names, shapes and dtypes are compared. The bundle that the delta makes is not written; it has neither the
            recorded example nor ONNX files, which belong to the old weights.
        out: the folder to write.
        version: a name of the new version, such as the step of its trainer, of up to 256 characters; by default the one that a published
            delta states.
        overwrite: replace a delta at `out`.

    Returns:
        The delta, opened.

    Raises:
        NotABundleError, VersionError, DigestError, FormatError: see `stagepack.open`.
        UnchangedError: both bundles are the same one: nothing has changed.
        OptionError: the version is too long.
        CaptureError: the weights do not fit the graphs.
        OutputExistsError: `out` exists, and `overwrite` is not given, or it is no delta.
        WriteError: the delta cannot be written.
        GroupError: another process of a training failed; the message has its error.
        StageLostError: another process of a training is gone.

    Examples:
        >>> stagepack.delta("step-11.stagepack", "step-12.stagepack", out="step-12.delta", version="12")
    """
    check_version_name(version)
    old_bundle = opened(bundle)
    open_writer = partial(BundleWriter, out, overwrite=overwrite, kind=DELTA)
    if _is_training(new):
        from stagepack.roads.training_delta import write_training_changes  # noqa: PLC0415 - torch, which two bundles do not need

        write_training_changes(old_bundle, new, open_writer, partial(_finish, base=old_bundle, version=version))
        return Delta(out)
    signature: bytes | None = None
    with open_writer() as writer:
        if isinstance(new, Bundle) or _is_bundle_path(new):
            new_bundle = opened(new)
            result, signature = _stored_manifest(new_bundle)
            changed = [] if old_bundle.digest == new_bundle.digest else _write_files(writer, old_bundle, new_bundle)
        else:
            from stagepack.roads.weights_delta import write_weight_changes  # noqa: PLC0415 - torch, which two bundles do not need

            weights = cast("str | os.PathLike[str] | Mapping[str, torch.Tensor]", new)
            next_version = write_weight_changes(writer, old_bundle, weights)
            result, changed = next_version.manifest, next_version.changed
            version = version or next_version.name
        _finish(writer, result, changed, base=old_bundle, version=version, signature=signature)
    return Delta(out)


def _finish(
    writer: BundleWriter,
    result: bytes,
    changed: Sequence[ChangedFile],
    *,
    base: Bundle,
    version: str,
    signature: bytes | None = None,
) -> None:
    """Write the manifest of the result and the document, and put the delta in place."""
    check_version_name(version)
    result_digest = stated_and_actual_digest(result)[1]
    if result_digest == base.digest:
        raise UnchangedError(
            f"{base.location}: the new version is the same bundle, {result_digest}: there is nothing to write"
        )
    writer.write_file(RESULT_NAME, [result])
    if signature is not None:
        writer.write_file(RESULT_SIGNATURE_NAME, [signature])
    writer.finish(_delta_document(base.digest, result_digest, version, changed))


def _is_training(new: object) -> "TypeGuard[DistributedWeights]":
    return hasattr(new, "own_weights")


def _is_bundle_path(new: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether something is the path or URL of a bundle, and not of a checkpoint."""
    if not isinstance(new, str | os.PathLike):
        return False
    location, _ = split_entry_point(new)
    path = Path(location)
    is_absent = not os.path.lexists(path)
    return is_url(os.fspath(location)) or is_absent or folder_format(path) is not None


def _write_files(writer: BundleWriter, old: Bundle, new: Bundle) -> list[ChangedFile]:
    """Write the data files of all files that differ."""
    changed: list[ChangedFile] = []
    for entry in sorted(new.listed, key=lambda entry: entry.name.lower()):
        if entry != old.files.get(entry.name):
            changed.append(_write_changes(writer, old, new, entry, len(changed)))
    return changed


def check_version_name(version: str) -> None:
    """Refuse a version that no delta may have (Y2)."""
    if not isinstance(version, str):
        raise OptionError(
            f"version: expected a text, found {type(version).__name__}: {version!r:.80}: write version={str(version)[:80]!r}"
        )
    if not is_weight_version(version):
        raise OptionError(
            f"version: expected a text of up to {WEIGHT_VERSION_CHARACTERS} characters, no control characters, found {str(version)[:80]!r}"
        )


def _delta_document(base: str, result: str, version: str, changed: Sequence[ChangedFile]) -> DeltaDocument:
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
        return EncodedFile(versions).write(writer, index)


def _segments(bundle: Bundle, entry: File) -> list[Segment]:
    if entry.name.endswith(_WEIGHT_SUFFIX):
        [(_, tensors)] = bundle.read_headers([entry.name])
        return weight_segments(tensors, entry.size)
    return plain_segments(entry.size)


def _read_nothing(_start: int, memory: memoryview) -> None:
    assert not memory
