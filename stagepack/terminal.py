"""Texts of others on a terminal, and progress by bytes, of which nothing is shown in a pipe, nor in the first second."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

_FIRST_SECOND: Final = 1.0
_SECONDS_BETWEEN_UPDATES: Final = 0.2

# What shows a line on the terminal at present, the innermost last: one place shows at a time.
_active_lines: list[Callable[[str | None], object]] = []


def printable(untrusted: str) -> str:
    """Escape the control characters of a text, since names in a bundle may contain any character."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in untrusted)


@contextlib.contextmanager
def active_line(show: Callable[[str | None], object]) -> Iterator[None]:
    """Let `byte_progress` within the ``with`` block show its text by `show`, and not in a line of its own.

    show: takes the text; None when the step has ended.
    """
    _active_lines.append(show)
    try:
        yield
    finally:
        _active_lines.pop()


@contextlib.contextmanager
def byte_progress(step: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many bytes of a step are done.

    total_bytes: how many bytes it is in all; None if it is not known.
    It yields a function that takes the number of further bytes that are done. Several threads may call it at a time.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    with contextlib.ExitStack() as display:
        if _active_lines:
            display.callback(_active_lines[-1], None)
        yield _ByteCounter(step, total_bytes, display).add


class _ByteCounter:
    """Counts bytes, and shows them a few times a second."""

    def __init__(self, step: str, total_bytes: int | None, display: contextlib.ExitStack) -> None:
        self._step = step
        self._total_bytes = total_bytes
        self._display = display
        self._show = _active_lines[-1] if _active_lines else None
        self._done_bytes = 0
        self._start_time = time.monotonic()
        self._next_time = self._start_time + _FIRST_SECOND
        self._lock = threading.Lock()

    def add(self, byte_count: int) -> None:
        """Count further bytes."""
        with self._lock:
            self._done_bytes += byte_count
            if time.monotonic() >= self._next_time:
                self._next_time = time.monotonic() + _SECONDS_BETWEEN_UPDATES
                self._update()

    def _update(self) -> None:
        if self._show is None:
            self._show = self._open_line()
        rate = self._done_bytes / (time.monotonic() - self._start_time)
        of_total = "" if self._total_bytes is None else f" of {_in_gigabytes(self._total_bytes)}"
        self._show(f"{self._step}: {_in_gigabytes(self._done_bytes)}{of_total} GB, {rate / 1e6:.0f} MB/s")

    def _open_line(self) -> Callable[[str | None], object]:
        from rich.console import Console  # noqa: PLC0415 - 80 ms, which only a terminal needs
        from rich.text import Text  # noqa: PLC0415 - the same

        status = self._display.enter_context(Console(stderr=True).status(""))
        return lambda line: status.update(Text(line or ""))  # a plain string could contain markup


def _in_gigabytes(byte_count: int) -> str:
    return f"{byte_count / 1e9:.2f}"
