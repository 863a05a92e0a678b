"""Download a whole bundle into a folder."""

import contextlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.file_writing import synchronize
from stagepack.format.reader import Bundle
from stagepack.format.validate import SIGNATURE_NAME
from stagepack.remote.cache import Cache
from stagepack.remote.open_url import open_url
from stagepack.remote.url import BundleUrl


def pull(
    url: BundleUrl,
    out: str | os.PathLike[str],
    *,
    digest: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Bundle:
    """Download a bundle into a folder, with its signature if it has one. Every chunk is compared with its digest.

    The files come into the folder ``.NAME.download`` beside the output, which is renamed when all are there. If the download is
    interrupted, the folder stays, and the next call for the same output goes on.

    out: the folder to write; it must not exist.
    """
    path = Path(os.path.abspath(out))
    if os.path.lexists(path):
        raise OutputExistsError(f"{path}: exists: choose another path")
    download_folder = path.parent / f".{path.name}.download"
    _check_own_folder(download_folder)
    cache = Cache(download_folder)
    try:
        remote = open_url(url, cache, digest=digest, storage_options=storage_options)
        # What lay in the folder before is compared too.
        remote.check_digests(remote.files)
        signature = remote.read_signature()
        with cache.errors():
            _write_signature(remote.path / SIGNATURE_NAME, signature)
            remote.path.rename(path)
    except WriteError:
        if os.path.lexists(path):
            raise OutputExistsError(f"{path}: another process has written it meanwhile") from None
        raise
    with contextlib.suppress(OSError):
        shutil.rmtree(cache.folder)
    return Bundle(path)


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
