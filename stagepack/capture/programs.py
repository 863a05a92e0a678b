"""A module, an exported program or its file -> a `Capture`, which holds a ``torch.export.ExportedProgram``."""

import contextlib
import inspect
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.capture.asked_properties import Property, Question
from stagepack.capture.checkpoint import DeferredTensors
from stagepack.capture.inputs import (
    Inputs,
    complete_dynamic_shapes,
    complete_spec,
    device_of,
    required_parameters,
    unknown_inputs,
    with_tensors,
)
from stagepack.capture.model_runs import model_packages, preserve_module
from stagepack.capture.tensor_kinds import SCRIPTED, refuse_untraceable, untraceable_part
from stagepack.capture.torch_messages import format_torch_error, hold_log_records, suppress_stderr, with_location
from stagepack.capture.traced_calls import TracedCalls
from stagepack.capture.traced_modes import CustomFunction
from stagepack.capture.tracing import explicit_signature, export_module, recorded_trace
from stagepack.capture.user_model import is_transformers_model, wrapped_model
from stagepack.errors import CaptureError, OptionError
from stagepack.torch_internals import (
    composites_of_libraries_decomposed,
    export_by_transformers,
    suppress_log_records,
)

# Whether modules are captured by the compiler's front end, which traces the code of a model instead of running it.
_IS_STRICT: ContextVar[bool] = ContextVar("is_strict", default=False)
PATCHED_EXPORT = "transformers.exporters.DynamoExporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured model."""

    program: ExportedProgram
    # The example that it was captured with.
    inputs: Inputs
    # The module that was captured, if there is one.
    model: torch.nn.Module | None = None
    # The class of the user's model, for messages.
    model_name: str = "the program"
    # Whether the user's model is one of transformers, which expects every persistent buffer in the files.
    is_pretrained: bool = False
    # The function that captured it, for messages.
    method: str = "torch.export.export"
    calls: TracedCalls = field(default_factory=TracedCalls)
    # The functions with a backward of their own that it calls, as far as they were recorded.
    functions: tuple[CustomFunction, ...] = ()
    # The first question of its code for each property of its inputs that torch fixes, as far as they were recorded.
    questions: Mapping[Property, Question] = field(default_factory=dict)
    # Where the data of the model's weights is, if the weights have none in memory.
    deferred: DeferredTensors | None = None
    # Other inputs for which the program must answer as the model does, such as the smallest ones.
    further_inputs: tuple[Inputs, ...] = ()
    # Captures the same model with its weights in memory, if they have none. It is called where the program answers otherwise than the
    # model, which is not known before there is data.
    capture_loaded: "Callable[[], Capture] | None" = None


@contextlib.contextmanager
def strict_captures(is_strict: bool) -> Iterator[None]:
    """Capture modules with ``strict=True`` of ``torch.export.export`` within the ``with`` block."""
    token = _IS_STRICT.set(is_strict)
    try:
        yield
    finally:
        _IS_STRICT.reset(token)


def capture_module(model: torch.nn.Module, inputs: Inputs) -> Capture:
    """Capture a module by ``torch.export.export``. The module is unchanged afterwards."""
    inputs = with_tensors(inputs)
    if (problem := _why_not_called(model, inputs)) is not None:
        raise CaptureError(f"{type(wrapped_model(model)).__name__}{problem}")
    refuse_untraceable(model, inputs)
    packages = model_packages(model)
    with preserve_module(model), explicit_signature(model, inputs):
        dynamic_shapes = complete_dynamic_shapes(model.forward, inputs)
        try:
            if _IS_STRICT.get():
                return _capture_strictly(model, inputs, dynamic_shapes)
            with recorded_trace(model, packages) as recorded:
                program = export_module(model, inputs, dynamic_shapes)
        except Exception as error:
            reason = (
                untraceable_part(model)
                or f"{format_torch_error(error)}{_advice_on_pair(inputs)}{_advice_on_devices(model, inputs)}"
            )
            message = f"{type(wrapped_model(model)).__name__} cannot be captured: {reason}"
            raise CaptureError(with_location(message, error)) from error
    return _captured(model, program, inputs, **recorded)


def _why_not_called(model: torch.nn.Module, inputs: Inputs) -> str | None:
    """Why a module cannot be called with some inputs, as the rest of a sentence that begins with its class; None if it may be."""
    if isinstance(model, torch.jit.ScriptModule):
        return f": {SCRIPTED}"
    if type(model).forward is torch.nn.Module.forward and "forward" not in vars(model):
        parts = [name for name, _ in model.named_children()]
        return (
            f" has no forward: give the inputs of each function to export, by its path ({', '.join(parts[:3]) or 'encode'}): "
            f"return (module, {{{parts[0] if parts else 'encode'!r}: stagepack.Inputs(...)}}) from the function of SOURCE (in Python: "
            "entry_points=)"
        )
    missing = [] if inputs.args or inputs.kwargs else required_parameters(model.forward)
    if missing:
        return (
            f": expected example inputs for {', '.join(missing)}, found none: pass --input "
            f"'{missing[0]}=float32[batch=1..64,8]' with its dtype and sizes, or --inputs FILE.py:FUNCTION, or let the function of "
            "SOURCE return (module, inputs) (in Python: inputs=, or args= and kwargs=)"
        )
    problem = unknown_inputs(model.forward, inputs)
    return None if problem is None else f": {problem}"


