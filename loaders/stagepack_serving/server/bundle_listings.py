"""Which bundles are there for a server: those of a command line, or the versions in a model repository."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stagepack.errors import InputError
from stagepack.opening import current_digest
from stagepack.remote.url import is_url

# Returns the paths or URLs of the bundles that are there now, by the names and versions of models. Clients choose among the names, and
# never a path. It raises InputError if they cannot be read.
BundleListing = Callable[[], Mapping[str, Mapping[int, str]]]
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_VERSION: Final = re.compile("[1-9][0-9]{0,17}", re.ASCII)


def fixed_bundles(paths: Mapping[str, str]) -> BundleListing:
    """The bundles of a command line: each is version 1 of its model."""
    return lambda: {model_name: {1: path} for model_name, path in paths.items()}


def repository_bundles(folder: Path) -> Mapping[str, Mapping[int, str]]:
    """The bundles in a folder with a folder for each model, which has a bundle for each version: ``tower/1/manifest.json``.

    Entries whose names are no names of models or numbers of versions are left out.
    """
    try:
        return {
            model.name: {
                int(version.name): version.path
                for version in os.scandir(model.path)
                if _VERSION.fullmatch(version.name) and version.is_dir()
            }
            for model in sorted(os.scandir(folder), key=lambda entry: entry.name)
            if _MODEL_NAME.fullmatch(model.name) and model.is_dir()
        }
    except OSError as error:
        raise InputError(f"{error.filename}: the model repository cannot be read: {error.strerror}") from None


def misnamed_folders(folder: Path) -> list[str]:
    """The paths of folders of a repository that are left out for their names; hidden ones are meant to be."""
    return sorted(str(path) for path in folder.glob("[!.]*/") if not _MODEL_NAME.fullmatch(path.name))


def bundle_state(path: str) -> object:
    """A value that changes when the bundle at a path or URL changes. An error of the server of a URL is a `StagepackError`."""
    return current_digest(path) if is_url(path) else folder_state(path)


def folder_state(path: str) -> object:
    """A value that changes when a file in a folder changes."""
    folder = path if os.path.isdir(path) else path.partition("#")[0]
    try:
        return sorted(
            (os.path.join(parent, file_name), status.st_ino, status.st_size, status.st_mtime_ns)
            for parent, _, file_names in os.walk(folder)
            for file_name in file_names
            for status in [os.stat(os.path.join(parent, file_name))]
        )
    except OSError:
        return None
