"""How subcommands are declared."""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import click

from stagepack.cli.failures import Failure
from stagepack.cli.path_options import is_bundle
from stagepack.errors import MissingPackageError, StagepackError
from stagepack.remote.url import without_secrets


def _named_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let errors of a subcommand of one bundle begin with the bundle, unless they begin with another path of the command line."""

    @functools.wraps(function)
    def named(*args: Any, **arguments: Any) -> Any:
        try:
            return function(*args, **arguments)
        except (StagepackError, Failure) as error:
            message = error.message if isinstance(error, Failure) else str(error)
            paths = [os.fspath(value) for value in arguments.values() if isinstance(value, str | os.PathLike) and value]
            bundle_path = arguments.get("bundle_path") or _bundle_source(arguments.get("source"))
            if (
                not bundle_path
                or isinstance(error, MissingPackageError)
                or message.startswith(tuple({*paths, *map(os.path.normpath, paths)}))
            ):
                raise
            raise Failure(f"{without_secrets(bundle_path)}: {message}") from error

    return named


def _bundle_source(source: Any) -> str | None:
    """The argument SOURCE, if it is a bundle and no model."""
    return source if isinstance(source, str) and is_bundle(source) else None


def subcommand(command_name: str, *, examples: Sequence[str]) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a function a subcommand."""

    def declare(function: Callable[..., Any]) -> click.Command:
        # click keeps the line breaks of a paragraph that starts with \b. Four spaces make it a code block in Markdown.
        lines = "\n".join(f"    {example}" for example in examples)
        description = f"{inspect.cleandoc(function.__doc__ or '')}\n\nExamples:\n\n\b\n{lines}"
        return click.command(command_name, help=description)(_named_errors(function))

    return declare
