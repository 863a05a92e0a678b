"""Messages of torch: its errors on one line with the line of a user's code that they came from, and its output only when it succeeds.

What has worked for models that ``torch.export`` refuses is found by what its error says. The guide "Recipes" of the docs has the code.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from stagepack.errors import STARTING_FILE_MARK, CaptureError, StagepackError

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
# The innermost frame that is not torch's, which may be ours; `error_location` finds the frame of the model.
_CAUSED_BY = re.compile(r" *Caused by: \([^()]*\)")
_INSTALLED_FOLDERS = frozenset({"site-packages", "dist-packages"})
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
STAGEPACK_FOLDER = str(Path(__file__).parents[1])
_DRAFT: Final = ", or pass the program of torch.export.draft_export, which asserts the example's answer"
_ADVICE: Final = (
    (
        ("Could not guard on data-dependent", "Data-dependent branching"),
        (
            "the line asks a tensor for an answer that only data has: use torch.cond or torch.where, replace the function in the factory "
            f"of the model{_DRAFT}"
        ),
    ),
    (
        ("Could not extract specialized integer", "aten._local_scalar_dense"),
        (
            "the line makes a number of a tensor's data: take the number from a size or the configuration, or export the modules before "
            "the line as entry points"
        ),
    ),
    (
        (".numpy() is not supported",),
        (
            "the line computes with a tensor's data in NumPy: replace the function by operators of torch in the factory of the model; a "
            "mixture of experts may compute all experts, with weights of zero for those that were not chosen"
        ),
    ),
    (
        ("specialized it to be a constant (1)", "specialized it to be a constant (0)", "0/1 specialized due to hint"),
        "the example has a size of 0 or 1 where dynamic_shapes lets it change, which torch fixes: take an example of size 2 or more",
    ),
    (
        ("Specializations unexpectedly required", "your code specialized it to be a constant"),
        "the model fixes a size that dynamic_shapes lets change: leave it out, or replace int(...) and numbers of Python in the line",
    ),
    (("must be bool, not SymBool",), "a size decides an argument that must be a bool: pass bool(...) of it"),
    (
        ("in output, which is not a known type", "is not supported or pytree-flattenable"),
        (
            "the model returns an object that is no container of tensors: return its tensors from a module around the model, or turn it "
            "off by an argument such as use_cache=False"
        ),
    ),
    (
        ("Unsupported input type",),
        "an input is no tensor, number or container of them: make it in a module around the model",
    ),
    (
        ("which neither torch.export nor a bundle can hold",),
        (
            "quantize the model with torchao: quantize_(model, Int8WeightOnlyConfig()), or prepare_pt2e and convert_pt2e for activations "
            "too; the guide Quantize shows both"
        ),
    ),
    (
        ("There was no fake impl registered", "no fake impl", "with arguments from the 'Meta' backend"),
        (
            "an operator does not tell the shapes of its results: torch.library.register_fake does; eager-mode quantized modules have "
            "none, torchao's have"
        ),
    ),
    (
        ("aten.equal.default", "aten.allclose.default"),
        "the line compares the data of tensors: leave the comparison out, in the factory of the model",
    ),
    (
        ("fake tensor in the exported program constant",),
        (
            "the model keeps a tensor outside of its parameters and buffers, and writes it: register it as a buffer; or its forward "
            "differentiates (torch.autograd.grad), which torch.export does not trace: write the derivative as code"
        ),
    ),
    (
        ("to have one of the following scalar types",),
        "an input has another dtype than the model takes: state it, such as --input 'x=int64[batch,length]'",
    ),
    (
        ("functorch tensor",),
        (
            "the forward of the model differentiates (torch.func.grad, jacrev), which torch.export does not trace with its weights: write "
            "the derivative as code, or export the modules that are differentiated"
        ),
    ),
)


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
def only_errors_logged(*logger_names: str) -> Iterator[None]:
    """Drop warnings that loggers of libraries report."""
    loggers = [logging.getLogger(logger_name) for logger_name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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


def describe_error(error: BaseException) -> str:
    """Return class and message of an error, and the line of a user's code that it came from, if there is one."""
    message = str(error)
    return with_location(f"{type(error).__name__}: {message}" if message else type(error).__name__, error)


def with_location(message: str, error: BaseException) -> str:
    """Append the line of a user's code that an error came from to a message about it, if there is one."""
    location = error_location(error)
    return f"{message} ({location})" if location else message


def error_location(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of an error, or of its causes, that is not of Python, torch or stagepack.

    Such as ``"net.py, line 7, in forward"``; of a library ``"timm 1.0.31, timm/layers/mlp.py, line 45, in forward: x = self.fc1(x)"``.
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


def capture_advice(errors: Iterable[str], *, draft_fails: bool = False) -> list[str]:
    """Return what has worked for models with such errors."""
    texts = list(errors)
    return [
        sentence.removesuffix(_DRAFT) if draft_fails else sentence
        for patterns, sentence in _ADVICE
        if any(pattern in text for pattern in patterns for text in texts)
    ]


@contextlib.contextmanager
def advised_capture() -> Iterator[None]:
    """Append to an error of a capture in the ``with`` block what has worked for such errors, or which command looks for it."""
    try:
        yield
    except CaptureError as error:
        cause = error.__cause__
        while isinstance(cause, StagepackError):
            cause = cause.__cause__
        if cause is None or STARTING_FILE_MARK in str(error):
            raise
        recipes = capture_advice([str(error)])
        advice = f"advice: {recipes[0]}" if recipes else "run 'stagepack doctor SOURCE', which tries other ways"
        raise CaptureError(f"{error}: {advice}") from error
