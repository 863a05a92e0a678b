"""Messages of torch: its errors on one line, and its output only when it succeeds.

- The line of a user's code that an error came from.
"""

import contextlib
import functools
import importlib.metadata
import io
import itertools
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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
_INSTALLED_FOLDERS = frozenset({"site-packages", "dist-packages"})
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


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


STAGEPACK_FOLDER = str(Path(__file__).parents[1])


def describe_error(error: BaseException) -> str:
    """Return class and message of an error, and the line of a user's code that it came from, if there is one."""
    message = str(error)
    return with_location(f"{type(error).__name__}: {message}" if message else type(error).__name__, error)


def with_location(message: str, error: BaseException) -> str:
    """Append the line of a user's code that an error came from to a message about it, if there is one."""
    location = error_location(error)
    return f"{message} ({location})" if location else message


def error_location(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of an error that is not of Python, torch or stagepack.

    If the error itself has no such frame, its causes are searched.

    The result is such as ``"net.py, line 7, in forward"``, with the file relative to the current folder. Of code of a library, its package
        and the line itself, too: ``"timm 1.0.31, timm/layers/mlp.py, line 45, in forward: x = self.fc1(x)"``. Empty if there is no such
        frame.
    """
    seen_ids: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen_ids:
        seen_ids.add(id(cause))
        for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
            if not _is_library(frame.f_code.co_filename):
                return _format(frame.f_code.co_filename, line, frame.f_code.co_name)
        cause = cause.__cause__ or cause.__context__
    return ""


def frame_location(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost of a frame and those around it that is not of Python, torch or stagepack."""
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            return _format(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def traced_location(stack_trace: str) -> str:
    """Return file, line and function of the innermost frame of a node's ``stack_trace`` that is not of Python, torch or stagepack."""
    for file_name, line, function in reversed(_FRAME.findall(stack_trace)):
        if not _is_library(file_name):
            return _format(file_name, int(line), function)
    return ""


def _is_library(file_name: str) -> bool:
    if file_name.startswith("<"):  # such as <frozen importlib._bootstrap>
        return True
    torch = sys.modules.get("torch")
    folders = [STAGEPACK_FOLDER, *(getattr(torch, "__path__", ()))]
    standard_library = sysconfig.get_path("stdlib")
    if not _INSTALLED_FOLDERS & set(Path(file_name).parts):
        folders.append(standard_library)
    return any(file_name.startswith(folder + os.path.sep) for folder in folders)


def _format(file_name: str, line: int, function: str) -> str:
    path = Path(file_name)
    in_function = "" if function == "<module>" else f", in {function}"
    if installed := _INSTALLED_FOLDERS & set(path.parts):
        # Code of a library, which the reader has not at hand.
        module_path = Path(*path.parts[path.parts.index(next(iter(installed))) + 1 :])
        source = linecache.getline(file_name, line).strip()
        return f"{_package(module_path.parts[0])}{module_path}, line {line}{in_function}" + (
            f": {source}" if source else ""
        )
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}, line {line}{in_function}"


@functools.cache  # takes half a second: it reads the metadata of all installed packages
def _package(module_name: str) -> str:
    """The package of a module with its version; empty if it has none."""
    packages = importlib.metadata.packages_distributions().get(module_name)
    return f"{packages[0]} {importlib.metadata.version(packages[0])}, " if packages else ""
