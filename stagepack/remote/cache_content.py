"""The bundles in the cache, and their removal while other processes use the cache.

A bundle that a process has opened is locked, and kept. Of files that are open or mapped, only the names are removed: they stay usable.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagepack.remote.cache import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBundle:
    """A bundle in the cache.

    Attributes:
        digest: its digest.
        location: the URL that it was opened at last.
        byte_count: the size of its files that are there; bundles may share some.
        used_at: when it was opened last, in seconds since the epoch.
    """

    digest: str
    location: str
    byte_count: int
    used_at: float


def cached_bundles(cache: Cache) -> list[CachedBundle]:
    """Return the bundles in the cache, the one that was used last first."""
    bundles = []
    for folder in _entries(cache.folder / "bundles"):
        location_path = cache.location_path(folder.name)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            try:
                location, used_at = location_path.read_text(errors="replace"), location_path.stat().st_mtime
            except OSError:
                location, used_at = "", folder.stat().st_mtime
            byte_count = sum(status.st_size for status in _statuses(folder))
            bundles.append(CachedBundle(digest=folder.name, location=location, byte_count=byte_count, used_at=used_at))
    return sorted(bundles, key=lambda bundle: bundle.used_at, reverse=True)


def disk_bytes(cache: Cache) -> int:
    """Return the bytes of the disk that the cache takes, each file once."""
    folders = [cache.folder / "files", *_entries(cache.folder / "bundles")]
    statuses = {(status.st_dev, status.st_ino): status for folder in folders for status in _statuses(folder)}
    return sum(status.st_blocks * 512 for status in statuses.values())


def remove_bundles(
    cache: Cache, *, unused_seconds: float | None = None, most_bytes: int | None = None
) -> list[CachedBundle]:
    """Remove bundles from the cache, those first that were not used for the longest time, and downloads that were interrupted.

    most_bytes: remove bundles until the cache takes at most so many bytes of the disk.
    """
    removed_bundles = []
    _remove_unused_files(cache, unused_seconds, most_bytes)
    for bundle in reversed(cached_bundles(cache)):
        is_old = unused_seconds is not None and bundle.used_at < time.time() - unused_seconds
        is_over = most_bytes is not None and disk_bytes(cache) > most_bytes
        if (is_old or is_over) and _remove_bundle(cache, bundle.digest):
            removed_bundles.append(bundle)
            _remove_unused_files(cache, unused_seconds, most_bytes)
    return removed_bundles


def _remove_bundle(cache: Cache, digest: str) -> bool:
    """Remove the folder of a bundle, unless a process has opened it, or removed it."""
    folder = cache.bundle_folder(digest)
    with contextlib.suppress(FileNotFoundError), _exclusive_lock(folder) as is_locked:
        if is_locked:
            shutil.rmtree(folder)
            cache.location_path(digest).unlink(missing_ok=True)
        return is_locked
    return False


def _remove_unused_files(cache: Cache, unused_seconds: float | None, most_bytes: int | None) -> None:
    """Remove files that are in no bundle any more, and parts of files that nobody downloads."""
    for path in _entries(cache.folder / "files"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            is_old = unused_seconds is not None and status.st_mtime < time.time() - unused_seconds
            is_over = most_bytes is not None and disk_bytes(cache) > most_bytes
            if status.st_nlink > 1 or not (is_old or is_over or path.suffix != ".part"):
                continue
            # The process that downloads a file has it locked until it is in the folder of a bundle.
            with _exclusive_lock(path) as is_locked:
                if is_locked and path.stat().st_nlink == 1:
                    path.unlink()


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[bool]:
    """Lock a file or a folder. Yields False, at once, if another process has a lock on it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> Sequence[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    for path in _entries(folder):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat()
