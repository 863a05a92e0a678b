"""Where the bundles of a server are: a model repository as Triton has it, or the paths of the command line.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from stagepack.errors import InputError

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_VERSION: Final = re.compile("[1-9][0-9]{0,17}", re.ASCII)


class BundleSource(Protocol):
    """Bundles by the names and versions of models. Clients choose among the names, and never a path."""

    def bundle_paths(self) -> Mapping[str, Mapping[int, str]]:
        """Return the paths or URLs of the bundles that are there now.

        Returns:
            For each name of a model its bundles by version.

        Raises:
            InputError: the folder cannot be read.
        """


class FixedBundles:
    """The bundles of a command line: each is version 1 of its model."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths

    def bundle_paths(self) -> Mapping[str, Mapping[int, str]]:
        """See `BundleSource`."""
        return {model_name: {1: path} for model_name, path in self._paths.items()}


class RepositoryFolder:
    """A folder with a folder for each model, which has a bundle for each version: ``tower/1/manifest.json``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def bundle_paths(self) -> Mapping[str, Mapping[int, str]]:
        """See `BundleSource`. Entries whose names are no names of models or numbers of versions are left out."""
        try:
            return {
                model.name: {
                    int(version.name): version.path
                    for version in os.scandir(model.path)
                    if _VERSION.fullmatch(version.name) and version.is_dir()
                }
                for model in sorted(os.scandir(self._folder), key=lambda entry: entry.name)
                if _MODEL_NAME.fullmatch(model.name) and model.is_dir()
            }
        except OSError as error:
            raise InputError(f"{error.filename}: the model repository cannot be read: {error.strerror}") from None


def folder_state(path: str) -> object:
    """Return a value that changes when a file in a folder changes."""
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
