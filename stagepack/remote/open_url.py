"""Open a bundle at a URL."""

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagepack.errors import DigestError, FormatError, NotABundleError, Problem
from stagepack.format import limits
from stagepack.format.manifest_reader import parse_manifest
from stagepack.format.reader import Bundle
from stagepack.format.validate import MANIFEST_NAME
from stagepack.remote.cache import Cache
from stagepack.remote.cache_content import cached_bundles
from stagepack.remote.download import Tries
from stagepack.remote.fsspec_store import FsspecStore
from stagepack.remote.http_store import HttpStore
from stagepack.remote.hub import open_hub_store
from stagepack.remote.hub_snapshot import HubSnapshot, find_snapshot, is_offline
from stagepack.remote.remote_files import RemoteFiles
from stagepack.remote.store import FetchError, MissingFileError, RemoteStore
from stagepack.remote.url import HUB_SCHEME, WEB_SCHEMES, BundleUrl


def open_url(
    url: BundleUrl,
    cache: Cache,
    *,
    digest: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
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
    location = str(url)
    store = None if digest is not None and _cached_bundle(cache, digest) else open_store(url, storage_options)
    if store is None:
        assert digest is not None
        folder = cache.bundle_folder(digest)
    else:
        content = _read_manifest(store, location)
        manifest = parse_manifest(content, f"{location}/{MANIFEST_NAME}")
        if digest not in (None, manifest.sha256):
            message = (
                f"expected the bundle of the digest {digest}, found {manifest.sha256}: correct the digest or the URL"
            )
            raise DigestError([Problem(rule="D3", where=f"{location}/{MANIFEST_NAME}", message=message)])
        folder = cache.add_manifest(manifest.sha256, content)
    return store, folder


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


def _read_manifest(store: RemoteStore, location: str) -> bytes:
    tries = Tries(f"{location}/{MANIFEST_NAME}", threading.Event())
    while True:
        try:
            return store.read_small(MANIFEST_NAME, limits.MANIFEST_BYTES)
        except MissingFileError as error:
            raise NotABundleError(
                f"{location}: not a stagepack bundle: there is no {MANIFEST_NAME}: {error} [M1]"
            ) from None
        except FetchError as error:
            tries.failed(error)
