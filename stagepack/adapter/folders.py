"""Adapters as callers name them: ``NAME=FOLDER``, or ``FOLDER``."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stagepack.errors import OptionError
from stagepack.format.rules import FILE_NAME_PATTERN

_NAMED: Final = re.compile(r"(?P<name>[^=/\\]+)=(?P<path>.+)", re.DOTALL)


def check_adapter_name(name: object, where: str = "") -> None:
    """Refuse what is no name of an adapter.

    where: what it is in, for messages.
    """
    if not isinstance(name, str) or not FILE_NAME_PATTERN.fullmatch(name):
        raise OptionError(
            f"adapters: expected a name of letters, digits and '_.-' as in NAME=FOLDER, found {name!r:.80}{where}"
        )


def adapter_folders(given: Sequence[str]) -> dict[str, Path]:
    """Return the folders of adapters by name: ``NAME=FOLDER``, or ``FOLDER``, whose last part is the name."""
    folders: dict[str, Path] = {}
    for text in given:
        match = _NAMED.fullmatch(text)
        folder = Path(match["path"] if match else text)
        name = match["name"] if match else folder.name
        check_adapter_name(name, f" of {text[:200]!r}")
        if name in folders:
            raise OptionError(f"adapters: two have the name {name!r}: give them other names as NAME=FOLDER")
        folders[name] = folder
    return folders
