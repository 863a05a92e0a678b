"""A record of weight files that this user has compared with their digests since the machine was started, and that are unchanged since.

A file that is mapped need not be hashed again at each load. The record says: the content of this inode had this digest, when the kernel
gave it this change time. Every write changes the change time (ctime), and nobody but root can set it back. The record holds only under
conditions that make this true, and is not used otherwise:

- The file belongs to this user or to root, and nobody else may write to it.
- The file system is one of the kernel's own that changes the ctime at writes through shared mappings too. (tmpfs does not.) The file was
  written back before it was hashed, so that such a write to any of its pages is seen.
- The ctime is seconds older than the comparison: two writes within a tick of the kernel's clock have the same one.
- The machine has not been restarted since: then every byte comes from the disk again.
- The folder of the record belongs to this user, and nobody else may write to it.

- Records of what this user has verified since the machine was started: empty files, whose names are hashes of all that they depend on.
- Which file system a file is on, as far as that says what changes of the file the kernel tells.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from blake3 import blake3

from stagepack.format.chunks import File

# How long the record of another start is kept after its last entry: machines may share a home folder.
_KEPT_SECONDS: Final = 30 * 86_400
_BOOT_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS_PATH: Final = Path("/proc/self/mountinfo")
# The folder of the record; empty to keep none.
FOLDER_VARIABLE: Final = "STAGEPACK_VERIFIED_FILES"
_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs"})
_SETTLED_SECONDS = 2.0


class VerificationRecord:
    """A folder of entries. It belongs to this user, and nobody else may write to it; otherwise it has no entries, and takes none."""

    def __init__(self, variable: str, folder_name: str) -> None:
        self._folder = _record_folder(variable, folder_name)

    def has(self, identity: str | None) -> bool:
        """Whether something of this identity was verified."""
        return self._folder is not None and identity is not None and (self._folder / identity).is_file()

    def add(self, identity: str | None) -> None:
        """Record that something was verified. Its identity must have been the same before and after that."""
        if self._folder is not None and identity is not None:
            # Without space or the right to write, it is verified again.
            with contextlib.suppress(OSError):
                os.close(os.open(self._folder / identity, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def _record_folder(variable: str, folder_name: str) -> Path | None:
    """The folder of the record of this start of the machine; None if there can be none."""
    try:
        boot_id = _BOOT_ID_PATH.read_text().strip()
        chosen_folder = os.environ.get(variable)
        if chosen_folder == "":
            return None
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(chosen_folder).expanduser() if chosen_folder else cache_folder / "stagepack"
        records = root / folder_name
        for folder in (root, records, records / boot_id):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or writable:
                return None
        for old_record in records.iterdir():
            is_old = time.time() - old_record.lstat().st_mtime > _KEPT_SECONDS
            if old_record.name != boot_id and is_old and _BOOT_ID.fullmatch(old_record.name):
                shutil.rmtree(old_record, ignore_errors=True)
    # No home folder, no /proc, no right to write.
    except (OSError, RuntimeError):
        return None
    return records / boot_id


def is_of_kind(device: int, kinds: AbstractSet[str]) -> bool:
    """Whether a device has a file system of some kinds, and is not an image that a file holds. False where the kernel does not tell."""
    device_name = f"{os.major(device)}:{os.minor(device)}"
    try:
        if Path(f"/sys/dev/block/{device_name}/loop").exists():
            return False
        mounts = [line.split() for line in _MOUNTS_PATH.read_text().splitlines()]
    except OSError:
        return False
    mounted_kinds = {fields[fields.index("-") + 1] for fields in mounts if fields[2] == device_name and "-" in fields}
    return bool(mounted_kinds) and mounted_kinds <= kinds


class VerifiedFiles(VerificationRecord):
    """The record of this user."""

    def __init__(self) -> None:
        super().__init__(FOLDER_VARIABLE, "verified")

    def identity(self, descriptor: int, entry: File) -> str | None:
        """Return the name of the entry of a file, or None if the file cannot have one."""
        status = os.fstat(descriptor)
        owned = status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        settled = status.st_ctime + _SETTLED_SECONDS < time.time()
        if self._folder is None or not owned or not settled or not is_of_kind(status.st_dev, _FILE_SYSTEMS):
            return None
        facts = (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            entry.size,
            entry.blake3,
        )
        return blake3(repr(facts).encode()).hexdigest()


def write_back(descriptor: int) -> None:
    """Write a file back to the disk, so that later writes through mappings change its ctime."""
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
