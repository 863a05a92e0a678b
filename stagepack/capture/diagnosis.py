"""Why a model cannot be captured, and what would work: each way to capture it is tried, and each of its modules."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from stagepack.capture.entry_points import automatic_shapes, record_module_inputs
from stagepack.capture.inputs import Inputs, complete_dynamic_shapes, with_tensors
from stagepack.capture.model_runs import preserve_module, run_model
from stagepack.capture.programs import PATCHED_EXPORT, Capture, capture_module, capture_patched
from stagepack.capture.time_limit import TimeLimitReached, time_limit
from stagepack.capture.torch_messages import format_torch_error, suppress_stderr, with_location
from stagepack.capture.user_model import is_transformers_model
from stagepack.errors import CaptureError, StagepackError
from stagepack.torch_internals import draft_export_failures, suppress_log_records

_MOST_MODULES = 60
# Seconds for one way to capture a model.
TIME_LIMIT: Final = 120.0
# The last attempt for a model that can be captured as it is.
WRITE: Final = "stagepack export"
DRAFT: Final = "torch.export.draft_export"
_GOES_ON: Final = "it goes on after "
# Loggers that report what the errors say, too.
_LOGGERS = ("torch._guards", "torch.export._draft_export", "torch.export", "torch.fx.experimental.symbolic_shapes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureAttempt:
    """One way to capture a model."""

    way: str
    error: str | None
    seconds: float
    # What to do, if it did not fail.
    advice: str = ""

    @property
    def has_program(self) -> bool:
        """Whether there is a program, if only one that asserts what the capture could not know."""
        return self.error is None or self.error.startswith(_GOES_ON)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingModule:
    """A module that cannot be captured on its own, although all modules in it can."""

    # Its path in the model; empty for the model itself.
    path: str
    type: str
    error: str


def try_export(
    model: torch.nn.Module, inputs: Inputs, write: Callable[[Capture], object], seconds: float = TIME_LIMIT
) -> Iterator[CaptureAttempt]:
    """Capture a model in each way that may work, the simplest first. If that succeeds as it is, the last attempt writes it.

    seconds: how long each of them may take.
    """
    inputs, attempt = with_tensors(inputs), partial(_attempt, seconds)
    yield (run := attempt("the model runs", lambda: run_model(model, inputs)))
    if run.error is not None:
        return
    captures: list[Capture] = []
    yield (capture := attempt("torch.export.export", lambda: captures.append(capture_module(model, inputs))))
    if capture.error is None:
        yield attempt(WRITE, lambda: write(captures[0]), "it writes this model")
        return
    if inputs.dynamic_shapes is not None:
        fixed = replace(inputs, dynamic_shapes=None)
        advice = "leave out dynamic_shapes, or some of them: then all sizes are those of the example"
        yield attempt("without dynamic sizes", lambda: capture_module(model, fixed), advice)
        automatic = replace(inputs, dynamic_shapes=automatic_shapes(model.forward, inputs))
        advice = "give torch.export.Dim.AUTO for the sizes: torch finds those that may change"
        yield attempt("sizes that torch chooses (Dim.AUTO)", lambda: _export(model, automatic), advice)
    advice = (
        "pass --strict, or in Python the program: stagepack.export(torch.export.export(model, args, strict=True), ...)"
    )
    yield attempt("strict=True", lambda: _export(model, inputs, strict=True), advice)
    if is_transformers_model(model):
        advice = "stagepack export tries this by itself"
        yield attempt(PATCHED_EXPORT, lambda: capture_patched(model, inputs), advice)
    yield _draft_attempt(model, inputs, seconds)


def try_program(
    capture: Capture, write: Callable[[Capture], object], seconds: float = TIME_LIMIT
) -> Iterator[CaptureAttempt]:
    """Write a program that is captured already."""
    yield _attempt(seconds, WRITE, lambda: write(capture), "it writes this program")


def find_failing_modules(
    model: torch.nn.Module, inputs: Inputs, seconds: float = TIME_LIMIT
) -> Iterator[FailingModule]:
    """Yield the innermost modules, of 60 at most, that cannot be captured on their own, with the inputs that they get from the example.

    seconds: how long the search may take; the module at which it ends is the last one.
    """
    inputs = with_tensors(inputs)
    if not isinstance(model, torch.jit.ScriptModule):
        yield from _ModuleSearch(model, inputs, seconds).failing(model, "")


class _ModuleSearch:
    """A search for modules that cannot be captured."""

    def __init__(self, model: torch.nn.Module, inputs: Inputs, seconds: float) -> None:
        self._seconds = seconds
        self._end_time = time.monotonic() + seconds
        self._remaining = _MOST_MODULES
        self._calls = record_module_inputs(model, inputs)

    def failing(self, module: torch.nn.Module, path: str) -> Iterator[FailingModule]:
        """Yield the innermost failing modules of a module that fails, or nothing if it does not."""
        if self._remaining <= 0:
            return
        self._remaining -= 1
        try:
            with suppress_log_records(*_LOGGERS), time_limit(self._end_time - time.monotonic()):
                capture_module(module, self._calls[path])
        except TimeLimitReached:
            self._remaining = 0
            reason = (
                f"the search has no end after {self._seconds:g} s, and is stopped here: give it more by --time-limit"
            )
            yield FailingModule(path=path, type=type(module).__name__, error=reason)
        except CaptureError as error:
            is_innermost = True
            for name, child in module.named_children():
                child_path = f"{path}.{name}" if path else name
                if child_path in self._calls:
                    for inner in self.failing(child, child_path):
                        is_innermost = False
                        yield inner
            if is_innermost:
                yield FailingModule(path=path, type=type(module).__name__, error=str(error))


def _attempt(seconds: float, way: str, capture: Callable[[], object], advice: str = "") -> CaptureAttempt:
    start_time = time.perf_counter()
    error: str | None = None
    try:
        with suppress_log_records(*_LOGGERS), time_limit(seconds):
            capture()
    except TimeLimitReached:
        error = f"has no end after {seconds:g} s, and is stopped: give it more by --time-limit"
    except StagepackError as own_error:
        error = str(own_error)
    except Exception as torch_error:  # noqa: BLE001 - torch and the code of the model raise any class
        error = with_location(format_torch_error(torch_error), torch_error)
    elapsed = time.perf_counter() - start_time
    return CaptureAttempt(way=way, error=error, seconds=elapsed, advice="" if error else advice)


def _draft_attempt(model: torch.nn.Module, inputs: Inputs, seconds: float) -> CaptureAttempt:
    """What draft export, which goes on where export stops, found all in all."""
    failures: list[str] = []

    def export() -> None:
        with preserve_module(model), suppress_stderr():
            failures.extend(
                draft_export_failures(
                    model, tuple(inputs.args), dict(inputs.kwargs), complete_dynamic_shapes(model.forward, inputs)
                )
            )

    attempt = _attempt(seconds, DRAFT, export)
    if attempt.error is not None:
        return attempt
    return replace(attempt, error=f"{_GOES_ON}{'; '.join(failures)}" if failures else None)


def _export(model: torch.nn.Module, inputs: Inputs, *, strict: bool = False) -> None:
    dynamic_shapes = complete_dynamic_shapes(model.forward, inputs)
    with preserve_module(model), suppress_stderr():
        torch.export.export(
            model, tuple(inputs.args), dict(inputs.kwargs), dynamic_shapes=dynamic_shapes, strict=strict
        )
