"""The files of a remote bundle, which come into the cache when they are needed."""

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from stagepack.format.manifest import File
from stagepack.remote.cache import Cache, is_complete
from stagepack.remote.download import Download, FileDownload
from stagepack.remote.store import RemoteStore
from stagepack.terminal import byte_progress

# Files that are open at a time.
_BATCH_FILES: Final = 64


class RemoteFiles:
    """Downloads files into the folder of a bundle in the cache: a `stagepack.format.file_source.FileSource`.

    Attributes:
        location: the URL of the bundle.
    """

    def __init__(self, location: str, cache: Cache, folder: Path, open_store: Callable[[], RemoteStore]) -> None:
        """Download nothing yet.

        Args:
            location: the URL of the bundle, for messages.
            cache: the cache.
            folder: the folder of the bundle in the cache.
            open_store: makes the store, when the first file is downloaded.
        """
        self.location = location
        self._cache = cache
        self._folder = folder
        self._open_store = open_store

    @cached_property
    def _store(self) -> RemoteStore:
        return self._open_store()

    def fetch(self, entries: Sequence[File]) -> None:
        """Download the files that neither the folder nor the cache has; wait for those that other processes download."""
        while missing := [entry for entry in entries if not is_complete(self._folder / entry.name, entry)]:
            # Files of the same content come one after the other. All processes lock files in one order, so that none waits for ever.
            distinct = sorted({entry.blake3: entry for entry in missing}.values(), key=lambda entry: entry.blake3)
            for first in range(0, len(distinct), _BATCH_FILES):
                self._fetch_batch(distinct[first : first + _BATCH_FILES])

    def discard(self, entries: Sequence[File]) -> None:
        """Remove damaged files from the cache."""
        with self._cache.errors():
            for entry in entries:
                self._cache.discard(entry, self._folder)

    def _fetch_batch(self, entries: Sequence[File]) -> None:
        with contextlib.ExitStack() as locks:
            downloads: dict[str, FileDownload] = {}
            parts = {}
            for entry in entries:
                if self._cache.add(entry, self._folder):
                    continue
                part = locks.enter_context(self._cache.lock(entry))
                if self._cache.add(entry, self._folder):  # another process has completed it
                    part.discard()
                    continue
                parts[entry.blake3] = part
                downloads[entry.blake3] = FileDownload(entry=entry, part=part)
            if not downloads:
                return
            total_bytes = sum(download.entry.size for download in downloads.values())
            self._cache.check_free_bytes(total_bytes - sum(part.disk_bytes for part in parts.values()))
            with byte_progress(f"downloading {self.location}", total_bytes) as progress, self._cache.errors():
                completed_files = Download(self._store, self.location, progress).run(list(downloads.values()))
                with contextlib.closing(completed_files):
                    for download in completed_files:
                        part = parts[download.entry.blake3]
                        self._cache.add(download.entry, self._folder, part)
                        part.close()  # processes that wait for this file need not wait for the others
