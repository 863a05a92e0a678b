"""Files that users name: one that exists is replaced only if they say so, and in one step, so that an error leaves it as it was."""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.file_writing import synchronize
from stagepack.format.temporary_folder import TemporaryFolder
from stagepack.format.validate import MANIFEST_NAME

# The first field of a manifest. A damaged manifest begins with it too.
_MANIFEST_START: Final = re.compile(rb'\s*\{\s*"format"\s*:\s*"stagepack"')


def check_output_file(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a path that no file may be written to, before any work is done.

    Pipes and terminals may be written always: they have no content.
    """
    if _is_stream(out):
        return
    if os.path.isdir(out):
        raise WriteError(f"{out}: expected a file, found a folder: choose another name")
    if os.path.exists(out) and not os.path.isfile(out):
        raise WriteError(f"{out}: expected a file, found another kind: choose another name")
    if os.path.lexists(out) and not overwrite:
        raise OutputExistsError(f"{out}: already exists: choose another name, or replace the file (--overwrite)")
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir():
        raise WriteError(f"{out}: cannot be written: {target.parent} is no folder")
    for folder in target.parents:
        if is_bundle_folder(folder):
            raise WriteError(
                f"{out}: expected a file outside of bundles, found one inside {folder}: choose another folder"
            )


@contextlib.contextmanager
def output_file(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file, in the place of the one of that name if there is one.

    The ``with`` statement is given the path to write to. The file is put in place at its end, on disk and as a whole; an error in it
    leaves everything as it was. A link is followed, and pipes and terminals are written as they are.
    """
    try:
        if _is_stream(out):
            yield Path(out)
            return
        target = Path(os.path.realpath(out))
        with TemporaryFolder(target) as temporary:
            new_file = temporary.path / target.name
            yield new_file
            if target.exists():
                shutil.copymode(target, new_file)
            synchronize(new_file)
            new_file.replace(target)
    except OSError as error:
        raise WriteError(f"{out}: cannot be written: {error.strerror}") from None


def is_bundle_folder(path: Path) -> bool:
    """Whether a folder is a bundle, possibly a damaged one. Other folders with a manifest.json must not be removed.

    A folder whose manifest cannot be read is none.
    """
    manifest_path = path / MANIFEST_NAME
    with contextlib.suppress(OSError):
        if manifest_path.is_file():
            with manifest_path.open("rb") as file:
                return _MANIFEST_START.match(file.read(4096)) is not None
    return False


def _is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a pipe, or a device without blocks such as a terminal or /dev/null."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
