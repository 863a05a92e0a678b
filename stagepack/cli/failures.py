"""Errors of the subcommands: one line on standard error, and the exit status."""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import click

from stagepack.cli.output import OutputError, printable
from stagepack.errors import StagepackError
from stagepack.extras import missing_package_message


class Failure(click.ClickException):
    """A failed check or bad input: one line on standard error, exit status 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(printable(f"stagepack: {' '.join(self.message.split())}"), file=file or sys.stderr)


def fail(message: str) -> NoReturn:
    """End the subcommand with one line on standard error and exit status 1.

    Raises:
        Failure: always.
    """
    raise Failure(message)


def reports_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that each of its errors becomes a `Failure`.

    With STAGEPACK_TRACEBACK in the environment the traceback is printed first.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click prints these, or ends silently when the reader of the output has gone
        except Exception as error:  # noqa: BLE001 - the message says that it is unexpected
            if os.environ.get("STAGEPACK_TRACEBACK"):
                traceback.print_exception(error)
            fail(_message(error))

    return wrapped


def _message(error: Exception) -> str:
    """Return the line for an error."""
    match error:
        case StagepackError():
            return str(error)
        case OutputError():
            _discard_output()
            return f"standard output: {error}"
        case OSError():
            return f"{error.filename}: {error.strerror}" if error.filename else str(error)
        case ModuleNotFoundError():
            return missing_package_message(error) or f"the package {error.name!r} is not installed"
        case _:
            return (
                f"internal error: {type(error).__name__}: {error}. Please report it with the traceback that "
                "STAGEPACK_TRACEBACK=1 prints"
            )


def _discard_output() -> None:
    """Drop the buffered output, which Python would write again at exit, changing the exit status."""
    with contextlib.suppress(OSError, ValueError):  # standard output may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
