"""What the subcommands share: errors in one line, facts as tables or JSON, progress on a terminal."""

import contextlib
import functools
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import click

from stagepack.errors import StagepackError

# The extra of this package that brings another, where it is not `hf`.
_EXTRAS = {
    "ml_dtypes": "onnxruntime",
    "onnx": "onnx",
    "onnx_ir": "onnx",
    "onnxruntime": "onnxruntime",
    "onnxscript": "onnx",
}


class Failure(click.ClickException):
    """A check failed or the input is bad: one line on standard error, exit status 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(printable(f"stagepack: {' '.join(self.message.split())}"), file=file or sys.stderr)


def fail(message: str) -> NoReturn:
    """End the command with one line on standard error and exit status 1.

    Raises:
        Failure: always.
    """
    raise Failure(message)


def _drop_output() -> None:
    """What could not be printed must not be tried again when Python ends, which would change the exit status."""
    with contextlib.suppress(OSError, ValueError):  # where standard output is no file, nothing is tried again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def reports_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors into one line and exit status 1."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StagepackError as error:
            fail(str(error))
        except BrokenPipeError:
            raise  # click ends the command without a word when nobody reads on
        except OSError as error:
            if error.filename is None:
                _drop_output()
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(error.name or "", "hf")
            fail(f"the package {error.name!r} is not installed: pip install 'stagepack[{extra}]' brings it")
        except click.ClickException:
            raise
        except Exception as error:
            if "STAGEPACK_TRACEBACK" in os.environ:
                raise
            message = f"{type(error).__name__}: {error}"
            fail(f"a bug in stagepack: {message}: please report it, with what STAGEPACK_TRACEBACK=1 shows")

    return wrapped


def import_modules(names: Iterable[str]) -> None:
    """Import the modules that the caller names, which register custom operators."""
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for our facts alone
                importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise Failure(f"--import {name}: {type(error).__name__}: {error}") from error


def print_json(facts: Any) -> None:
    """Print facts as indented JSON, in ASCII: names of a bundle are of any characters, and a terminal obeys some."""
    click.echo(json.dumps(facts, indent=2))


def finite(difference: float) -> float | None:
    """A difference as JSON can write it: None when shapes, types or special values differ."""
    return difference if math.isfinite(difference) else None


def printable(text: str) -> str:
    """A text with what a terminal would obey written as escapes: a bundle names things as it likes."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def print_line(text: str) -> None:
    """Print one line for people."""
    click.echo(printable(text))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a title; numbers (columns that begin with '#') stand on the right."""
    lines = [[column.lstrip("#") for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    click.echo(click.style(title, bold=True))
    for number, line in enumerate(lines):
        cells = [
            cell.rjust(width) if column.startswith("#") else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        text = "  " + "  ".join(cells).rstrip()
        click.echo(click.style(text, dim=True) if number == 0 else text)


@contextlib.contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is going on; in a pipe nothing is printed. Gives a function that says what begins now."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - 80 ms that only a terminal needs

    with Console(stderr=True).status(first) as status:
        yield status.update
