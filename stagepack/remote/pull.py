"""Download a whole bundle into a folder.

- Open a bundle at a URL.
- The files of a remote bundle, which come into the cache when they are needed.
"""

import contextlib
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from stagepack.errors import FormatError, NotABundleError, OutputExistsError, StagepackError, WriteError
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.file_writing import synchronize
from stagepack.format.manifest_codec import parse_manifest
from stagepack.format.output_file import is_bundle_folder, replace_folder
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME, rule_error
from stagepack.format.writer import check_output_path
from stagepack.remote.cache import Cache, PartFile, cached_bundles, is_complete
from stagepack.remote.download import Download, FileDownload, read_small
from stagepack.remote.hub import HubSnapshot, find_snapshot, is_offline, open_hub_store
from stagepack.remote.store import FsspecStore, HttpStore, MissingFileError, RemoteStore
from stagepack.remote.stream import Arrivals, FileStream
from stagepack.remote.url import HUB_SCHEME, WEB_SCHEMES, BundleUrl
from stagepack.terminal import byte_progress

# Files that are open at a time.
_BATCH_FILES: Final = 64


class RemoteFiles:
    """Downloads files into the folder of a bundle in the cache: a `stagepack.format.bundle_files.FileSource`."""

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

    def fetch(self, entries: Sequence[File], arrivals: Arrivals | None = None) -> None:
        """Download the files that neither the folder nor the cache has; wait for those that other processes download."""
        self._tell_complete(entries, arrivals)
        while missing := [entry for entry in entries if not is_complete(self._folder / entry.name, entry)]:
            # Files of the same content come one after the other.
            distinct = list({entry.blake3: entry for entry in reversed(missing)}.values())[::-1]
            for first in range(0, len(distinct), _BATCH_FILES):
                self._fetch_batch(distinct[first : first + _BATCH_FILES], arrivals)
            self._tell_complete(entries, arrivals)

    def stream(self, entries: Sequence[File]) -> FileStream:
        """Begin to download files; return a handle that reads them while they arrive."""
        return FileStream.start(entries, self.fetch)

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

    def _fetch_batch(self, entries: Sequence[File], arrivals: Arrivals | None) -> None:
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
            self._cache.check_free_bytes(total_bytes - sum(part.disk_bytes for part in parts.values()))
            is_shown = arrivals is None
            display = byte_progress(f"downloading {self.location}", total_bytes) if is_shown else nullcontext(_ignore)
            with display as progress, self._cache.errors():
                download = Download(self._store, self.location, progress)
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
) -> Bundle:
    """Open a bundle at a URL; only its manifest is downloaded.

    With ``HF_HUB_OFFLINE``, a bundle of the Hub is the snapshot in the Hub's own cache, as it is for transformers; or the one that was
    opened last from this URL.

    digest: the digest that the bundle must have. If the cache has its manifest, nothing is downloaded.
    """
    location = str(url)
    if url.scheme == HUB_SCHEME and is_offline() and (digest is None or not _cached_bundle(cache, digest)):
        if (snapshot := find_snapshot(url)) is not None:
            return Bundle(snapshot, source=HubSnapshot(url, snapshot))
        digest = digest or next((one.digest for one in cached_bundles(cache) if one.location == location), None)
    # Another process may remove the bundle from the cache before this one has locked it.
    while True:
        store, folder = _open_manifest(url, cache, digest, storage_options)
        descriptor = cache.use(folder.name, location)
        if descriptor is not None:
            break
    source = RemoteFiles(
        location,
        None if storage_options else url.with_secrets,
        cache,
        folder,
        lambda: store or open_store(url, storage_options),
    )
    weakref.finalize(source, os.close, descriptor)
    return Bundle(folder, source=source)


def _open_manifest(
    url: BundleUrl, cache: Cache, digest: str | None, storage_options: Mapping[str, Any] | None
) -> tuple[RemoteStore | None, Path]:
    """Bring the manifest of a bundle into the cache; return its store, if that was asked, and its folder in the cache."""
    if digest is not None and _cached_bundle(cache, digest):
        return None, cache.bundle_folder(digest)
    location = str(url)
    store = open_store(url, storage_options)
    try:
        content = read_small(store, location, MANIFEST_NAME, limits.MANIFEST_BYTES)
    except MissingFileError as error:
        raise NotABundleError(
            f"{location}: not a stagepack bundle: there is no {MANIFEST_NAME}: {error} [M1]"
        ) from None
    manifest = parse_manifest(content, f"{location}/{MANIFEST_NAME}")
    if digest not in (None, manifest.sha256):
        message = f"expected the bundle of the digest {digest}, found {manifest.sha256}: correct the digest or the URL"
        raise rule_error("D3", f"{location}/{MANIFEST_NAME}", message)
    return store, cache.add_manifest(manifest.sha256, content)


