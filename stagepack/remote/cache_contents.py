"""The bundles in a cache, and their removal while other processes use the cache.

A bundle that a process has opened is locked, and kept. Of files that are open or mapped, only the names are removed: they stay usable. What
others have put into the folder stays.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagepack.errors import StagepackError
from stagepack.format.bundle_files import read_file_list
from stagepack.format.chunks import File
from stagepack.format.output_file import remove_folder
from stagepack.format.own_folders import other_files
from stagepack.format.rules import DIGEST_PATTERN, MANIFEST_NAME
from stagepack.remote.cache import Cache

# The names that a cache gives, by folder. The user may have named a folder as the cache that has others too.
_OWN_NAMES: Final[Mapping[str, re.Pattern[str]]] = {
    "bundles": DIGEST_PATTERN,
    "files": re.compile(r"[0-9a-f]{64}(\.part)?|manifest-[0-9a-f]{64}\.part"),
    "locations": DIGEST_PATTERN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBundle:
    """A bundle in the cache."""

    digest: str
    location: str  # the URL that it was opened at last
    byte_count: int  # of its files that are there; bundles may share some
    used_at: float  # when it was opened last, in seconds since the epoch


def cached_bundles(cache: Cache) -> list[CachedBundle]:
    """Return the bundles in the cache, the one that was used last first."""
    bundles = []
    for folder in _own_entries(cache, "bundles"):
        location_path = cache.location_path(folder.name)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            try:
                location, used_at = location_path.read_text(errors="replace"), location_path.stat().st_mtime
            except OSError:
                location, used_at = "", folder.stat().st_mtime
            byte_count = sum(status.st_size for status in _statuses(_entries(folder)))
            bundles.append(CachedBundle(digest=folder.name, location=location, byte_count=byte_count, used_at=used_at))
    return sorted(bundles, key=lambda bundle: bundle.used_at, reverse=True)


def disk_bytes(cache: Cache) -> int:
    """Return the bytes of the disk that the cache takes, each file once."""
    paths = [
        *_own_entries(cache, "files"),
        *(path for folder in _own_entries(cache, "bundles") for path in _entries(folder)),
    ]
    statuses = {(status.st_dev, status.st_ino): status for status in _statuses(paths)}
    return sum(status.st_blocks * 512 for status in statuses.values())


def has_downloads(cache: Cache) -> bool:
    """Whether the cache has more than manifests."""
    files = [path for path in _own_entries(cache, "files") if not path.name.startswith("manifest-")]
    files += [
        path for folder in _own_entries(cache, "bundles") for path in _entries(folder) if path.name != MANIFEST_NAME
    ]
    return any(status.st_blocks for status in _statuses(files))


def remove_bundles(
    cache: Cache, *, unused_seconds: float | None = None, most_bytes: int | None = None
) -> list[CachedBundle]:
    """Remove bundles, the least recently used first, until the cache takes few enough bytes; and interrupted downloads."""
    removed_bundles = []
    _remove_unused_files(cache, unused_seconds, most_bytes)
    for bundle in reversed(cached_bundles(cache)):
        is_old = unused_seconds is not None and bundle.used_at < time.time() - unused_seconds
        is_over = most_bytes is not None and disk_bytes(cache) > most_bytes
        if (is_old or is_over) and remove_bundle(cache, bundle.digest):
            removed_bundles.append(bundle)
            _remove_unused_files(cache, unused_seconds, most_bytes)
    return removed_bundles


def remove_with_files(cache: Cache, digest: str, entries: Iterable[File]) -> bool:
    """Remove a bundle or a delta, and those of its files that no other one has; False if it is in use."""
    if not remove_bundle(cache, digest):
        return False
    for entry in entries:
        path = cache.folder / "files" / entry.blake3
        with contextlib.suppress(FileNotFoundError), _exclusive_lock(path) as is_locked:
            if is_locked and path.stat().st_nlink == 1:
                path.unlink()
    return True


def remove_bundle(cache: Cache, digest: str) -> bool:
    """Remove the folder of a bundle, unless a process has opened it, or removed it, or somebody has put other files there."""
    folder = cache.bundle_folder(digest)
    with contextlib.suppress(FileNotFoundError), _exclusive_lock(folder) as is_locked:
        is_removed = is_locked and not other_files(folder)
        if is_removed:
            remove_folder(folder, MANIFEST_NAME)
            cache.location_path(digest).unlink(missing_ok=True)
        return is_removed
    return False


def keep_newest_bundles(cache: Cache, count: int) -> None:
    """Remove all bundles but the ones used last, and the files and parts of files that no kept bundle has."""
    bundles = cached_bundles(cache)
    for bundle in bundles[count:]:
        remove_bundle(cache, bundle.digest)
    kept_digests = set()
    for bundle in bundles[:count]:
        with contextlib.suppress(StagepackError):
            kept_digests |= {entry.blake3 for entry in read_file_list(cache.bundle_folder(bundle.digest))}
    for path in _own_entries(cache, "files"):
        if path.stem not in kept_digests:
            with contextlib.suppress(FileNotFoundError), _exclusive_lock(path) as is_locked:
                if is_locked:
                    path.unlink()


def other_entries(cache_folder: Path) -> list[str]:
    """Return what is in the folder of a cache and is not of the cache, by paths below it."""
    others = []
    for folder in _entries(cache_folder):
        pattern = _OWN_NAMES.get(folder.name)
        if pattern is None or folder.is_symlink() or not folder.is_dir():
            others.append(folder.name)
            continue
        others += [
            f"{folder.name}/{path.name}"
            for path in _entries(folder)
            if path.is_symlink() or not pattern.fullmatch(path.name)
        ]
    for bundle_folder in _entries(cache_folder / "bundles"):
        if bundle_folder.is_dir():
            others += [f"bundles/{bundle_folder.name}/{file_name}" for file_name in other_files(bundle_folder)]
    return sorted(set(others))


def _remove_unused_files(cache: Cache, unused_seconds: float | None, most_bytes: int | None) -> None:
    """Remove files that are in no bundle any more, and parts of files that nobody downloads."""
    for path in _own_entries(cache, "files"):
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
    """Lock a file or a folder. Yields False, at once, if another process has a lock on it, or has put another one in its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield os.path.samestat(os.fstat(descriptor), os.lstat(path))
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> Sequence[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _own_entries(cache: Cache, folder_name: str) -> list[Path]:
    """The paths in a folder of the cache that are of the cache."""
    return [path for path in _entries(cache.folder / folder_name) if _OWN_NAMES[folder_name].fullmatch(path.name)]


def _statuses(paths: Sequence[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path.stat()