def _captured(model: torch.nn.Module, program: ExportedProgram, inputs: Inputs, **recorded: Any) -> Capture:
    user_model = wrapped_model(model)
    return Capture(
        program=program,
        inputs=inputs,
        model=model,
        model_name=type(user_model).__name__,
        is_pretrained=is_transformers_model(user_model),
        **recorded,
    )


def _capture_strictly(model: torch.nn.Module, inputs: Inputs, dynamic_shapes: Any) -> Capture:
    """Capture a module without running its code, so that nothing of its run is recorded."""
    with suppress_stderr(), composites_of_libraries_decomposed():
        program = torch.export.export(
            model, tuple(inputs.args), dict(inputs.kwargs), dynamic_shapes=dynamic_shapes, strict=True
        )
    return _captured(model, program, inputs, method="torch.export.export, strict=True")


def _advice_on_pair(inputs: Inputs) -> str:
    """What to do if the example seems to be a pair of positional and named inputs."""
    is_pair = [*map(type, inputs.args)] == [tuple, dict] and all(isinstance(key, str) for key in inputs.args[1])
    return (
        ": the example is a tuple and a dict by position: for inputs by position and by name, pass stagepack.Inputs(args=..., kwargs=...)"
        if is_pair and not inputs.kwargs
        else ""
    )


def _advice_on_devices(model: torch.nn.Module, inputs: Inputs) -> str:
    """What to do if an input is on another device than the model."""
    device = device_of(model)
    labelled = {f"the input at position {position}": value for position, value in enumerate(inputs.args)}
    for label, value in {**labelled, **inputs.kwargs}.items():
        if isinstance(value, torch.Tensor) and value.device != device:
            return f": {label} is on {value.device} and the model on {device}: move one of them, as in x.to('{device}')"
    return ""


def capture_program(program: ExportedProgram, inputs: Inputs) -> Capture:
    """Use an exported program as it is."""
    if _IS_STRICT.get():
        raise OptionError("strict: an exported program is captured already: leave out strict (--strict)")
    if not inputs.args and not inputs.kwargs:
        if program.example_inputs is None:
            raise CaptureError(
                "the exported program has no example inputs: pass --inputs FILE.py:FUNCTION (in Python: args=, kwargs=)"
            )
        args, kwargs = program.example_inputs
        inputs = Inputs(args=args, kwargs=kwargs)
    return Capture(program=program, inputs=with_tensors(inputs), method="an exported program")


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Read a ``.pt2`` file. Do not pass one that you do not trust: torch reads a part of it with pickle."""
    if not os.path.exists(path):
        raise CaptureError(f"{path}: no such file: expected a .pt2 file that torch.export.save wrote")
    if not zipfile.is_zipfile(path):
        raise CaptureError(f"{path}: expected a .pt2 file that torch.export.save wrote")
    log_records: list[logging.LogRecord] = []
    try:
        # torch warns of pickle, which it reads containers of transformers with, by a message that does not fit its arguments.
        with hold_log_records("torch.export") as log_records, suppress_log_records("torch._export.serde.serialize"):
            return torch.export.load(os.fspath(path))
    except Exception as error:
        # From torch 2.15 on, the error only refers to the log, which has the cause.
        logged = (record.exc_info[1] for record in log_records if record.exc_info)
        cause = next(filter(None, logged), error)
        raise CaptureError(f"{path}: torch.export.load cannot read it: {format_torch_error(cause)}") from error


def capture_patched(model: Any, inputs: Inputs) -> Capture:
    """Capture a model by transformers' exporter.

    It removes constants such as ``use_cache=False`` from the signature, so they are no inputs of the capture either.
    """
    inputs = with_tensors(inputs)
    input_of_parameter = {**inspect.signature(model.forward).bind_partial(*inputs.args).arguments, **inputs.kwargs}
    tensor_inputs = {
        parameter: example
        for parameter, example in input_of_parameter.items()
        if not isinstance(example, bool | int | float | str | None)
    }
    dynamic_shapes = inputs.dynamic_shapes
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = {
            parameter: complete_spec(example, dynamic_shapes.get(parameter))
            for parameter, example in tensor_inputs.items()
        }
    packages = model_packages(model)
    try:
        with preserve_module(model), recorded_trace(model, packages) as recorded:
            program = export_by_transformers(model, input_of_parameter, dynamic_shapes)
    except Exception as error:
        raise CaptureError(with_location(format_torch_error(error), error)) from error
    capture_inputs = Inputs(kwargs=tensor_inputs, dynamic_shapes=dynamic_shapes)
    return _captured(model, program, capture_inputs, method=PATCHED_EXPORT, **recorded)
