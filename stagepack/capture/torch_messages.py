"""Messages of torch: its errors on one line, and its output only when it succeeds."""

import contextlib
import io
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

# A line of an error that begins so, and all that follows, is about logging and debugging.
_ADVICE_PREFIXES = (
    "For more information",
    "For extended logs",
    "from user code",
    "Set TORCH",
    "The error above",
    "User Stack",
)
_STDERR = 2  # its file descriptor
_LONGEST_REASON = 600  # characters
# The innermost frame that is not torch's, which may be ours; `error_location` finds that of the model.
_CAUSED_BY = re.compile(r" *Caused by: \([^()]*\)")


def format_torch_error(error: BaseException) -> str:
    """Return the reason of an error of torch on one line, without its advice on logging and debugging."""
    lines = map(str.strip, str(error).splitlines())
    reason_lines = itertools.takewhile(lambda line: not line.startswith(_ADVICE_PREFIXES), lines)
    reason = " ".join(filter(None, reason_lines))
    return _CAUSED_BY.sub("", reason)[:_LONGEST_REASON] or type(error).__name__


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
    """Delay what is written to standard error, and drop it on failure: torch then prints graphs beside its message."""
    with contextlib.redirect_stderr(io.StringIO()) as buffer:
        yield
    sys.stderr.write(buffer.getvalue())


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Drop warnings, those too that code of torch in C++ writes to standard error: of calls that the user has not made."""
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with contextlib.suppress(OSError):  # a process without standard error
            saved = os.dup(_STDERR)
            stack.callback(os.close, saved)
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), _STDERR)
            stack.callback(os.dup2, saved, _STDERR)
        yield


@contextlib.contextmanager
def hold_log_records(logger_name: str) -> Iterator[list[logging.LogRecord]]:
    """Delay what a logger reports, and drop it on failure; the records are in the list that the ``with`` statement binds."""
    logger = logging.getLogger(logger_name)
    records: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield records
    finally:
        logger.removeFilter(hold)
    for record in records:
        logger.handle(record)
