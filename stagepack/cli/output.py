"""What subcommands print: tables and lines for people, JSON for programs, and progress on a terminal."""

import contextlib
import itertools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import click

from stagepack import terminal
from stagepack.terminal import active_line
from stagepack.terminal import printable as printable

_LEAST_WRAPPED_WIDTH = 16


class OutputError(Exception):
    """Standard output cannot be written: the disk is full or the like."""


_is_output_taken = False


@contextlib.contextmanager
def facts_on_standard_error(*, is_used: bool) -> Iterator[None]:
    """Print the facts of a command on standard error, if what it writes goes to standard output."""
    global _is_output_taken
    _is_output_taken = is_used
    try:
        yield
    finally:
        _is_output_taken = False


def print_text(text: str) -> None:
    """Print a text for a program, as it is."""
    try:
        click.echo(text, err=_is_output_taken)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


def print_json(facts: Any) -> None:
    """Print facts as indented JSON, in ASCII: names in a bundle may contain control characters, which a terminal obeys."""
    print_text(json.dumps(facts, indent=2))


def finite(difference: float) -> float | None:
    """Return a difference as JSON can express it: None where shapes, types or special values differ."""
    return difference if math.isfinite(difference) else None


def count_of(noun: str, count: int) -> str:
    """Return a count with its noun: ``1 stage``, ``2 stages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_line(line: str) -> None:
    """Print one line for people."""
    print_text(printable(line))


def print_table(title: str, column_names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a title.

    A column whose name starts with '#' is aligned to the right. On a terminal the last column is wrapped to fit.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max((len(row[index]) for row in cells), default=0) for index in range(len(column_names))]
    print_rows(title, column_names, cells, widths)


def print_rows(
    title: str, column_names: Sequence[str], rows: Iterable[Sequence[str]], least_widths: Sequence[int]
) -> None:
    """Print each row when it comes, as `print_table` does, in columns of at least these widths."""
    header = [column_name.lstrip("#") for column_name in column_names]
    widths = [max(sizes) for sizes in zip(map(len, header), least_widths, strict=True)]
    last_width = _last_column_width(widths)
    print_text(click.style(title, bold=True))
    for row_number, row in enumerate(itertools.chain([header], ([printable(cell) for cell in row] for row in rows))):
        aligned = [
            cell.rjust(width) if column_name.startswith("#") else cell.ljust(width)
            for cell, width, column_name in zip(row[:-1], widths, column_names, strict=False)
        ]
        last_lines = (
            [row[-1].rjust(widths[-1])]
            if column_names[-1].startswith("#")
            else textwrap.wrap(row[-1], last_width, break_on_hyphens=False)
        )
        prefix = "".join(f"  {cell}" for cell in aligned)
        for last_line in last_lines or [""]:
            line = f"{prefix}  {last_line}".rstrip()
            print_text(click.style(line, dim=True) if row_number == 0 else line)
            prefix = " " * len(prefix)


def _last_column_width(widths: Sequence[int]) -> int:
    """Return the width at which the last column fits beside the others on the terminal, or its full width."""
    full_width = max(1, widths[-1])
    if not _is_terminal(sys.stdout):
        return full_width
    free_width = shutil.get_terminal_size().columns - sum(width + 2 for width in widths[:-1]) - 2
    return min(full_width, free_width) if free_width >= _LEAST_WRAPPED_WIDTH else full_width


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; it is None if the caller closed it."""
    return stream is not None and stream.isatty()


@contextlib.contextmanager
def progress(first_step: str) -> Iterator[Callable[[str], None]]:
    """Show the current step on a terminal, and nothing in a pipe."""
    if not _is_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - 80 ms, which only a terminal needs
    from rich.text import Text  # noqa: PLC0415 - the same

    def as_text(step: str) -> Text:
        return Text(f"{printable(step)} ...")  # a plain string could contain markup

    current_step = first_step

    def show(step: str) -> None:
        nonlocal current_step
        current_step = step
        status.update(as_text(step))

    with (
        Console(stderr=True).status(as_text(first_step)) as status,
        active_line(lambda line: status.update(as_text(current_step if line is None else line))),
    ):
        yield show


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str | None], None]]:
    """Show a line on a terminal, or none while its text is None; nothing in a pipe. What is printed meanwhile stands above it."""
    if not _is_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - 80 ms, which only a terminal needs
    from rich.text import Text  # noqa: PLC0415 - the same

    status = Console(stderr=True).status("", refresh_per_second=2)

    def show(line: str | None) -> None:
        if line is None:
            status.stop()
        else:
            status.update(Text(printable(line)))
            status.start()

    try:
        yield show
    finally:
        status.stop()


@contextlib.contextmanager
def counted_progress(step: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a step and how many of its bytes are done on a terminal, after a second; nothing in a pipe.

    total_bytes: the number of bytes of the whole step; None if it is not known.
    It yields a function that takes the number of further bytes that are done. Several threads may call it.
    """
    with progress(step), terminal.byte_progress(printable(step), total_bytes) as count_bytes:
        yield count_bytes