def open_store(url: BundleUrl, storage_options: Mapping[str, Any] | None = None) -> RemoteStore:
    """Return the store of a URL."""
    if url.scheme in WEB_SCHEMES:
        return HttpStore(url.file_url, storage_options=storage_options)
    if url.scheme == HUB_SCHEME:
        return open_hub_store(url, storage_options)
    return FsspecStore(url.folder, storage_options)


def _cached_bundle(cache: Cache, digest: str) -> bool:
    """Whether the cache has the manifest of a bundle, undamaged."""
    try:
        return Bundle(cache.bundle_folder(digest)).digest == digest
    except (NotABundleError, FormatError):
        return False


def pull(
    url: BundleUrl,
    out: str | os.PathLike[str],
    *,
    digest: str | None = None,
    overwrite: bool = False,
) -> tuple[Bundle, bool]:
    """Download a bundle into a folder, with its signature if it has one. Every chunk is compared with its digest.

    The files come into the folder ``.NAME.download`` beside the output, which is renamed when all are there. If the download is
    interrupted, the folder stays, and the next call for the same output goes on. So programs that are started again and again may call it.

    out: the folder to write. A bundle that is there already, of the same digest and undamaged, is left as it is.
    digest: the digest that the bundle must have. If the folder has it already, nothing is asked of the server.
    overwrite: replace another bundle, or a damaged one.
    The result is the bundle, and whether it was downloaded.
    """
    path = Path(os.path.abspath(out))
    download_folder = path.parent / f".{path.name}.download"
    try:
        return _pull_once(url, path, download_folder, digest=digest, overwrite=overwrite)
    except WriteError:
        # Another process may have written the bundle, and removed the folder.
        if download_folder.exists() or not is_bundle_folder(path):
            raise
        return _pull_once(url, path, download_folder, digest=digest, overwrite=overwrite)


def _pull_once(
    url: BundleUrl, path: Path, download_folder: Path, *, digest: str | None, overwrite: bool
) -> tuple[Bundle, bool]:
    if digest is not None and (present := _find_present(path, digest)) is not None:
        return _finished(present, download_folder), False
    if os.path.lexists(path) and (path.is_symlink() or not is_bundle_folder(path)):
        raise OutputExistsError(f"{path}: exists and is not a bundle, so it is not replaced: choose another path")
    _check_own_folder(download_folder)
    cache = Cache(download_folder)
    try:
        remote = open_url(url, cache, digest=digest)
        digest = remote.digest
        if (present := _find_present(path, digest)) is not None:
            return _finished(present, download_folder), False
        if not overwrite:
            _check_absent(path, url)
        # What lay in the folder before is compared too.
        remote.check_digests(remote.files)
        signature = remote.read_signature()
        with cache.errors():
            _write_signature(remote.path / SIGNATURE_NAME, signature)
            if os.path.lexists(path):
                check_output_path(path, overwrite=overwrite)
                replace_folder(remote.path, path, download_folder / "replaced")
            else:
                remote.path.rename(path)
    except (OutputExistsError, WriteError):
        # Another process may have written it, and removed the folder.
        if digest is not None and (present := _find_present(path, digest)) is not None:
            return _finished(present, download_folder), True
        raise
    return _finished(Bundle(path), download_folder), True


def _check_absent(path: Path, url: BundleUrl) -> None:
    if os.path.lexists(path):
        raise OutputExistsError(
            f"{path}: has another bundle than {url}, or a damaged one: choose another path, or replace it (--overwrite)"
        )


def _find_present(path: Path, digest: str) -> Bundle | None:
    """Return the bundle in a folder if it has a digest, and all its files are undamaged."""
    if path.is_symlink() or not is_bundle_folder(path):
        return None
    try:
        present = Bundle(path)
        if present.digest == digest:
            present.check_digests(present.files)
            return present
    except StagepackError:
        pass
    return None


def _finished(bundle: Bundle, download_folder: Path) -> Bundle:
    """Remove what this or a former download has left."""
    if not download_folder.is_symlink():
        shutil.rmtree(download_folder, ignore_errors=True)
    return bundle


def _check_own_folder(download_folder: Path) -> None:
    """Refuse what another user may have put in the place of the folder of a former download."""
    if not os.path.lexists(download_folder):
        return
    status = download_folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise WriteError(
            f"{download_folder}: expected the folder of a download of this user, found a link, or something of another user: remove it, "
            "or choose another output"
        )


def _write_signature(path: Path, signature: bytes | None) -> None:
    """Write a signature in the place of one that a former download has left."""
    path.unlink(missing_ok=True)
    if signature is not None:
        with path.open("xb") as file:
            file.write(signature)
        synchronize(path)
