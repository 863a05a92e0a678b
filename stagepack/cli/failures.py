"""Errors of the subcommands: one line on standard error, and the exit status."""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

import click

from stagepack.cli.output import OutputError, printable
from stagepack.errors import STARTING_FILE_MARK, ExportWarning, GroupError, StagepackError
from stagepack.extras import missing_package_message
from stagepack_loaders.distributed.launch_environment import is_launched_group, write_error_file


class Failure(click.ClickException):
    """A failed check or bad input: one line on standard error, exit status 1, and below it a file to start from if there is one."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the line, and the file to start from if there is one, if standard error can be written."""
        reason, mark, text = self.message.partition(STARTING_FILE_MARK)
        lines = [f"stagepack: {' '.join((reason + mark).split())}", *(["", *text.splitlines()] if text else [])]
        try:
            click.echo("\n".join(map(printable, lines)), file=file, err=True)
        except OSError:
            _discard(sys.stderr)


@contextlib.contextmanager
def shown_warnings() -> Iterator[None]:
    """Print each warning of stagepack as one line on standard error, in the block of the context. Other warnings are shown as always."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *further: Any, **named: Any) -> None:
        if issubclass(category, ExportWarning):
            click.echo(printable(f"stagepack: warning: {' '.join(str(message).split())}"), err=True)
        else:
            show_others(message, category, *further, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("always", ExportWarning)
        warnings.showwarning = show
        yield


def fail(message: str) -> NoReturn:
    """End the subcommand with one line on standard error and exit status 1."""
    raise Failure(message)


def failure_of(error: Exception) -> Failure:
    """Return the failure for an error, and print the traceback first if STAGEPACK_TRACEBACK is in the environment."""
    if os.environ.get("STAGEPACK_TRACEBACK"):
        traceback.print_exception(error)
    return Failure(_message(error))


@contextlib.contextmanager
def told_failures() -> Iterator[None]:
    """Show why the first of the processes failed that a launcher such as torchrun has started, in each of them.

    torchrun shows the line again at the end of its own report.
    """
    if is_launched_group():
        # A store that has gone is a warning of 20 lines, each time.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    except Exception as error:
        if not is_launched_group() or isinstance(error, click.UsageError):  # which all of them show
            raise
        if isinstance(error, StagepackError) and error.origin:
            message = str(error)
        else:
            failure = error if isinstance(error, click.ClickException) else failure_of(error)
            message = _tell_others(failure.message)
        write_error_file(message)
        raise Failure(message) from error


def _tell_others(message: str) -> str:
    """Tell the other processes why this one fails; return the line to show."""
    try:
        from stagepack_loaders.distributed.launch_failures import tell_launched_failure  # noqa: PLC0415 - imports torch
    except ImportError:
        return message
    return tell_launched_failure(GroupError(message))


def _message(error: Exception) -> str:
    """Return the line for an error."""
    match error:
        case StagepackError():
            return str(error)
        case OutputError():
            _discard(sys.stdout)
            return f"standard output: {error}"
        case OSError():
            if error.filename is None:
                _discard(sys.stdout)  # click could not print a help text
                return error.strerror or str(error)
            return f"{error.filename}: {error.strerror}"
        case ModuleNotFoundError():
            return missing_package_message(error) or f"the package {error.name!r} is not installed"
        case MemoryError():
            return f"out of memory: {error}" if str(error) else "out of memory"
        case _:
            return (
                f"internal error: {type(error).__name__}: {error}. Please report it with the traceback that "
                "STAGEPACK_TRACEBACK=1 prints"
            )


def _discard(stream: TextIO) -> None:
    """Drop the buffered content of a standard stream, which Python would write again at exit, changing the exit status."""
    with contextlib.suppress(OSError, ValueError):  # the stream may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
