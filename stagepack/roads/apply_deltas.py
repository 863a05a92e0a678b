"""A bundle and deltas -> the bundle that they make of it, on disk."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from stagepack.deltas.document import RESULT_SIGNATURE_NAME
from stagepack.deltas.patches import ComposedFiles
from stagepack.errors import OptionError
from stagepack.format import limits
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.file_writing import FilledRange, synchronize
from stagepack.format.reader import Bundle
from stagepack.format.rules import SIGNATURE_NAME, raise_problems, rule_error
from stagepack.format.writer import BundleWriter, check_output_path
from stagepack.opening import BundleSource, DeltaSource, errors_name_bundle, opened, with_deltas
from stagepack.terminal import byte_progress


@errors_name_bundle
def apply_deltas(
    bundle: BundleSource,
    deltas: Sequence[DeltaSource],
    *,
    out: str | os.PathLike[str],
    overwrite: bool = False,
) -> Bundle:
    """Write the bundle that deltas make of another one. It has the same bytes as the bundle that the last delta was made of.

    All deltas are applied in one pass: each chunk is read once, changed by each delta in memory, compared with its digest and written.
    Unchanged files are compared with their digests and linked, or copied where the file system has no links. Whatever moment the process
    ends at, the output is the old bundle or the new one.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle.
        deltas: the deltas in their order, at most 64, each on the result of the one before: folders, or opened deltas.
        out: the folder to write. It may be the folder of the bundle itself, with `overwrite`.
        overwrite: replace a bundle at `out`.

    Returns:
        The new bundle, opened.

    Raises:
        NotABundleError, VersionError, DigestError, FormatError: a bundle or a delta is damaged, or a delta is on another bundle; nothing
            is written.
        OutputExistsError: `out` exists, and `overwrite` is not given, or it is no bundle.
        WriteError: the bundle cannot be written.

    Examples:
        >>> stagepack.apply_deltas("step-10.stagepack", ["step-11.delta", "step-12.delta"], out="step-12.stagepack")
    """
    base = opened(bundle)
    patched = with_deltas(base, deltas)
    patches = patched.patches
    if not isinstance(patches, ComposedFiles):
        found = "deltas that lead back to the bundle itself" if deltas else "none"
        raise OptionError(
            f"deltas: expected at least one delta to another bundle, found {found}: there is nothing to write"
        )
    check_output_path(out, overwrite=overwrite)
    is_in_place = os.path.realpath(out) == os.path.realpath(base.path)
    unchanged = [entry for entry in patched.listed if patches.patch_of(entry.name) is None]
    total_bytes = sum(entry.size for entry in patched.listed)
    with (
        BundleWriter(out, overwrite=overwrite) as writer,
        byte_progress(f"writing {Path(out).name}", total_bytes) as progress,
    ):
        versions = base.check_digests((entry.name for entry in unchanged), progress)
        for entry in unchanged:
            writer.link_file(base.path / entry.name, entry, versions[entry.name])
        for entry in patched.listed:
            if patches.patch_of(entry.name) is not None:
                _write_composed(writer, patched, entry.name, progress)
        last = patches.deltas[-1]
        if RESULT_SIGNATURE_NAME in last.files:
            write_signature(writer.folder, last.read(RESULT_SIGNATURE_NAME, limits.SIGNATURE_BYTES))
        writer.finish_encoded(last.result_manifest_content, replaced_digest=base.digest if is_in_place else None)
    return Bundle(out)


def _write_composed(writer: BundleWriter, bundle: Bundle, file_name: str, progress: ByteProgress) -> None:
    """Write a file that deltas make, and compare it with its digest."""
    entry = bundle.files[file_name]
    bundle.fetch([file_name])
    with contextlib.ExitStack() as open_files:
        fill = bundle.open_read(open_files, file_name).fill
        written = writer.write_file(file_name, [FilledRange(fill=fill, start=0, size=entry.size)], progress)
    if written != entry:
        problem = rule_error("D2", file_name, f"expected blake3 {entry.blake3}, composed {written.blake3}").problems
        raise_problems(bundle.causes(list(problem)))


def write_signature(folder: Path, content: bytes) -> None:
    """Write the signature of a result into its folder."""
    path = folder / SIGNATURE_NAME
    path.write_bytes(content)
    synchronize(path)
