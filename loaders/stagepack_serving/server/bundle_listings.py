"""Which bundles are there for a server: those of a command line, or the versions in a model repository."""

import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stagepack.errors import InputError, StagepackError
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


class UnreadableModel(dict[int, str]):
    """No versions of a model: its folder in a repository cannot be read now.

    reason: the folder, and why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class LoggedErrors:
    """Logs errors of what is looked at again and again: each when it differs from the one before of the same name."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: dict[str, str] = {}

    def add(self, name: str, error: object) -> None:
        """Log an error."""
        if self._last.get(name) != str(error):
            self._logger.error("%s", error)
        self._last[name] = str(error)

    def __contains__(self, name: str) -> bool:
        """Whether a name has an error."""
        return name in self._last

    def forget(self, name: str) -> None:
        """Log the next error of a name, whatever it is."""
        self._last.pop(name, None)


def repository_bundles(folder: Path) -> Mapping[str, Mapping[int, str]]:
    """The bundles in a folder with a folder for each model, which has a bundle for each version: ``tower/1/manifest.json``.

    Entries whose names are no names of models or numbers of versions are left out. A model whose folder cannot be read is an
    `UnreadableModel`.
    """
    try:
        model_names = sorted(filter(_MODEL_NAME.fullmatch, os.listdir(folder)))
    except OSError as error:
        raise InputError(f"{folder}: the model repository cannot be read: {error.strerror}") from None
    found = {name: _versions(folder / name) for name in model_names}
    return {name: paths for name, paths in found.items() if paths is not None}


def _versions(folder: Path) -> Mapping[int, str] | None:
    """The versions in the folder of a model; None if it is no folder."""
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            return None
        versions = [entry for entry in os.scandir(folder) if _VERSION.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return None
    except OSError as error:
        return UnreadableModel(f"{error.filename}: the folder of a model cannot be read: {error.strerror}")
    return {int(entry.name): entry.path for entry in versions}


def check_not_empty(paths_by_name: Mapping[str, Mapping[int, str]]) -> None:
    """Refuse a repository without a model that can be read."""
    reasons = [paths.reason for paths in paths_by_name.values() if isinstance(paths, UnreadableModel)]
    if len(reasons) == len(paths_by_name):
        found = f": {'; '.join(reasons)}" if reasons else ""
        raise InputError(
            f"the model repository is empty: expected bundles at NAME/VERSION, where VERSION is a number{found}"
        )


def misnamed_folders(folder: Path) -> list[str]:
    """The paths of folders of a repository that are left out for their names; hidden ones are meant to be."""
    names = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    paths = [str(folder / name) for name in sorted(names) if name[0] != "." and not _MODEL_NAME.fullmatch(name)]
    return list(filter(os.path.isdir, paths))


def bundle_state(path: str) -> object:
    """A value that changes when the bundle at a path or URL changes. An error of the server of a URL is a `StagepackError`."""
    return current_digest(path) if is_url(path) else folder_state(path)


def source_states(
    source: Mapping[str, Mapping[int, str]], keys: object, before: Mapping[str, object], errors: LoggedErrors
) -> Mapping[str, object]:
    """For each model a value that changes with its bundles; the one before for what cannot be looked at: the version that runs goes on.

    keys: a value that changes with the keys that must have signed the bundles.
    """
    states = dict[str, object]()
    for model_name, paths in source.items():
        if isinstance(paths, UnreadableModel):
            errors.add(model_name, f"{model_name}: {paths.reason}")
            states[model_name] = before.get(model_name)
            continue
        try:
            if paths:
                states[model_name] = {version: bundle_state(path) for version, path in paths.items()}, keys
            errors.forget(model_name)
        except StagepackError as error:
            errors.add(model_name, f"{model_name}: cannot be polled: {error}")
            states[model_name] = before.get(model_name)
    return states


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
