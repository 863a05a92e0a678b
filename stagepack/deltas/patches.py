"""A bundle and a chain of deltas -> the files of the last result, composed in memory; nothing is written."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stagepack.deltas.changed_bytes import ChangedBytes
from stagepack.deltas.delta import Delta
from stagepack.deltas.document import ChangedFile, Part
from stagepack.errors import OptionError, Problem
from stagepack.format.chunks import File
from stagepack.format.file_source import FilePatch
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems, rule_error

# Deltas of a chain. Each is read for each part that it changes.
MOST_DELTAS: Final = 64


def patched_bundle(bundle: Bundle, deltas: Sequence[Delta]) -> Bundle:
    """Return the bundle that deltas make of another one. Its files are composed when they are read; nothing is written.

    deltas: the deltas in their order, each on the result of the one before; none for the bundle itself.
    """
    if not deltas:
        return bundle
    if bundle.patches is not None or bundle.stored is not bundle:
        raise OptionError(f"{bundle.location}: deltas: expected a bundle as it was opened: give all deltas in one call")
    check_chain(bundle.digest, deltas)
    if not (deltas := without_returns(bundle.digest, deltas)):
        return bundle
    patches = ComposedFiles(bundle, deltas)
    patched = copy.copy(bundle)
    for derived in ("files", "_facts"):
        patched.__dict__.pop(derived, None)
    patched.patches = patches
    patched.manifest = patches.deltas[-1].result_manifest
    entry_points = patched.entry_points
    patched.selected = entry_points[0] if len(entry_points) == 1 else None
    return patched if bundle.selected is None or patched.selected else patched.select(bundle.selected.name)


def check_chain(base: str, deltas: Sequence[Delta]) -> None:
    """Refuse deltas of which one is not on the result of the one before (Y8)."""
    if len(deltas) > MOST_DELTAS:
        raise rule_error(
            "Y8", "deltas", f"expected at most {MOST_DELTAS} deltas, found {len(deltas)}: apply some of them first"
        )
    expected = base
    for delta in deltas:
        if delta.base != expected:
            message = f"expected a delta on the bundle {expected}, found one on {delta.base}: give all deltas between them, in order"
            raise rule_error("Y8", delta.location, message)
        expected = delta.result


def without_returns(base: str, deltas: Sequence[Delta]) -> list[Delta]:
    """Leave out the deltas of a chain that lead from a version back to itself, so that it has each version once."""
    chain, digests = list[Delta](), [base]
    for delta in deltas:
        if delta.result in digests:
            position = digests.index(delta.result)
            del chain[position:], digests[position + 1 :]
        else:
            chain.append(delta)
            digests.append(delta.result)
    return chain


class ComposedFiles:
    """The files that a chain of deltas makes of the files of a bundle: a `stagepack.format.file_source.FilePatches`.

    deltas: at least one, each on the result of the one before; no result is an earlier one.
    """

    def __init__(self, base: Bundle, deltas: Sequence[Delta]) -> None:
        self.base = base
        self.base_digest = base.digest
        self.deltas = tuple(deltas)
        self._patches = _follow(base.files, deltas)

    @property
    def location(self) -> str:
        """The locations of the deltas."""
        return ", ".join(delta.location for delta in self.deltas)

    @property
    def open_deltas(self) -> Mapping[str, Delta]:
        """See `FilePatches`."""
        return {delta.digest: delta for delta in self.deltas}

    @property
    def version(self) -> str:
        """See `FilePatches`."""
        return self.deltas[-1].version if self.deltas else ""

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
                step = ChangedBytes.of(delta, changed)
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
    steps: tuple[ChangedBytes, ...]

    def apply(self, start: int, memory: memoryview) -> None:
        """See `FilePatch`."""
        for step in self.steps:
            step.apply(start, memory)
