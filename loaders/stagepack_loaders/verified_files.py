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
"""

import contextlib
import os
import stat
import time
from typing import Final

from blake3 import blake3

from stagepack.format.manifest import File
from stagepack_loaders.file_systems import is_of_kind
from stagepack_loaders.verification_record import VerificationRecord

# The folder of the record; empty to keep none.
FOLDER_VARIABLE: Final = "STAGEPACK_VERIFIED_FILES"

_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs"})
_SETTLED_SECONDS = 2.0


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
