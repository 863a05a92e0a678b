"""Files that a bundle carries for others than stagepack, such as a tokenizer."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stagepack.errors import OptionError
from stagepack.format.validate import MANIFEST_NAME

# What the format's own files end with.
_RESERVED_SUFFIXES: Final = (".index.json", ".msgpack", ".onnx", ".safetensors", ".sig")


def read_assets(paths: Iterable[str | os.PathLike[str]]) -> dict[str, bytes]:
    """Read the assets of a bundle.

    Args:
        paths: the files. The bundle has them under the same names, in one folder.

    Returns:
        The content of each file by its name.

    Raises:
        OptionError: a file cannot be read, two have one name, or one is named like a file of the format.
    """
    contents: dict[str, bytes] = {}
    for path in map(Path, paths):
        if path.name in contents:
            raise OptionError(f"assets: expected distinct names of files, found {path.name} twice")
        if path.name.endswith(_RESERVED_SUFFIXES) or path.name == MANIFEST_NAME:
            raise OptionError(f"assets: {path.name}: the format has files of this name: rename it")
        try:
            contents[path.name] = path.read_bytes()
        except OSError as error:
            raise OptionError(f"assets: {path}: cannot be read: {error.strerror}") from None
    return contents
