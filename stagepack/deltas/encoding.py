"""Two versions of a file -> the parts that differ, and their frames. Chunk by chunk, in threads, in bounded memory."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy

from stagepack.deltas.codes import Array, element_dtype, encode_planes, encode_sparse
from stagepack.deltas.document import BLOCK_BYTES, WIDTHS, ChangedFile, Code, Part
from stagepack.format.chunk_reads import Fill
from stagepack.format.chunks import CHUNK_BYTES, File, chunk_count, chunk_digest, file_entry
from stagepack.format.dtypes import HEADER_ITEM_SIZE
from stagepack.format.rules import FILE_NAME_PATTERN, rule_error
from stagepack.format.threads import ordered_results
from stagepack.format.weights import StoredTensor
from stagepack.format.writer import BundleWriter

# Tensors below this size share a part with their neighbours: 18,000 parts of some kilobytes would take a call of zstd for each plane.
_SMALL_BYTES: Final = 64 * 1024
# If the sparse code takes less than this part of the bytes, the others are not tried: they would have to compress all values further.
_SPARSE_ENOUGH: Final = 1 / 32
_DATA_SUFFIX: Final = ".changes"


class Segment(NamedTuple):
    """A range of bytes of a file, half-open: a tensor, or what is between tensors, which has no name."""

    start: int
    end: int
    width: int
    tensor: str | None


def weight_segments(tensors: Mapping[str, StoredTensor], size: int) -> list[Segment]:
    """Return the segments of a weight file: its header and padding, and its tensors, by the sizes of their elements."""
    segments = []
    position = 0
    for tensor in tensors.values():
        if tensor.start > position:
            segments.append(Segment(position, tensor.start, 1, None))
        width = min(HEADER_ITEM_SIZE[tensor.dtype], WIDTHS[-1])
        if tensor.end > tensor.start:
            segments.append(Segment(tensor.start, tensor.end, width, tensor.name))
        position = tensor.end
    if size > position:
        segments.append(Segment(position, size, 1, None))
    return segments


def plain_segments(size: int) -> list[Segment]:
    """Return the segments of any other file."""
    return [Segment(0, size, 1, None)] if size else []


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersions:
    """A file in two versions.

    Attributes:
        name: its name.
        size: the size of the new version.
        segments: what it consists of, without gaps.
        read_new: fills memory with bytes of the new version.
        old_entry: the entry of the old version; None if there is none.
        read_old: fills memory with bytes of the old version.
        new_entry: the entry of the new version; None if it is to be found out.
    """

    name: str
    size: int
    segments: Sequence[Segment]
    read_new: Fill
    old_entry: File | None
    read_old: Fill
    new_entry: File | None = None

    @property
    def old_size(self) -> int:
        """The size of the old version; 0 if there is none."""
        return 0 if self.old_entry is None else self.old_entry.size


def data_file_name(file_name: str, index: int) -> str:
    """Return the name of the data file of a changed file. `index` numbers the changed files of a delta."""
    data_name = f"{file_name}{_DATA_SUFFIX}"
    return data_name if FILE_NAME_PATTERN.fullmatch(data_name) else f"{index}{_DATA_SUFFIX}"


class ChunkChanges(NamedTuple):
    """What differs in one chunk of a file: its parts with their frames, the changed tensors, and the digest of the new bytes."""

    parts: list[Part]
    frames: list[bytes]
    tensors: list[str]
    digest: str


class EncodedFile:
    """The changes of a file; `frames` yields the content of the data file, and fills the other fields meanwhile.

    Attributes:
        parts: the parts that differ.
        tensors: the names of the changed tensors, in the order of the file.
        chunk_digests: the digests of the chunks of the new version.
    """

    def __init__(self, versions: FileVersions) -> None:
        self._versions = versions
        self.parts: list[Part] = []
        self.tensors: dict[str, None] = {}
        self.chunk_digests: list[str] = []

    def write(self, writer: BundleWriter, index: int) -> ChangedFile:
        """Write the data file; return the entry of the changed file. `index` numbers those of a delta."""
        data_name = data_file_name(self._versions.name, index)
        writer.write_file(data_name, self.frames())
        return self.changed_file(data_name)

    def changed_file(self, data_name: str) -> ChangedFile:
        """Return the entry of the changed file, once all frames are written."""
        return ChangedFile(
            name=self._versions.name, data=data_name, parts=tuple(self.parts), tensors=tuple(self.tensors)
        )

    @property
    def entry(self) -> File:
        """The entry of the new version."""
        return file_entry(self._versions.name, self._versions.size, self.chunk_digests)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames of all parts, in order."""
        encoder = _ChunkEncoder(self._versions)
        for changes in ordered_results(encoder.encode, range(chunk_count(self._versions.size))):
            self.parts += changes.parts
            self.tensors |= dict.fromkeys(changes.tensors)
            self.chunk_digests.append(changes.digest)
            yield from changes.frames


