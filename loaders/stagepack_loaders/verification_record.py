"""Records of what this user has verified since the machine was started: empty files, whose names are hashes of all that they depend on."""

import contextlib
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Final

# How long the record of another start is kept after its last entry: machines may share a home folder.
_KEPT_SECONDS: Final = 30 * 86_400
_BOOT_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")


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
