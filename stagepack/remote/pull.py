"""Download a whole bundle into a folder."""

import os
import shutil
import stat
from functools import partial
from pathlib import Path
from typing import Final

from stagepack.documents import Listed, open_listed
from stagepack.errors import OutputExistsError, StagepackError, WriteError
from stagepack.format.file_writing import synchronize
from stagepack.format.output_file import remove_folder, replace_folder
from stagepack.format.own_folders import check_no_link, check_outside_bundles, folder_format, other_files
from stagepack.format.quantities import format_bytes
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME, format_names
from stagepack.format.writer import check_output_path
from stagepack.remote.cache import Cache, DiskFullError, default_cache_folder
from stagepack.remote.cache_contents import has_downloads, keep_newest_bundles, other_entries
from stagepack.remote.fsspec_store import FsspecStore
from stagepack.remote.hub_cache import HubSnapshot, find_snapshot, is_offline
from stagepack.remote.local_chunks import neighbours
from stagepack.remote.remote_bundle import cached_folders, open_in_cache, open_remote_store
from stagepack.remote.url import HUB_SCHEME, BundleUrl

# Folders kept: an interrupted download, and the one of another version before it, whose chunks may be in the new one.
_KEPT_DOWNLOADS: Final = 2
# Bundles beside the output whose chunks may be in the new one.
_MOST_NEIGHBOURS: Final = 32
# In the folder of downloads: the bundle that was at the output, where the system cannot exchange two folders.
_REPLACED_NAME: Final = "replaced"


def pull(
    url: BundleUrl,
    out: str | os.PathLike[str],
    *,
    digest: str | None = None,
    overwrite: bool = False,
) -> tuple[Listed, bool]:
    """Download a bundle into a folder, with its signature if it has one. Every chunk is compared with its digest.

    The files come into the folder ``.NAME.download`` beside the output, which is renamed when all are there. If the download is
    interrupted, the folder stays, and the next call for the same output goes on. So programs that are started again and again may call it.
    Only on a full disk, nothing stays. Chunks that a bundle beside the output or in the cache has are copied from there.

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
        if download_folder.exists() or folder_format(path) is None:
            raise
        return _pull_once(url, path, download_folder, digest=digest, overwrite=overwrite)


def _pull_once(
    url: BundleUrl, path: Path, download_folder: Path, *, digest: str | None, overwrite: bool
) -> tuple[Listed, bool]:
    if digest is not None and (present := _find_present(path, digest)) is not None:
        return _finished(present, download_folder), False
    check_no_link(path)
    if os.path.lexists(path) and folder_format(path) is None:
        raise OutputExistsError(f"{path}: exists and is not a bundle, so it is not replaced: choose another path")
    check_outside_bundles(path)
    _check_own_folder(download_folder)
    cache = Cache(download_folder, cure="choose another output")
    remote: Listed | None = None
    try:
        remote = _open_source(url, cache, digest, path)
        digest = remote.digest
        if (present := _find_present(path, digest)) is not None:
            return _finished(present, download_folder), False
        _check_output(path, url, remote.document_format, overwrite=overwrite)
        keep_newest_bundles(cache, _KEPT_DOWNLOADS)
        # What lay in the folder before is compared too.
        remote.check_digests(remote.files)
        signature = remote.read_signature()
        with cache.errors():
            _write_signature(remote.path / SIGNATURE_NAME, signature)
            if os.path.lexists(path):
                check_output_path(path, overwrite=overwrite, document_format=remote.document_format)
                replace_folder(remote.path, path, download_folder / _REPLACED_NAME)
            else:
                remote.path.rename(path)
    except DiskFullError as error:
        _remove_downloads(download_folder)
        raise _full_disk_error(path, remote, error) from None
    except (OutputExistsError, WriteError):
        # Another process may have written it, and removed the folder.
        if digest is not None and (present := _find_present(path, digest)) is not None:
            return _finished(present, download_folder), True
        raise
    finally:
        if not has_downloads(cache):
            _remove_downloads(download_folder)
    return _finished(open_listed(path), download_folder), True


def _open_source(url: BundleUrl, cache: Cache, digest: str | None, path: Path) -> Listed:
    """Open the bundle in the folder of downloads. Files come from a snapshot in the Hub's cache if the Hub must not be asked."""
    snapshot = find_snapshot(url) if url.scheme == HUB_SCHEME and is_offline() else None
    remote = open_in_cache(
        url,
        cache,
        digest=digest,
        open_store=partial(open_remote_store, url) if snapshot is None else partial(FsspecStore, f"file://{snapshot}"),
        bundle_folders=lambda: [
            *cached_folders(cache.folder),
            *neighbours(path)[:_MOST_NEIGHBOURS],
            *cached_folders(default_cache_folder()),
        ],
    )
    if snapshot is not None:
        HubSnapshot(url, snapshot).fetch(remote.listed)
    return remote


