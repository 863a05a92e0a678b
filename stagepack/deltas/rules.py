"""The rules on the document of a delta: Y1 to Y6, which need no other file (SPEC section 13)."""

import itertools
from collections.abc import Iterator
from typing import Final

from stagepack.deltas.document import (
    BLOCK_BYTES,
    RESULT_NAME,
    RESULT_SIGNATURE_NAME,
    WEIGHT_VERSION_CHARACTERS,
    WIDTHS,
    ChangedFile,
    DeltaDocument,
    Part,
    gap_bytes,
    is_weight_version,
)
from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.rules import DIGEST_PATTERN, MANIFEST_NAME, BrokenRule, is_tensor_name
from stagepack.format.validate.manifest_rules import check_files

# Bytes of a frame beyond those of its content: zstd stores what it cannot compress, with 3 bytes for each 128 KiB, and a header.
_FRAME_BYTES: Final = 64


def check_document(document: DeltaDocument) -> Iterator[Problem]:
    """Yield the problems of the document of a delta by itself."""
    for rule, location, message in _check(document):
        yield Problem(rule=rule, where=f"{MANIFEST_NAME}: {location}", message=message)


def _check(document: DeltaDocument) -> Iterator[BrokenRule]:
    digests = (document.base, document.result)
    if not all(map(DIGEST_PATTERN.fullmatch, digests)) or document.base == document.result:
        yield "Y1", "base, result", "expected two different digests of 64 hexadecimal digits"
    if not is_weight_version(document.weight_version):
        yield (
            "Y2",
            "weight_version",
            f"expected at most {WEIGHT_VERSION_CHARACTERS} characters, none of them a control character",
        )
    yield from check_files(document.files)
    files = {file.name: file for file in document.files}
    data_names = [changed.data for changed in document.changed]
    expected = {RESULT_NAME, *data_names}
    if len(expected) <= len(data_names) or files.keys() - {RESULT_SIGNATURE_NAME} != expected:
        yield (
            "Y3",
            "files",
            f"expected {RESULT_NAME} and one file for each changed file, and at most {RESULT_SIGNATURE_NAME}",
        )
        return
    names = [changed.name.lower() for changed in document.changed]
    if names != sorted(set(names)):
        yield "Y3", "changed", "expected the changed files in the order of their names, each once"
    for changed in document.changed:
        yield from _check_changed(changed, files[changed.data])


def _check_changed(changed: ChangedFile, data: File) -> Iterator[BrokenRule]:
    location = f"changed file {changed.name[:80]!r}"
    if not all(map(is_tensor_name, changed.tensors)) or len(set(changed.tensors)) != len(changed.tensors):
        yield "Y3", location, "a name of its tensors is not one of a tensor, or is a duplicate"
    problems = [problem for part in changed.parts for problem in _check_part(part)]
    yield from (("Y5", f"{location}, {where}", message) for where, message in problems)
    for part, following in itertools.pairwise(changed.parts):
        if following.start < part.end:
            yield "Y4", f"{location}, the part at {following.start}", f"expected a start from {part.end} on"
    frame_bytes = 0 if problems else sum(sum(part.frames) for part in changed.parts)
    if not problems and frame_bytes != data.size:
        yield "Y6", location, f"expected frames of {data.size} bytes, the size of {data.name}, found {frame_bytes}"


def _check_part(part: Part) -> Iterator[tuple[str, str]]:
    where = f"the part at {part.start}"
    if not 0 <= part.start <= limits.TENSOR_ELEMENTS or not 0 < part.size <= BLOCK_BYTES:
        yield where, f"expected a position, and a size from 1 to {BLOCK_BYTES}, found {part.size}"
    elif part.start // BLOCK_BYTES != (part.end - 1) // BLOCK_BYTES:
        yield where, f"crosses a multiple of {BLOCK_BYTES}"
    elif part.width not in WIDTHS or part.start % part.width or part.size % part.width:
        yield where, f"expected whole elements of {', '.join(map(str, WIDTHS))} bytes, found {part.width}"
    else:
        elements = part.size // part.width
        is_sparse = part.code == "sparse"
        if part.count not in (range(1, elements + 1) if is_sparse else (elements,)):
            yield where, f"expected up to {elements} values, found {part.count}"
            return
        sizes = [part.count] * part.width
        if is_sparse:
            sizes.insert(0, gap_bytes(part.count, elements))
        fits = len(part.frames) == len(sizes) and all(
            0 < found <= size + size // 1024 + _FRAME_BYTES for found, size in zip(part.frames, sizes, strict=True)
        )
        if not fits:
            yield where, f"expected {len(sizes)} frames, none larger than what it holds"
