"""Paths on the command line."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from stagepack.cli.failures import fail
from stagepack.extras import require_extras
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME
from stagepack.opening import open_bundle, split_entry_point
from stagepack.remote.url import BundleUrl, is_url

_DIGEST_KEY = "stagepack.digest"
_TRUSTED_FILES_KEY = "stagepack.trusted_files"


class PathType(click.Path):
    """A path of which only the syntax is checked; the code that opens the file reports all else."""

    takes_urls = False

    def __init__(self, path_type: type | None = None) -> None:
        super().__init__(readable=False, path_type=path_type)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse an empty path, which would be the current folder, and a URL, which would be a folder of that name."""
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        if not self.takes_urls and is_url(value):
            self.fail(f"expected a path on this machine, found the URL {value!r}.", param, ctx)
        return super().convert(value, param, ctx)


class BundleType(PathType):
    """The path or the URL of a bundle."""

    takes_urls = True


def check_output_folder(out: str | os.PathLike[str]) -> None:
    """Fail if a folder cannot be created because a file is in its place, or in the place of one of its parents."""
    for path in (Path(out), *Path(out).parents):
        if path.is_dir():
            return
        if os.path.lexists(path):
            fail(f"{out}: expected a folder at {path}, found a file: choose another folder")


def bundle_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument BUNDLE, passed as `bundle_path`, and the option `--digest`, which `open_argument` reads."""
    return click.argument("bundle_path", metavar="BUNDLE", type=BundleType())(digest_option(function))


def digest_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--digest`, which `open_argument` reads."""

    def remember(context: click.Context, _option: click.Parameter, digest: str | None) -> None:
        context.meta[_DIGEST_KEY] = digest

    return click.option(
        "--digest",
        metavar="HEX",
        show_default="any",
        expose_value=False,
        callback=remember,
        help="Refuse a bundle of another digest, which 'stagepack inspect' prints. Without it, the manifest that a URL has is trusted.",
    )(function)


def open_argument(bundle_path: str, *extras: str) -> Bundle:
    """Open the bundle at a path or URL of the command line."""
    require_packages([bundle_path], *extras)
    return open_bundle(bundle_path, digest=given_digest(), require_signature=given_trusted_files())


def require_packages(bundle_paths: Iterable[str], *extras: str) -> None:
    """Refuse a command if packages of several of its extras are missing, among them those that open its bundles."""
    remote = ["remote"] if any(map(is_url, bundle_paths)) else []
    require_extras(*extras, *remote, *(["sign"] if given_trusted_files() else []))


def given_digest() -> str | None:
    """Return the value of `--digest`, if it is on the command line."""
    digest: str | None = click.get_current_context().meta.get(_DIGEST_KEY)
    return digest


def remember_trusted_files(
    context: click.Context, _option: click.Parameter, trusted_files: tuple[str, ...]
) -> tuple[str, ...]:
    """Keep the values of `--require-signature` for `given_trusted_files`."""
    context.meta[_TRUSTED_FILES_KEY] = trusted_files
    return trusted_files


def given_trusted_files() -> tuple[str, ...] | None:
    """Return the values of `--require-signature`, if it is on the command line."""
    context = click.get_current_context()
    trusted_files: tuple[str, ...] | None = context.meta.get(_TRUSTED_FILES_KEY) or None
    if trusted_files is not None and context.params.get("verify", "full") != "full":
        raise click.UsageError(
            "--require-signature requires --verify full: the signature is over the digests of all files"
        )
    return trusted_files


def is_bundle(source: str) -> bool:
    """Whether an argument is a URL, or the path of a bundle."""
    return is_url(source) or os.path.isfile(os.path.join(split_entry_point(source)[0], MANIFEST_NAME))


def folder_name(location: str) -> str:
    """Return the name of the folder of a bundle at a path or URL, without the name of an entry point."""
    location = os.fspath(split_entry_point(location)[0])
    return BundleUrl.parse(location).name if is_url(location) else Path(location).resolve().name
