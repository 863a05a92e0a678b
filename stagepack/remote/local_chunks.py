"""Chunks that bundles on this machine have already, so that they need not be downloaded."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from stagepack.errors import StagepackError
from stagepack.format.bundle_files import read_file_list
from stagepack.format.chunks import File, FileChunk, file_chunks
from stagepack.format.file_checks import open_regular_file
from stagepack.format.own_folders import folder_format
from stagepack.remote.composed_chunks import ComposedChunks

# Each read is compared with the digest, and a bundle that was changed in place differs: more places would take time for nothing.
_MOST_PLACES: Final = 3
_MOST_BUNDLES: Final = 64
# Entries of a folder that are looked at for bundles.
_MOST_ENTRIES: Final = 1000


class LocalChunks:
    """The chunks of some files that bundles on this machine have, by their digests.

    Attributes:
        composed: makes further chunks; None if nothing does.
    """

    def __init__(self, folders: Iterable[Path], needed: Sequence[File]) -> None:
        digests = {chunk.digest for entry in needed for chunk in file_chunks(entry)}
        self.composed: ComposedChunks | None = None
        self._places: dict[str, list[tuple[Path, int]]] = {}
        for folder in list(dict.fromkeys(folders))[:_MOST_BUNDLES]:
            for path, entry in _listed_files(folder):
                for chunk in file_chunks(entry):
                    if chunk.digest in digests:
                        self._places.setdefault(chunk.digest, []).append((path, chunk.start))

    def missing_bytes(self, entries: Iterable[File]) -> int:
        """Return the bytes of the chunks of files that no bundle has."""
        chunks = {chunk.digest: chunk.end - chunk.start for entry in entries for chunk in file_chunks(entry)}
        return sum(size for digest, size in chunks.items() if digest not in self._places)

    def read(self, chunk: FileChunk) -> bytes | memoryview | None:
        """Return the content of a chunk, compared with its digest; None if no bundle has it."""
        for path, start in self._places.get(chunk.digest, ())[:_MOST_PLACES]:
            with contextlib.suppress(OSError, StagepackError):
                with open_regular_file(path) as file:
                    content = os.pread(file.fileno(), chunk.end - chunk.start, start)
                if chunk.check(content) is None:
                    return content
        return None if self.composed is None else self.composed.read(chunk)


def _listed_files(folder: Path) -> Iterator[tuple[Path, File]]:
    """Yield the files of a bundle that are there, or being downloaded if it is in a cache."""
    try:
        entries = read_file_list(folder)
    except (OSError, StagepackError):
        return
    for entry in entries:
        for path in (folder / entry.name, folder.parent.parent / "files" / f"{entry.blake3}.part"):
            if path.is_file():
                yield path, entry
                break


def neighbours(path: Path) -> list[Path]:
    """Return the bundle at a path, if there is one, and those beside it, the one that was changed last first."""
    changed_at: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in itertools.islice(entries, _MOST_ENTRIES):
            folder = Path(entry.path)
            with contextlib.suppress(OSError):  # a link to itself
                is_candidate = folder != path and not entry.name.startswith(".") and entry.is_dir()
                if is_candidate and folder_format(folder) is not None:
                    changed_at.append((entry.stat().st_mtime, folder))
    return [path, *(folder for _, folder in sorted(changed_at, reverse=True))]
