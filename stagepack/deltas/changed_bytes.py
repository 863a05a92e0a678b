"""What a delta changes in a file: its parts are read from the data file, decoded, and applied to bytes of the base."""

import bisect
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy

from stagepack.deltas.codes import Array, CodeError, decode_planes, decode_sparse, element_dtype
from stagepack.deltas.document import ChangedFile, Part
from stagepack.format.file_checks import open_plain_file
from stagepack.format.listed_files import ListedFiles
from stagepack.format.rules import rule_error
from stagepack.format.threads import map_in_threads

# What each open delta changes, by file, as long as something is composed with it.
_changes: "weakref.WeakKeyDictionary[ListedFiles, weakref.WeakValueDictionary[str, ChangedBytes]]" = (
    weakref.WeakKeyDictionary()
)


@dataclass(eq=False)
class ChangedBytes:
    """What one delta changes in a file, read from its data file."""

    delta: ListedFiles
    changed: ChangedFile
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, delta: ListedFiles, changed: ChangedFile) -> "ChangedBytes":
        """Return what an open delta changes in a file: one object for all chains, which reads its data file also when that was removed."""
        changes = _changes.setdefault(delta, weakref.WeakValueDictionary())
        return changes.setdefault(changed.name, cls(delta, changed))

    @cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.changed.parts]

    @cached_property
    def _frame_starts(self) -> list[int]:
        """The position of the frames of each part in the data file."""
        return list(itertools.accumulate((sum(part.frames) for part in self.changed.parts), initial=0))

    @cached_property
    def _descriptor(self) -> int:
        # Open as long as the files are composed: also when the folder of the delta is removed meanwhile.
        file = open_plain_file(self.delta.path, self.delta.files[self.changed.data])
        weakref.finalize(self, file.close)
        return file.fileno()

    def apply(self, start: int, memory: memoryview) -> None:
        """Change bytes of the file, from `start` on."""
        end = start + len(memory)
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for index in range(first, len(self._starts)):
            part = self.changed.parts[index]
            if part.start >= end:
                break
            if part.end > start:
                with self._named_errors(part):
                    self._apply_part(index, part, start, memory)

    def check(self) -> None:
        """Decode all parts, and keep nothing (Y10)."""
        map_in_threads(self._check_part, range(len(self.changed.parts)))

    def _check_part(self, index: int) -> None:
        part = self.changed.parts[index]
        with self._named_errors(part):
            frames = list(self._read_frames(index, part))
            if part.code == "sparse":
                decode_sparse(frames, part.count, part.size // part.width, part.width)
            else:
                decode_planes(frames, part.count, part.width)

    @contextlib.contextmanager
    def _named_errors(self, part: Part) -> Iterator[None]:
        try:
            yield
        except CodeError as error:
            location = f"{self.delta.location}: {self.changed.data}"
            message = f"the part at {part.start} of {self.changed.name}: {error}"
            raise rule_error("Y10", location, message) from None

    def _apply_part(self, index: int, part: Part, start: int, memory: memoryview) -> None:
        """Change the bytes of a part that are in memory, which begins at `start` in the file."""
        frames = list(self._read_frames(index, part))
        elements, dtype = part.size // part.width, element_dtype(part.width)
        first, last = max(part.start, start), min(part.end, start + len(memory))
        target = memory[first - start : last - start]
        is_inside = (first, last) == (part.start, part.end)
        if part.code == "sparse":
            positions, values = decode_sparse(frames, part.count, elements, part.width)
            if is_inside:
                numpy.frombuffer(target, dtype)[positions] ^= values
                return
            changes = numpy.zeros(elements, dtype)
            changes[positions] = values
        else:
            changes = decode_planes(frames, elements, part.width)
        if not is_inside:
            dtype = numpy.dtype(numpy.uint8)
            changes = changes.view(dtype)[first - part.start : last - part.start]
        _combine(numpy.frombuffer(target, dtype), changes, is_whole=part.code == "whole")

    def _read_frames(self, index: int, part: Part) -> Iterator[memoryview]:
        """Read the frames of a part. Their size was compared with that of the data file when the document was checked."""
        with self._lock:
            descriptor = self._descriptor
        frame_start, byte_count = self._frame_starts[index], sum(part.frames)
        content = memoryview(os.pread(descriptor, byte_count, frame_start))
        if len(content) != byte_count:
            raise rule_error(
                "D1", f"{self.delta.location}: {self.changed.data}", "the file was cut short while it was read"
            )
        position = 0
        for size in part.frames:
            yield content[position : position + size]
            position += size


def _combine(target: Array, changes: Array, *, is_whole: bool) -> None:
    if is_whole:
        target[:] = changes
    else:
        numpy.bitwise_xor(target, changes, out=target)
