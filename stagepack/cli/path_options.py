"""Paths on the command line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stagepack.cli.failures import fail


class PathType(click.Path):
    """A path of which only the syntax is checked; the code that opens the file reports all else."""

    def __init__(self, path_type: type | None = None) -> None:
        """Pass ``pathlib.Path`` as `path_type` to convert the value."""
        super().__init__(readable=False, path_type=path_type)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse an empty path, which would be the current folder."""
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


def check_output_folder(out: str | os.PathLike[str]) -> None:
    """Fail if a folder cannot be created because a file is in its place, or in the place of one of its parents."""
    for path in (Path(out), *Path(out).parents):
        if path.is_dir():
            return
        if os.path.lexists(path):
            fail(f"{out}: expected a folder at {path}, found a file: choose another folder")


def bundle_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument BUNDLE, passed as `bundle_path`."""
    return click.argument("bundle_path", metavar="BUNDLE", type=PathType())(function)
