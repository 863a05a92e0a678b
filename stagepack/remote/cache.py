"""The cache of downloaded bundles, shared by all processes of a user.

    FOLDER/bundles/DIGEST/     a bundle by its digest: its manifest, and those of its files that were needed
    FOLDER/files/BLAKE3        a file by its digest; hard links of it are in all bundles that have it
    FOLDER/locations/DIGEST    the URL that a bundle was opened at last
    FOLDER/files/BLAKE3.part   a file that is not complete yet; the process that downloads it holds a lock on it

A file gets its name without ``.part`` when all its bytes are checked and on disk. So a process that dies at any moment leaves a file that
is complete, or a ``.part`` file whose chunks the next process checks.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stagepack.errors import WriteError
from stagepack.format.chunks import File
from stagepack.format.file_writing import write_at
from stagepack.format.quantities import format_bytes
from stagepack.format.rules import MANIFEST_NAME

CACHE_VARIABLE: Final = "STAGEPACK_CACHE"
# No space, no quota, and a limit of the size of files.
_FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFullError(WriteError):
    """The disk cannot hold what was being downloaded."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def default_cache_folder() -> Path:
    """Return the folder that ``STAGEPACK_CACHE`` names, otherwise ``stagepack`` in the user's folder for caches."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).absolute()
    user_caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_caches) if user_caches else Path.home() / ".cache") / "stagepack"


class PartFile:
    """A file ``.part`` that is being downloaded. One process at a time holds it; the others wait until it is complete or given up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if self._is_at_path():
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)  # the process that held it has renamed it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the lock back; what was written stays."""
        self.close()

    def close(self) -> None:
        """Give the lock back, unless this was done before; what was written stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` that were written, up to `end`; the end of a last block that was not filled is zeros.

        File systems without holes have zeros for all bytes that were never written.
        """
        try:
            if os.lseek(self._descriptor, start, os.SEEK_DATA) > start:
                return b""
            written_end = min(end, os.lseek(self._descriptor, start, os.SEEK_HOLE))
        except OSError:  # there is nothing after `start`
            return b""
        return os.pread(self._descriptor, written_end - start, start)

    def write(self, content: bytes | bytearray | memoryview, start: int) -> None:
        """Write bytes at a position. Several threads may write at the same time."""
        write_at(self._descriptor, content, start)

    def complete(self, size: int, target: Path) -> None:
        """Give the file its final name, after its bytes are on disk."""
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        self.path.rename(target)

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink()


class Cache:
    """The cache in one folder."""

    def __init__(self, folder: Path, cure: str = f"choose another folder by {CACHE_VARIABLE}") -> None:
        self.folder = folder
        self._cure = cure
        self._files = folder / "files"
        try:
            # Others must not write there: it holds records of what was verified, too.
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._files.mkdir(exist_ok=True)
        except OSError as error:
            raise WriteError(f"{folder}: the folder of downloads cannot be created: {error.strerror}: {cure}") from None

    def bundle_folder(self, digest: str) -> Path:
        """Return the folder of a bundle, which may not exist."""
        return self.folder / "bundles" / digest

    def add_manifest(self, digest: str, content: bytes) -> Path:
        """Store the manifest of a bundle, unless it is there."""
        folder = self.bundle_folder(digest)
        path = folder / MANIFEST_NAME
        with self.errors():
            folder.parent.mkdir(exist_ok=True)
            descriptor = None
            while descriptor is None:
                # Not `Path.mkdir(exist_ok=True)`, which raises if the folder that was there is removed before it looks again.
                try:
                    os.mkdir(folder)
                except FileExistsError:
                    if folder.is_symlink():
                        raise
                descriptor = _lock_folder(folder)
            try:
                if not path.is_file() or path.read_bytes() != content:
                    with PartFile(self._files / f"manifest-{digest}.part") as part:
                        part.write(content, 0)
                        part.complete(len(content), path)
            finally:
                os.close(descriptor)
        return folder

    def location_path(self, digest: str) -> Path:
        """Return the file with the URL that a bundle was opened at last. The time of its last change is the time of the last use."""
        return self.folder / "locations" / digest

    def use(self, digest: str, location: str) -> int | None:
        """Note that this process uses a bundle: it is not removed from the cache before the returned descriptor is closed.

        The result is None if the bundle is not in the cache, because another process has just removed it.
        """
        folder = self.bundle_folder(digest)
        with self.errors():
            descriptor = _lock_folder(folder)
            if descriptor is None:
                return None
            if not (folder / MANIFEST_NAME).is_file():
                os.close(descriptor)
                return None
        # For `stagepack cache` alone: a cache that is complete is used where it cannot be written, or the disk is full.
        with contextlib.suppress(OSError):
            path = self.location_path(digest)
            path.parent.mkdir(exist_ok=True)
            path.write_text(location)
        return descriptor

    def lock(self, entry: File) -> PartFile:
        """Wait until no other process downloads a file, and hold it."""
        with self.errors():
            return PartFile(self._files / f"{entry.blake3}.part")

    def add(self, entry: File, folder: Path, part: PartFile | None = None) -> bool:
        """Put a file of the cache into the folder of a bundle that has it."""
        file_path, target = self._files / entry.blake3, folder / entry.name
        with self.errors():
            if part is not None:
                part.complete(entry.size, file_path)
            elif is_complete(target, entry):
                return True
            elif not is_complete(file_path, entry):
                return False
            target.unlink(missing_ok=True)
            try:
                os.link(file_path, target)
            except FileNotFoundError:
                if not folder.is_dir():
                    raise WriteError(
                        f"{folder}: was removed from the cache while it was in use: open the bundle again"
                    ) from None
                return False  # another process has just removed the file
            except OSError:  # the file system has no hard links, or no more of this file
                file_path.rename(target)
        return True

    def discard(self, entry: File, folder: Path) -> None:
        """Remove a damaged file, so that it is downloaded again."""
        for path in (self._files / entry.blake3, folder / entry.name):
            path.unlink(missing_ok=True)

    def begun_bytes(self, entries: Iterable[File]) -> int:
        """Return the bytes of files that interrupted downloads have left."""
        return sum(map(self._part_bytes, entries))

    def check_free_bytes(self, entries: Sequence[File]) -> None:
        """Refuse to begin a download that the disk cannot hold."""
        with self.errors():
            needed_bytes = sum(
                entry.size - self._part_bytes(entry)
                for entry in entries
                if not is_complete(self._files / entry.blake3, entry)
            )
            free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes > free_bytes:
            raise WriteError(
                f"{self.folder}: the download needs {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are free: free more "
                f"('stagepack cache' can), or {self._cure}"
            )

    def _part_bytes(self, entry: File) -> int:
        """The bytes of the disk that the part of a file takes."""
        try:
            return min(entry.size, (self._files / f"{entry.blake3}.part").stat().st_blocks * 512)
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors of the file system."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            message = (
                f"{error.filename or self.folder}: the download cannot be written: {reason}. What was downloaded stays: solve this and "
                f"repeat the call, or {self._cure}"
            )
            raise (DiskFullError(message, reason) if error.errno in _FULL_ERRORS else WriteError(message)) from None


def _lock_folder(folder: Path) -> int | None:
    """Open the folder of a bundle and lock it, so that no other process removes it; None if there is none (any more)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    os.close(descriptor)
    return None


def is_complete(path: Path, entry: File) -> bool:
    """Whether a path is a file of the size that the manifest states. Its content was checked when it got its name."""
    try:
        return not path.is_symlink() and path.is_file() and path.stat().st_size == entry.size
    except FileNotFoundError:
        return False
