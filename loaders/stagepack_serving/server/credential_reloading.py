"""Files of certificates, keys and tokens that are replaced while a server runs."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stagepack_serving.server.errors import CredentialError

_LOG: Final = logging.getLogger("stagepack.serve")
# How often the files are looked at.
_WATCH_SECONDS: Final = 2


class WatchedFiles:
    """Files that are read again when one of them has changed. If they cannot be used then, what was read before is used on."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], reload: Callable[[], None]) -> None:
        self._paths = [Path(path) for path in paths]
        self._reload = reload
        self._state = self._current_state()

    def check(self) -> None:
        """Read the files again if one of them has changed."""
        state = self._current_state()
        if state == self._state:
            return
        self._state = state
        shown_paths = ", ".join(map(str, self._paths))
        try:
            self._reload()
        except CredentialError as error:
            _LOG.error("%s; the server goes on with what it read before", error)
        else:
            _LOG.info("%s: read again", shown_paths)

    def _current_state(self) -> list[tuple[int, int, int] | None]:
        return [_file_state(path) for path in self._paths]


async def watch_files(watched_files: Sequence[WatchedFiles]) -> None:
    """Read files again when they have changed, until cancelled."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        for files in watched_files:
            files.check()


def _file_state(path: Path) -> tuple[int, int, int] | None:
    """What differs after a file was changed or replaced; None for a pipe, which cannot be read again, and a file that is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None
