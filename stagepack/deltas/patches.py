"""A bundle and a chain of deltas -> the files of the last result, composed in memory; nothing is written."""

import bisect
import copy
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy

from stagepack.deltas.codes import Array, CodeError, decode_planes, decode_sparse, element_dtype
from stagepack.deltas.delta import Delta, open_delta
from stagepack.deltas.document import ChangedFile, Part
from stagepack.errors import OptionError, Problem
from stagepack.format.chunks import File
from stagepack.format.file_checks import open_plain_file
from stagepack.format.file_source import FilePatch
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems, rule_error

# Deltas of a chain. Each is read for each part that it changes.
MOST_DELTAS: Final = 64


def patched_bundle(bundle: Bundle, deltas: Sequence[str | os.PathLike[str] | Delta]) -> Bundle:
    """Return the bundle that deltas make of another one. Its files are composed when they are read; nothing is written.

    deltas: the deltas in their order, each on the result of the one before; none for the bundle itself.
    """
    check_is_sequence(deltas)
    if not deltas:
        return bundle
    if bundle.patches is not None or bundle.stored is not bundle:
        raise OptionError(f"{bundle.location}: deltas: expected a bundle as it was opened: give all deltas in one call")
    patches = ComposedFiles(bundle, [open_delta(delta) for delta in deltas])
    patched = copy.copy(bundle)
    for derived in ("files", "_facts"):
        patched.__dict__.pop(derived, None)
    patched.patches = patches
    patched.manifest = patches.deltas[-1].result_manifest
    entry_points = patched.entry_points
    patched.selected = entry_points[0] if len(entry_points) == 1 else None
    return patched if bundle.selected is None or patched.selected else patched.select(bundle.selected.name)


def check_is_sequence(deltas: object) -> None:
    """Refuse one delta in the place of a sequence of them."""
    if isinstance(deltas, str | os.PathLike | Delta):
        raise OptionError(f"deltas: expected a sequence of deltas, found {deltas!r}: write [{deltas!r}]")


def check_chain(base: str, deltas: Sequence[Delta]) -> None:
    """Refuse deltas of which one is not on the result of the one before (Y8)."""
    if len(deltas) > MOST_DELTAS:
        raise rule_error(
            "Y8", "deltas", f"expected at most {MOST_DELTAS} deltas, found {len(deltas)}: apply some of them first"
        )
    digests = {base}
    expected = base
    for delta in deltas:
        if delta.base != expected:
            message = f"expected a delta on the bundle {expected}, found one on {delta.base}: give all deltas between them, in order"
            raise rule_error("Y8", delta.location, message)
        if delta.result in digests:
            message = f"makes the bundle {delta.result}, which is the base or an earlier result: leave out the deltas after it"
            raise rule_error("Y8", delta.location, message)
        digests.add(expected := delta.result)