def _check_output(path: Path, url: BundleUrl, document_format: str, *, overwrite: bool) -> None:
    """Refuse an output before the download."""
    if os.path.lexists(path) and overwrite:
        check_output_path(path, overwrite=True, document_format=document_format)
    elif os.path.lexists(path):
        raise OutputExistsError(
            f"{path}: has another bundle than {url}, or a damaged one: choose another path, or replace it (--overwrite)"
        )


def _full_disk_error(path: Path, bundle: Listed | None, error: DiskFullError) -> WriteError:
    """The error for a download that did not fit on the disk, and was removed."""
    needed = (
        "" if bundle is None else f"the bundle needs {format_bytes(sum(file.size for file in bundle.listed))}, and "
    )
    free = format_bytes(shutil.disk_usage(path.parent).free)
    return WriteError(
        f"{path}: could not be written: {error.reason}: {needed}{free} are free, now that what was downloaded is removed: free more, or "
        "choose an output on another disk"
    )


def _find_present(path: Path, digest: str) -> Listed | None:
    """Return the bundle in a folder if it has a digest, and all its files are undamaged."""
    if path.is_symlink() or folder_format(path) is None:
        return None
    try:
        present = open_listed(path)
        if present.digest == digest:
            present.check_digests(present.files)
            return present
    except StagepackError:
        pass
    return None


def _finished(bundle: Listed, download_folder: Path) -> Listed:
    """Remove what this or a former download has left."""
    _remove_downloads(download_folder)
    return bundle


def _remove_downloads(download_folder: Path) -> None:
    if os.path.lexists(download_folder) and _is_own_folder(download_folder) and not _other_entries(download_folder):
        for bundle_folder in (*cached_folders(download_folder), download_folder / _REPLACED_NAME):
            remove_folder(bundle_folder, MANIFEST_NAME)
        shutil.rmtree(download_folder, ignore_errors=True)


def _check_own_folder(download_folder: Path) -> None:
    """Refuse what another user, or another program, may have put in the place of the folder of a former download."""
    if not os.path.lexists(download_folder):
        return
    if not _is_own_folder(download_folder):
        raise WriteError(
            f"{download_folder}: expected the folder of a download of this user, found a link, or something of another user: remove it, "
            "or choose another output"
        )
    if others := _other_entries(download_folder):
        raise WriteError(
            f"{download_folder}: expected the folder of a download, found other files in it: {format_names(others)}: move them out of it, "
            "or choose another output"
        )


def _is_own_folder(download_folder: Path) -> bool:
    status = download_folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _other_entries(download_folder: Path) -> list[str]:
    """What is in the folder of downloads and was not downloaded."""
    replaced = download_folder / _REPLACED_NAME
    is_own = not replaced.is_symlink() and folder_format(replaced) is not None and not other_files(replaced)
    return [path for path in other_entries(download_folder) if path != _REPLACED_NAME or not is_own]


def _write_signature(path: Path, signature: bytes | None) -> None:
    """Write a signature in the place of one that a former download has left."""
    path.unlink(missing_ok=True)
    if signature is not None:
        with path.open("xb") as file:
            file.write(signature)
        synchronize(path)
