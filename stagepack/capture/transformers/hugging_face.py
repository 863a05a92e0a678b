"""A Hugging Face folder or hub name, or a model of transformers -> a captured model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stagepack.capture.checkpoint import DataNeededError, DeferredTensors
from stagepack.capture.extensions import LibraryModel
from stagepack.capture.inputs import Inputs
from stagepack.capture.model_runs import are_identical, call_with_shapes, run_model
from stagepack.capture.programs import PATCHED_EXPORT, Capture, capture_module, capture_patched
from stagepack.capture.torch_messages import advised_capture
from stagepack.capture.transformers.example_inputs import (
    model_examples,
    smallest_inputs,
    starting_file,
    with_auto_dims,
    with_longer_sequences,
)
from stagepack.capture.transformers.pretrained_model import load_pretrained
from stagepack.capture.user_model import is_transformers_model
from stagepack.errors import CaptureError, ExportWarning, warn_caller
from stagepack.torch_internals import register_transformers_caches

_EXPORTERS: dict[str, Callable[[Any, Inputs], Capture]] = {
    "torch.export.export": capture_module,
    PATCHED_EXPORT: capture_patched,
}


class NotIdenticalError(Exception):
    """The captured program does not answer bit for bit as the model does."""


def capture_pretrained(
    source: str, inputs: Inputs, *, deferred: bool = True, dtype: str | torch.dtype | None = None
) -> Capture:
    """Capture a model by its folder or hub name. `Capture.method` says by which exporter.

    transformers' own exporter is tried if the program of ``torch.export.export`` does not answer bit for bit as the model does.

    inputs: without any, an example with dynamic batch and sequence is made; if neither exporter can keep both, torch decides.
    deferred: do not load the weights, where possible. The program is then compared with the model when the example is recorded.
    """
    deferred_tensors = DeferredTensors() if deferred else None
    try:
        model = load_pretrained(source, deferred_tensors, dtype=dtype)
        with advised_capture():
            candidates = _candidates(model, inputs, source)
    except DataNeededError:
        return capture_pretrained(source, inputs, deferred=False, dtype=dtype)
    of_modules = f" of {model.description}" if isinstance(model, LibraryModel) else ""

    def with_deferred(capture: Capture, candidate: _Candidate) -> Capture:
        return replace(
            capture,
            deferred=deferred_tensors,
            further_inputs=candidate.further_inputs,
            capture_loaded=partial(capture_pretrained, source, inputs, deferred=False, dtype=dtype),
        )

    with advised_capture():
        capture = _capture_first(model, source, candidates, None if deferred_tensors is None else with_deferred)
    return replace(capture, method=capture.method + of_modules)


def _capture_first(
    model: torch.nn.Module,
    source: str,
    candidates: "Sequence[_Candidate]",
    with_deferred: "Callable[[Capture, _Candidate], Capture] | None" = None,
) -> Capture:
    """The first capture that works, of those of each candidate by each exporter; compared with the model if no weights are deferred."""
    reasons, last_error = [], None
    for candidate, (method, exporter) in itertools.product(candidates, _EXPORTERS.items()):
        try:
            if with_deferred is None:
                capture = _capture_exactly(exporter, model, candidate.inputs, candidate.further_inputs)
            else:
                capture = with_deferred(exporter(model, candidate.inputs), candidate)
        except CaptureError as error:
            reasons.append(f"{method}: {error}")
            last_error = error
        else:
            candidate.warn(source, reasons)
            return capture
    made = candidates[0].inputs
    is_taken = not candidates[0].is_made or call_with_shapes(model, model, made.kwargs).error is None
    advice = "" if is_taken else starting_file(model, made)
    raise CaptureError(f"{source}: {'; '.join(dict.fromkeys(reasons))}{advice}") from last_error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Inputs to capture a model with."""

    inputs: Inputs
    # Inputs with the smallest sizes, if these are known.
    further_inputs: tuple[Inputs, ...] = ()
    # Kinds of inputs that the model has and these are without.
    left_out: tuple[str, ...] = ()
    # Whether the inputs were made for the model, and not given by the caller.
    is_made: bool = True

    def warn(self, source: str, reasons: Sequence[str]) -> None:
        """Warn of kinds of inputs that the captured program does not take."""
        if self.left_out:
            reason = f": {reasons[0]}" if reasons else ""
            message = (
                f"{source}: the bundle takes text alone, and no {' or '.join(self.left_out)}, with which the model cannot be captured"
                f"{reason}: export what reads them as a part (--part), or pass --inputs FILE.py:FUNCTION"
            )
            warn_caller(ExportWarning(message))


def _candidates(model: torch.nn.Module, inputs: Inputs, folder: str | None) -> list[_Candidate]:
    """The inputs of the caller, or those that are made for the model."""
    if inputs.args or inputs.kwargs:
        return [_Candidate(inputs=inputs, is_made=False)]
    candidates = []
    for example in model_examples(model, folder):
        made = example.inputs
        named = [made, *([longer] if (longer := with_longer_sequences(made)) != made else [])]
        candidates += [
            _Candidate(inputs=each, further_inputs=(smallest_inputs(each),), left_out=example.left_out)
            for each in named
        ]
        # Where torch decides which sizes are dynamic, the smallest ones are not known.
        candidates.append(_Candidate(inputs=with_auto_dims(made), left_out=example.left_out))
    return candidates


def capture_transformers(model: torch.nn.Module, inputs: Inputs) -> Capture:
    """Capture a model of transformers by plain ``torch.export.export``, or if that fails by transformers' own exporter."""
    if not inputs.args and not inputs.kwargs:
        return _capture_first(model, type(model).__name__, _candidates(model, inputs, None))
    try:
        return capture_module(model, inputs)
    except CaptureError as error:
        reason = error
    try:
        return _capture_exactly(capture_patched, model, inputs)
    except CaptureError as error:
        raise CaptureError(f"{reason}; {PATCHED_EXPORT}: {error}") from error


def capture_around_transformers(model: torch.nn.Module, inputs: Inputs) -> Capture:
    """Capture a module that may have models of transformers inside, such as an adapter of PEFT: it may return their caches."""
    for module in filter(is_transformers_model, model.modules()):
        register_transformers_caches(module)
    return capture_module(model, inputs)


def _capture_exactly(
    exporter: Callable[[Any, Inputs], Capture],
    model: torch.nn.Module,
    inputs: Inputs,
    further_inputs: tuple[Inputs, ...] = (),
) -> Capture:
    """Capture a model by one exporter, and compare the program with the model on the example and on further inputs."""
    capture = exporter(model, inputs)
    module = capture.program.module()
    if not answers_alike(model, module, capture.inputs):
        raise CaptureError("the program's answer differs from the model's")
    for smaller_inputs in further_inputs:
        if not answers_alike(model, module, only_parameters(smaller_inputs, capture.inputs)):
            raise CaptureError("the program's answer to the smallest inputs differs from the model's")
    return capture


def answers_alike(model: torch.nn.Module, module: torch.nn.Module, inputs: Inputs) -> bool:
    """Whether a model and the module of its captured program answer with the same bits."""
    return are_identical(run_model(model, inputs), run_model(module, inputs))


def only_parameters(inputs: Inputs, captured: Inputs) -> Inputs:
    """Return inputs without the parameters that a capture does not take, such as those that are constants in it."""
    return replace(inputs, kwargs={name: value for name, value in inputs.kwargs.items() if name in captured.kwargs})