class _ChunkEncoder:
    def __init__(self, versions: FileVersions) -> None:
        self._versions = versions
        self._segment_ends = [segment.end for segment in versions.segments]

    def encode(self, index: int) -> ChunkChanges:
        """Encode one chunk."""
        versions = self._versions
        start = index * CHUNK_BYTES
        new_size = min(CHUNK_BYTES, versions.size - start)
        old_size = max(0, min(CHUNK_BYTES, versions.old_size - start))
        old_digest, new_digest = _stated_digest(versions.old_entry, index), _stated_digest(versions.new_entry, index)
        if old_digest is not None and old_digest == new_digest and old_size == new_size:
            return ChunkChanges([], [], [], old_digest)
        new, old = memoryview(bytearray(new_size)), memoryview(bytearray(old_size))
        versions.read_new(start, new)
        versions.read_old(start, old)
        digest = chunk_digest(new)
        _check(versions.name, "new", new_digest, digest)
        if old_digest is not None:
            _check(versions.name, "old", old_digest, chunk_digest(old))
        changes = ChunkChanges([], [], [], digest)
        for offset in range(0, new_size, BLOCK_BYTES):
            self._encode_block(
                start + offset, old[offset : offset + BLOCK_BYTES], new[offset : offset + BLOCK_BYTES], changes
            )
        return changes

    def _encode_block(self, start: int, old: memoryview, new: memoryview, changes: ChunkChanges) -> None:
        new = new[:BLOCK_BYTES]
        if old[: len(new)] == new:
            return
        for run, end in _runs(self._changed_segments(start, old, new)):
            changes.tensors.extend(segment.tensor for segment in run if segment.tensor is not None)
            begin, width = run[0].start, run[0].width
            old_part = old[begin - start : end - start]
            code, count, frames = encode_smallest(
                numpy.frombuffer(new[begin - start : end - start], element_dtype(width)),
                numpy.frombuffer(old_part, element_dtype(width)) if len(old_part) == end - begin else None,
            )
            sizes = tuple(map(len, frames))
            changes.parts.append(Part(begin, end - begin, code, width, count, sizes))
            changes.frames.extend(frames)

    def _changed_segments(self, start: int, old: memoryview, new: memoryview) -> Iterator[Segment]:
        """Yield the parts of segments in a block that differ."""
        end = start + len(new)
        for index in range(bisect.bisect_right(self._segment_ends, start), len(self._segment_ends)):
            segment = self._versions.segments[index]
            if segment.start >= end:
                break
            first, last = max(segment.start, start), min(segment.end, end)
            if old[first - start : last - start] != new[first - start : last - start]:
                yield segment._replace(start=first, end=last)


def _stated_digest(entry: File | None, index: int) -> str | None:
    if entry is None or (index and index >= len(entry.chunks)):
        return None
    return entry.chunks[index] if entry.chunks else entry.blake3


def _check(file_name: str, version: str, expected: str | None, found: str) -> None:
    if expected not in (None, found):
        message = f"the content of the {version} version was changed: expected blake3 {expected}, found {found}"
        raise rule_error("D2", file_name, message)


def _runs(segments: Iterable[Segment]) -> Iterator[tuple[list[Segment], int]]:
    """Yield changed segments that are encoded together, and their end: a large one, or small ones of one width."""
    run: list[Segment] = []
    for segment in segments:
        if run and not _continues(run[-1], segment):
            yield run, run[-1].end
            run = []
        run.append(segment)
    if run:
        yield run, run[-1].end


def _continues(former: Segment, segment: Segment) -> bool:
    """Whether a changed segment is encoded with the one before. Between two tensors is padding alone, of fewer than 64 bytes."""
    is_small = max(former.end - former.start, segment.end - segment.start) < _SMALL_BYTES
    are_tensors = former.tensor is not None and segment.tensor is not None
    return is_small and are_tensors and segment.width == former.width and segment.start - former.end < 64


def encode_smallest(new: Array, old: Array | None) -> tuple[Code, int, list[bytes]]:
    """Return the smallest code of new elements, the number of values that it stores, and its frames.

    old: the elements in the base, of which at least one differs; None if the base does not have all of them.
    """
    candidates: list[tuple[Code, int, list[bytes]]] = []
    if old is not None:
        changes = old ^ new
        positions = numpy.flatnonzero(changes)
        sparse = encode_sparse(changes, positions)
        candidates.append(("sparse", len(positions), sparse))
        if sum(map(len, sparse)) < new.nbytes * _SPARSE_ENOUGH:
            return candidates[0]
        candidates.append(("dense", len(new), encode_planes(changes)))
    candidates.append(("whole", len(new), encode_planes(new)))
    return min(candidates, key=lambda candidate: sum(map(len, candidate[2])))
