"""The files of a remote bundle, which come into the cache when they are needed."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from stagepack.errors import LimitError, Problem
from stagepack.format import limits
from stagepack.format.manifest import File
from stagepack.format.validate import SIGNATURE_NAME
from stagepack.remote.cache import Cache, PartFile, is_complete
from stagepack.remote.download import Download, FileDownload, Tries
from stagepack.remote.file_stream import DownloadObserver, FileStream
from stagepack.remote.store import FetchError, MissingFileError, RemoteStore
from stagepack.terminal import byte_progress

# Files that are open at a time.
_BATCH_FILES: Final = 64


class RemoteFiles:
    """Downloads files into the folder of a bundle in the cache: a `stagepack.format.bundle_files.FileSource`.

    Attributes:
        location: the URL of the bundle, for messages.
        url: the URL that opens it, which may have secrets; None if it needs options too.
    """

    def __init__(
        self, location: str, url: str | None, cache: Cache, folder: Path, open_store: Callable[[], RemoteStore]
    ) -> None:
        self.location = location
        self.url = url
        self._cache = cache
        self._folder = folder
        self._open_store = open_store

    @cached_property
    def _store(self) -> RemoteStore:
        return self._open_store()

    def fetch(self, entries: Sequence[File], observer: DownloadObserver | None = None) -> None:
        """Download the files that neither the folder nor the cache has; wait for those that other processes download."""
        self._tell_complete(entries, observer)
        while missing := [entry for entry in entries if not is_complete(self._folder / entry.name, entry)]:
            # Files of the same content come one after the other.
            distinct = list({entry.blake3: entry for entry in reversed(missing)}.values())[::-1]
            for first in range(0, len(distinct), _BATCH_FILES):
                self._fetch_batch(distinct[first : first + _BATCH_FILES], observer)
            self._tell_complete(entries, observer)

    def stream(self, entries: Sequence[File]) -> FileStream:
        """Begin to download files; return a handle that reads them while they arrive."""
        return FileStream.start(entries, self.fetch)

    def read_signature(self) -> bytes | None:
        """Download the signature file; None if there is none. It may be replaced at the URL, so it is not kept in the cache."""
        tries = Tries(f"{self.location}/{SIGNATURE_NAME}", threading.Event())
        while True:
            try:
                content = self._store.read_small(SIGNATURE_NAME, limits.SIGNATURE_BYTES)
            except MissingFileError:
                return None
            except FetchError as error:
                tries.failed(error)
            else:
                break
        if len(content) > limits.SIGNATURE_BYTES:
            message = f"expected at most {limits.SIGNATURE_BYTES} bytes, found more"
            raise LimitError([Problem(rule="L1", where=SIGNATURE_NAME, message=message)])
        return content

    def discard(self, entries: Sequence[File]) -> None:
        """Remove damaged files from the cache."""
        with self._cache.errors():
            for entry in entries:
                self._cache.discard(entry, self._folder)

    def _fetch_batch(self, entries: Sequence[File], observer: DownloadObserver | None) -> None:
        with contextlib.ExitStack() as locks:
            parts = self._lock_missing(entries, locks)
            self._tell_complete(entries, observer)
            if not parts:
                return
            downloads = [
                FileDownload(
                    entry=entry,
                    part=parts[entry.blake3],
                    on_chunk=partial(_ignore if observer is None else observer.arrived, entry),
                )
                for entry in entries
                if entry.blake3 in parts
            ]
            total_bytes = sum(download.entry.size for download in downloads)
            self._cache.check_free_bytes(total_bytes - sum(part.disk_bytes for part in parts.values()))
            display = (
                byte_progress(f"downloading {self.location}", total_bytes)
                if observer is None
                else contextlib.nullcontext(_ignore)
            )
            with display as progress, self._cache.errors():
                download = Download(self._store, self.location, progress)
                if observer is not None:
                    for file_download in downloads:
                        observer.opened(file_download.entry, parts[file_download.entry.blake3].path)
                    observer.began(download.cancel)
                with contextlib.closing(download.run(downloads)) as completed_files:
                    for file_download in completed_files:
                        part = parts[file_download.entry.blake3]
                        self._cache.add(file_download.entry, self._folder, part)
                        part.close()  # processes that wait for this file need not wait for the others

    def _tell_complete(self, entries: Sequence[File], observer: DownloadObserver | None) -> None:
        if observer is not None:
            for entry in entries:
                if is_complete(self._folder / entry.name, entry):
                    observer.completed(entry, self._folder / entry.name)

    def _lock_missing(self, entries: Sequence[File], locks: contextlib.ExitStack) -> dict[str, PartFile]:
        """Lock the files that must be downloaded; return them by their digests."""
        parts = {}
        # All processes lock files in one order, so that none waits for ever.
        for entry in sorted(entries, key=lambda entry: entry.blake3):
            if self._cache.add(entry, self._folder):
                continue
            part = locks.enter_context(self._cache.lock(entry))
            if self._cache.add(entry, self._folder):  # another process has completed it
                part.discard()
                continue
            parts[entry.blake3] = part
        return parts


def _ignore(*_: object) -> None:
    """Take no note of progress."""
