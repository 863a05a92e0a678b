"""Which folders stagepack has made, so that it may replace, write into or remove them. All others are read only."""

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from stagepack.errors import OutputExistsError, StagepackError, WriteError
from stagepack.format import limits
from stagepack.format.bundle_files import read_file_list
from stagepack.format.file_checks import read_plain_file
from stagepack.format.manifest_codec import BUNDLE_FORMAT, kind_name
from stagepack.format.rules import DIGEST_PATTERN, MANIFEST_NAME, SIGNATURE_NAME, format_names

# The first field of a manifest. A damaged manifest begins with it too.
_MANIFEST_START: Final = re.compile(rb'\s*\{\s*"format"\s*:\s*"(stagepack(?: [a-z]+)?)"')
# The names that stagepack gives, with the names of entry points before them.
_WRITTEN_NAME: Final = re.compile(
    r"model\.safetensors\.index\.json|[\w.-]*(example|(stage|shared)-\d+[\w.-]*)\.(msgpack|onnx|safetensors)", re.ASCII
)


def folder_format(path: Path) -> str | None:
    """The format of what stagepack has written into a folder, as its document states it, possibly damaged; None for other folders.

    Other folders, or with a manifest that cannot be read, must not be removed.
    """
    manifest_path = path / MANIFEST_NAME
    with contextlib.suppress(OSError):
        if manifest_path.is_file():
            with manifest_path.open("rb") as file:
                return document_format(file.read(4096))
    return None


def document_format(content: bytes) -> str | None:
    """The format that a document states in its first field; None if it is none of stagepack."""
    found = _MANIFEST_START.match(content)
    return None if found is None else found[1].decode()


def check_replaceable(path: Path, document_format: str = BUNDLE_FORMAT) -> None:
    """Refuse to replace or remove a folder unless it is of a format as stagepack writes it."""
    check_no_link(path)
    if folder_format(path) != document_format:
        raise OutputExistsError(
            f"{path}: exists and is not {kind_name(document_format)}, so it is not overwritten: choose another name"
        )
    check_no_cache(path)
    if links := sorted(entry.name for entry in os.scandir(path) if entry.is_symlink()):
        raise OutputExistsError(
            f"{path}: has links that another tool made, so it is not overwritten: {format_names(links)}: choose another name"
        )


def check_no_link(path: Path) -> None:
    """Refuse to replace a symbolic link: what it leads to would stay as it is, for all others who use that."""
    if path.is_symlink():
        raise OutputExistsError(
            f"{path}: is a symbolic link to {os.readlink(path)[:200]!r}, which is not replaced: give the folder itself, "
            f"{os.path.realpath(path)}, or choose another name"
        )


def check_no_cache(path: Path) -> None:
    """Refuse to write into a cache of bundles: the cache of the Hugging Face Hub, or of stagepack, whose files are verified."""
    location = Path(os.path.realpath(path))
    for folder in (location, *location.parents):
        cache = folder.parent.parent
        if folder.parent.name == "snapshots" and ((cache / "blobs").is_dir() or (cache / "refs").is_dir()):
            found = "the cache of the Hugging Face Hub"
        elif folder.parent.name == "bundles" and DIGEST_PATTERN.fullmatch(folder.name) and (cache / "files").is_dir():
            found = "a cache of stagepack"
        else:
            continue
        raise WriteError(
            f"{path}: is in {found}, which is not changed: copy the bundle (stagepack pull, or cp -rL), and use the copy"
        )


def check_outside_bundles(path: Path, kind: str = "a path") -> None:
    """Refuse to write a file or a folder into a bundle, or into a cache of bundles."""
    check_no_cache(path)
    for folder in Path(os.path.realpath(path)).parents:
        if folder_format(folder) is not None:
            raise WriteError(
                f"{path}: expected {kind} outside of bundles, found one inside {folder}: choose another folder"
            )


def other_files(path: Path) -> list[str]:
    """Return the names in a folder that are not of its bundle, delta or adapter.

    If its manifest is damaged, they are the names that stagepack gives to no file, and that the manifest does not mention.
    """
    try:
        own_names = {MANIFEST_NAME, SIGNATURE_NAME, *(entry.name for entry in read_file_list(path))}
        return sorted(set(os.listdir(path)) - own_names)
    except StagepackError:
        pass
    content = b""
    with contextlib.suppress(StagepackError):
        content = read_plain_file(path, MANIFEST_NAME, limits.MANIFEST_BYTES) or b""

    def is_own(file_name: str) -> bool:
        is_named = file_name in (MANIFEST_NAME, SIGNATURE_NAME) or _WRITTEN_NAME.fullmatch(file_name) is not None
        return is_named or os.fsencode(f'"{file_name}"') in content

    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() or not is_own(entry.name))