class ComposedFiles:
    """The files that a chain of deltas makes of the files of a bundle: a `stagepack.format.file_source.FilePatches`."""

    def __init__(self, base: Bundle, deltas: Sequence[Delta]) -> None:
        check_chain(base.digest, deltas)
        self.base = base
        self.base_digest = base.digest
        self.deltas = tuple(deltas)
        self._patches = _follow(base.files, deltas)

    @property
    def location(self) -> str:
        """The locations of the deltas."""
        return ", ".join(delta.location for delta in self.deltas)

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders of the deltas."""
        return tuple(os.path.abspath(delta.path) for delta in self.deltas)

    def patch_of(self, file_name: str) -> FilePatch | None:
        """See `FilePatches`."""
        patch = self._patches[file_name]
        return patch if patch.steps else None

    def since(self, digest: str) -> "ComposedFiles | None":
        """See `FilePatches`."""
        versions = [self.base_digest, *(delta.result for delta in self.deltas)]
        if digest not in versions:
            return None
        later = copy.copy(self)
        later.deltas = self.deltas[versions.index(digest) :]
        vars(later)["_patches"] = {
            file_name: replace(patch, steps=tuple(step for step in patch.steps if step.delta in later.deltas))
            for file_name, patch in self._patches.items()
        }
        return later

    def fetch(self, file_names: Iterable[str]) -> None:
        """See `FilePatches`."""
        patches = [self._patches[file_name] for file_name in file_names]
        self.base.fetch(patch.origin.name for patch in patches if patch.origin is not None)
        for delta in self.deltas:
            delta.fetch(step.changed.data for patch in patches for step in patch.steps if step.delta is delta)

    def damage(self, file_name: str) -> list[Problem]:
        """See `FilePatches`."""
        patch = self._patches[file_name]
        problems = [] if patch.origin is None else self.base.digest_problems([patch.origin], None)
        for step in patch.steps:
            damaged = step.delta.digest_problems([step.delta.files[step.changed.data]], None)
            problems += [
                Problem(rule=problem.rule, where=f"{step.delta.location}: {problem.where}", message=problem.message)
                for problem in damaged
            ]
        return problems

    def changed_ranges(self, file_name: str) -> list[tuple[int, int]]:
        """See `FilePatches`."""
        return [(part.start, part.end) for part in self.changed_parts(file_name)]

    def changed_parts(self, file_name: str) -> list[Part]:
        """Return the parts of all deltas that change a file, by their positions."""
        return sorted(
            (part for step in self._patches[file_name].steps for part in step.changed.parts),
            key=lambda part: part.start,
        )


def _follow(base_files: Mapping[str, File], deltas: Sequence[Delta]) -> dict[str, "ComposedFile"]:
    """How each file of the last result is made. Files and sizes are compared with those of each version (Y9)."""
    composed = {file_name: ComposedFile(entry, entry, ()) for file_name, entry in base_files.items()}
    problems: list[Problem] = []
    for delta in deltas:
        following = {}
        for entry in delta.result_manifest.files:
            former, changed = composed.get(entry.name), delta.changed_files.get(entry.name)
            if changed is not None:
                step = _Step(delta, changed)
                size = 0 if former is None else former.entry.size
                if (message := _base_problem(changed, size, entry.size)) is not None:
                    problems.append(Problem(rule="Y9", where=f"{delta.location}: {entry.name}", message=message))
                is_whole = _covered_by_whole(changed, 0, entry.size)
                earlier = () if former is None or is_whole else former.steps
                origin = None if former is None or is_whole else former.origin
                following[entry.name] = ComposedFile(entry, origin, (*earlier, step))
            elif former is None or former.entry != entry:
                message = "the file of the base is another one, and the delta does not change it"
                problems.append(Problem(rule="Y9", where=f"{delta.location}: {entry.name}", message=message))
            else:
                following[entry.name] = former
        composed = following
    raise_problems(problems)
    return composed


def _base_problem(changed: ChangedFile, base_size: int, size: int) -> str | None:
    """Why a changed file needs bytes that its base does not have."""
    beyond = [part for part in changed.parts if part.code != "whole" and part.end > base_size]
    if beyond:
        return f"the part at {beyond[0].start} changes bytes of the base, which has {base_size}"
    if size > base_size and not _covered_by_whole(changed, base_size, size):
        return f"its bytes from {base_size} to {size} are neither in the base nor in parts"
    return None


def _covered_by_whole(changed: ChangedFile, start: int, end: int) -> bool:
    """Whether parts hold all bytes of a range themselves."""
    for part in changed.parts:
        if part.start > start:
            break
        if part.code == "whole":
            start = max(start, part.end)
    return start >= end


@dataclass(frozen=True, slots=True)
class ComposedFile:
    """A file of the last result, which steps make of a file of the base: a `stagepack.format.file_source.FilePatch`."""

    entry: File
    origin: File | None
    steps: tuple["_Step", ...]

    def apply(self, start: int, memory: memoryview) -> None:
        """See `FilePatch`."""
        for step in self.steps:
            step.apply(start, memory)


@dataclass(eq=False)
class _Step:
    """What one delta changes in a file."""

    delta: Delta
    changed: ChangedFile
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
                try:
                    self._apply_part(index, part, start, memory)
                except CodeError as error:
                    location = f"{self.delta.location}: {self.changed.data}"
                    raise rule_error(
                        "Y10", location, f"the part at {part.start} of {self.changed.name}: {error}"
                    ) from None

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
