"""Bundles, deltas and adapters at a URL, whose files come into a cache when they are needed."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from stagepack.deltas.delta import DELTA, Delta
from stagepack.documents import Listed, open_listed, parse_listed
from stagepack.errors import FormatError, NotABundleError, RemoteError, StagepackError
from stagepack.format import limits
from stagepack.format.bundle_files import read_manifest
from stagepack.format.chunks import File
from stagepack.format.manifest_codec import parse_document
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME, rule_error
from stagepack.remote.cache import Cache, PartFile, is_complete
from stagepack.remote.cache_contents import cached_bundles, remove_with_files
from stagepack.remote.composed_chunks import ComposedChunks, OpenNext, find_composed
from stagepack.remote.download import Download, FileDownload, read_small
from stagepack.remote.fsspec_store import FsspecStore
from stagepack.remote.http_store import HttpStore
from stagepack.remote.hub import open_hub_store
from stagepack.remote.hub_cache import HubSnapshot, find_snapshot, is_offline
from stagepack.remote.local_chunks import LocalChunks
from stagepack.remote.store import FetchError, MissingFileError, RemoteStore
from stagepack.remote.stream import Arrivals, DownloadStream
from stagepack.remote.url import HUB_SCHEME, WEB_SCHEMES, BundleUrl
from stagepack.terminal import byte_progress

# Files that are open at a time.
_BATCH_FILES: Final = 64
# The folder of deltas in the folder of a bundle at a URL.
DELTAS_FOLDER: Final = "deltas"
# A download of less does not look for deltas.
_LEAST_COMPOSED_BYTES: Final = 2**20


class RemoteFiles:
    """Downloads files into the folder of a bundle in the cache: a `stagepack.format.file_source.FileSource`."""

    def __init__(
        self,
        location: str,
        url: str | None,
        cache: Cache,
        folder: Path,
        open_store: Callable[[], RemoteStore],
        bundle_folders: Callable[[], Iterable[Path]],
    ) -> None:
        self.location = location
        self.url = url
        self._cache = cache
        self._folder = folder
        self._open_store = open_store
        # Bundles on this machine that may have some of the chunks.
        self._bundle_folders = bundle_folders
        # Finds the deltas beside the bundle; None for what has none.
        self.open_next: OpenNext | None = None

    @cached_property
    def _store(self) -> RemoteStore:
        return self._open_store()

    def fetch(self, entries: Sequence[File], arrivals: Arrivals | None = None) -> None:
        """Download the files that neither the folder nor the cache has; wait for those that other processes download."""
        self._tell_complete(entries, arrivals)
        while missing := [entry for entry in entries if not is_complete(self._folder / entry.name, entry)]:
            # Files of the same content come one after the other.
            distinct = list({entry.blake3: entry for entry in reversed(missing)}.values())[::-1]
            self._cache.check_free_bytes(distinct)
            folders = [folder for folder in self._bundle_folders() if folder != self._folder]
            local_chunks = LocalChunks(folders, distinct)
            with self._composing(distinct, folders, local_chunks):
                for first in range(0, len(distinct), _BATCH_FILES):
                    self._fetch_batch(distinct[first : first + _BATCH_FILES], local_chunks, arrivals)
            self._tell_complete(entries, arrivals)

    @contextlib.contextmanager
    def _composing(self, entries: Sequence[File], folders: Sequence[Path], local_chunks: LocalChunks) -> Iterator[None]:
        """Return a context in which deltas make chunks of an earlier version, where they take fewer bytes than the files."""
        missing_bytes = local_chunks.missing_bytes(entries) - self._cache.begun_bytes(entries)
        opened: dict[str, Sequence[File]] = {}
        if missing_bytes >= _LEAST_COMPOSED_BYTES:
            local_chunks.composed = self._compose(entries, folders, missing_bytes, opened)
        try:
            yield
        finally:
            if local_chunks.composed is not None:
                local_chunks.composed.close()
                local_chunks.composed = None
            for digest, delta_files in opened.items():
                with contextlib.suppress(OSError):
                    remove_with_files(self._cache, digest, delta_files)

    def _compose(
        self, entries: Sequence[File], folders: Sequence[Path], most_bytes: int, opened: dict[str, Sequence[File]]
    ) -> ComposedChunks | None:
        open_next = self.open_next
        if open_next is None:
            return None

        def noting_open(base: str, left_bytes: int) -> Delta | None:
            if (delta := open_next(base, left_bytes)) is not None:
                opened[delta.digest] = delta.listed
            return delta

        # The one that was opened at the same URL is the version before at most times.
        folders = sorted(folders, key=lambda folder: _location_of(folder) != self.location)
        with contextlib.suppress(StagepackError, OSError):
            composed = find_composed(read_manifest(self._folder), folders, entries, most_bytes, noting_open)
            return None if composed is None else ComposedChunks(composed, entries)
        return None

    def stream(self, entries: Sequence[File]) -> DownloadStream:
        """Begin to download files; return a handle that reads them while they arrive."""
        return DownloadStream.start(entries, self.fetch)

    def read_signature(self) -> bytes | None:
        """Download the signature file; None if there is none. It may be replaced at the URL, so it is not kept in the cache."""
        try:
            content = read_small(self._store, self.location, SIGNATURE_NAME, limits.SIGNATURE_BYTES)
        except MissingFileError:
            return None
        if len(content) > limits.SIGNATURE_BYTES:
            raise rule_error("L1", SIGNATURE_NAME, f"expected at most {limits.SIGNATURE_BYTES} bytes, found more")
        return content

    def discard(self, entries: Sequence[File]) -> None:
        """Remove damaged files from the cache."""
        with self._cache.errors():
            for entry in entries:
                self._cache.discard(entry, self._folder)

    def _fetch_batch(self, entries: Sequence[File], local_chunks: LocalChunks, arrivals: Arrivals | None) -> None:
        with contextlib.ExitStack() as locks:
            parts = self._lock_missing(entries, locks)
            self._tell_complete(entries, arrivals)
            if not parts:
                return
            on_chunk = _ignore if arrivals is None else arrivals.arrived
            downloads = [
                FileDownload(entry=entry, part=parts[entry.blake3], on_chunk=partial(on_chunk, entry))
                for entry in entries
                if entry.blake3 in parts
            ]
            total_bytes = sum(download.entry.size for download in downloads)
            is_shown = arrivals is None
            display = byte_progress(f"downloading {self.location}", total_bytes) if is_shown else nullcontext(_ignore)
            with display as progress, self._cache.errors():
                download = Download(self._store, self.location, progress, local_chunks)
                if arrivals is not None:
                    for file_download in downloads:
                        arrivals.opened(file_download.entry, file_download.part.path)
                    arrivals.began(download.cancel)
                with contextlib.closing(download.run(downloads)) as completed_files:
                    for file_download in completed_files:
                        self._cache.add(file_download.entry, self._folder, file_download.part)
                        file_download.part.close()  # processes that wait for this file need not wait for the others

    def _tell_complete(self, entries: Sequence[File], arrivals: Arrivals | None) -> None:
        if arrivals is not None:
            for entry in entries:
                if is_complete(self._folder / entry.name, entry):
                    arrivals.completed(entry, self._folder / entry.name)

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


def open_url(
    url: BundleUrl, cache: Cache, *, digest: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Listed:
    """Open a bundle, a delta or an adapter at a URL; only its manifest is downloaded.

    With ``HF_HUB_OFFLINE``, a bundle of the Hub is the snapshot in the Hub's own cache, as it is for transformers; or the one that was
    opened last from this URL.

    digest: the digest that the bundle must have. If the cache has its manifest, nothing is downloaded.
    """
    location = str(url)
    if url.scheme == HUB_SCHEME and is_offline() and (digest is None or not _cached_bundle(cache, digest)):
        if (snapshot := find_snapshot(url)) is not None:
            return open_listed(snapshot, source=HubSnapshot(url, snapshot))
        digest = digest or next((one.digest for one in cached_bundles(cache) if one.location == location), None)
    return open_in_cache(
        url,
        cache,
        digest=digest,
        storage_options=storage_options,
        open_store=partial(open_remote_store, url, storage_options),
        bundle_folders=partial(cached_folders, cache.folder),
    )


def open_in_cache(
    url: BundleUrl,
    cache: Cache,
    *,
    digest: str | None,
    storage_options: Mapping[str, Any] | None = None,
    open_store: Callable[[], RemoteStore],
    bundle_folders: Callable[[], Iterable[Path]],
) -> Listed:
    """Open a bundle, a delta or an adapter whose files come from a store into a cache."""
    location = str(url)
    # Another process may remove the bundle from the cache before this one has locked it.
    while True:
        store, folder = _open_manifest(location, cache, digest, open_store)
        descriptor = cache.use(folder.name, location)
        if descriptor is not None:
            break
    source = RemoteFiles(
        location,
        None if storage_options else url.with_secrets,
        cache,
        folder,
        lambda: store or open_store(),
        bundle_folders,
    )
    weakref.finalize(source, os.close, descriptor)
    listed = open_listed(folder, source=source)
    if isinstance(listed, Bundle):
        source.open_next = partial(open_next, url.child(DELTAS_FOLDER), cache, storage_options)
    return listed


def open_next(
    folder: BundleUrl,
    cache: Cache,
    storage_options: Mapping[str, Any] | None,
    base: str,
    most_bytes: int = limits.MANIFEST_BYTES,
) -> Delta | None:
    """Open the delta on a bundle in a folder of deltas at a URL (SPEC section 13). It is asked for once; a caller may repeat that.

    base: the digest of the bundle.
    most_bytes: the largest document.
    The result is None if there is none.
    """
    url = folder.child(base)
    store = open_remote_store(url, storage_options)
    try:
        content = store.read_small(MANIFEST_NAME, most_bytes)
    except MissingFileError:
        return None
    except FetchError as error:
        raise RemoteError(f"{url}: {error}") from None
    if len(content) > most_bytes:
        raise rule_error("L1", f"{url}/{MANIFEST_NAME}", f"expected at most {most_bytes} bytes, found more")
    document = parse_document(content, f"{url}/{MANIFEST_NAME}", DELTA)
    if document.base != base:
        message = f"expected a delta on the bundle that its folder is named by, found one on {document.base}"
        raise rule_error("Y8", str(url), message)
    cache.add_manifest(document.sha256, content)
    delta = open_in_cache(
        url,
        cache,
        digest=document.sha256,
        storage_options=storage_options,
        open_store=lambda: store,
        bundle_folders=lambda: (),
    )
    assert isinstance(delta, Delta)
    return delta


def _open_manifest(
    location: str, cache: Cache, digest: str | None, open_store: Callable[[], RemoteStore]
) -> tuple[RemoteStore | None, Path]:
    """Bring the manifest of a bundle into the cache; return its store, if that was asked, and its folder in the cache."""
    if digest is not None and _cached_bundle(cache, digest):
        return None, cache.bundle_folder(digest)
    store = open_store()
    content = _read_manifest(store, location)
    manifest = parse_listed(content, f"{location}/{MANIFEST_NAME}")
    if digest not in (None, manifest.sha256):
        message = f"expected the bundle of the digest {digest}, found {manifest.sha256}: correct the digest or the URL"
        raise rule_error("D3", f"{location}/{MANIFEST_NAME}", message)
    return store, cache.add_manifest(manifest.sha256, content)


def digest_at(url: BundleUrl) -> str:
    """Return the digest of the bundle or the delta that is at a URL now; empty for one of the Hub that is not asked."""
    if url.scheme == HUB_SCHEME and is_offline():
        return ""
    content = _read_manifest(open_remote_store(url), str(url))
    return parse_listed(content, f"{url}/{MANIFEST_NAME}").sha256


def _read_manifest(store: RemoteStore, location: str) -> bytes:
    try:
        return read_small(store, location, MANIFEST_NAME, limits.MANIFEST_BYTES)
    except MissingFileError as error:
        raise NotABundleError(
            f"{location}: not a stagepack bundle: there is no {MANIFEST_NAME}: {error} [M1]"
        ) from None


def open_remote_store(url: BundleUrl, storage_options: Mapping[str, Any] | None = None) -> RemoteStore:
    """Return the store of a URL."""
    if url.scheme in WEB_SCHEMES:
        return HttpStore(url.file_url, storage_options=storage_options)
    if url.scheme == HUB_SCHEME:
        return open_hub_store(url, storage_options)
    return FsspecStore(url.folder, storage_options)


def cached_folders(cache_folder: Path) -> list[Path]:
    """The folders of the bundles in a cache, the one that was changed last first."""
    changed_at: list[tuple[float, Path]] = []
    for folder in (cache_folder / "bundles").glob("*/"):
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            changed_at.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(changed_at, reverse=True)]


def _location_of(folder: Path) -> str:
    """The URL that a bundle in a cache was opened at last; empty for other bundles."""
    with contextlib.suppress(OSError):
        return (folder.parent.parent / "locations" / folder.name).read_text(errors="replace")
    return ""


def _cached_bundle(cache: Cache, digest: str) -> bool:
    """Whether the cache has the manifest of a bundle, undamaged."""
    try:
        return open_listed(cache.bundle_folder(digest)).digest == digest
    except (NotABundleError, FormatError):
        return False
