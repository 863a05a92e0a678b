"""Chunks of a bundle that deltas at its URL make of an earlier version on this machine, so that they need not be downloaded.

What a delta says is not trusted: a chunk is taken if it has the digest that the manifest of the bundle states, and is downloaded otherwise.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from stagepack.deltas.delta import Delta
from stagepack.deltas.document import RESULT_NAME
from stagepack.errors import StagepackError
from stagepack.format.bundle_files import read_manifest
from stagepack.format.chunk_reads import FileRead
from stagepack.format.chunks import File, FileChunk
from stagepack.format.manifest import Manifest
from stagepack.format.reader import Bundle

# Earlier versions that are asked for; each takes a request. The first one is the one before at most times.
_MOST_BASES: Final = 3
_MOST_FOLDERS: Final = 64
# Deltas of a chain. Each takes two requests before its data.
_MOST_STEPS: Final = 16
# A document of a larger share of what is downloaded otherwise saves little.
_DOCUMENT_SHARE: Final = 4
_WEIGHT_SUFFIX: Final = ".safetensors"

# Opens the delta on a bundle of some digest, whose document has at most so many bytes; None if there is none.
OpenNext = Callable[[str, int], Delta | None]


class ComposedChunks:
    """The chunks of some files of a composed bundle."""

    def __init__(self, bundle: Bundle, entries: Iterable[File]) -> None:
        self._open_files = contextlib.ExitStack()
        self._reads: dict[str, FileRead] = {}
        patches = bundle.patches
        changed = [entry.name for entry in entries if patches is not None and patches.patch_of(entry.name) is not None]
        try:
            bundle.fetch(changed)
            for file_name in changed:
                self._reads[file_name] = bundle.open_read(self._open_files, file_name)
        except BaseException:
            self.close()
            raise

    def read(self, chunk: FileChunk) -> memoryview | None:
        """Return the content of a chunk, compared with its digest; None if it cannot be composed."""
        read = self._reads.get(chunk.entry.name)
        if read is not None:
            with contextlib.suppress(StagepackError):
                content = memoryview(bytearray(chunk.end - chunk.start))
                read.fill(chunk.start, content)
                if chunk.check(content) is None:
                    return content
            # A delta that does not make the bundle would be composed for each of its chunks.
            self._reads.pop(chunk.entry.name, None)
        return None

    def close(self) -> None:
        """Close the files."""
        self._reads.clear()
        self._open_files.close()


def find_composed(
    wanted: Manifest, folders: Iterable[Path], entries: Sequence[File], most_bytes: int, open_next: OpenNext
) -> Bundle | None:
    """Return a bundle that deltas make of one of the folders, if these take fewer bytes than the files that are wanted.

    wanted: the manifest of the bundle that they are to make.
    most_bytes: the bytes that are downloaded otherwise.
    """
    for base in _bases(wanted, folders):
        with contextlib.suppress(StagepackError, OSError):
            deltas = _chain(base.digest, wanted.sha256, entries, most_bytes, open_next)
            if deltas:
                from stagepack.deltas.patches import patched_bundle  # noqa: PLC0415 - numpy and zstandard, which few downloads need

                return patched_bundle(base, deltas)
    return None


def _bases(wanted: Manifest, folders: Iterable[Path]) -> Iterator[Bundle]:
    """Yield the bundles that may be earlier versions: those with the same weight files."""
    names, count = _weight_files(wanted), 0
    for folder in itertools.islice(folders, _MOST_FOLDERS):
        with contextlib.suppress(StagepackError, OSError):
            manifest = read_manifest(folder)
            if manifest.sha256 != wanted.sha256 and _weight_files(manifest) == names:
                yield Bundle(folder)
                count += 1
        if count == _MOST_BASES:
            return


def _weight_files(manifest: Manifest) -> set[str]:
    return {file.name for file in manifest.files if file.name.endswith(_WEIGHT_SUFFIX)}


def _chain(base: str, wanted: str, entries: Sequence[File], most_bytes: int, open_next: OpenNext) -> list[Delta]:
    """Return the deltas from one bundle to another; none if there are none, or they take as much as the files."""
    names, seen, deltas, left = {entry.name for entry in entries}, {base}, list[Delta](), most_bytes
    while base != wanted and len(deltas) < _MOST_STEPS:
        delta = open_next(base, left // _DOCUMENT_SHARE)
        if delta is None or delta.result in seen:
            return []
        needed = {RESULT_NAME, *(changed.data for changed in delta.document.changed if changed.name in names)}
        left -= sum(delta.files[file_name].size for file_name in needed)
        if left <= 0:
            return []
        deltas.append(delta)
        seen.add(base := delta.result)
    return deltas if base == wanted else []
