"""A module, an exported program or its file -> a `Capture`, which holds a ``torch.export.ExportedProgram``."""

import contextlib
import functools
import inspect
import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export import Dim, ExportedProgram

from stagepack.capture.asked_properties import Property, Question
from stagepack.capture.captured_records import captured_results
from stagepack.capture.checkpoint import DeferredTensors
from stagepack.capture.dynamic_dims import declared_dims, is_range_violation, narrowed_dynamic_shapes
from stagepack.capture.imports import register_model_outputs
from stagepack.capture.inputs import (
    Inputs,
    complete_dynamic_shapes,
    complete_spec,
    device_of,
    required_parameters,
    unknown_inputs,
    with_tensors,
)
from stagepack.capture.model_runs import preserve_module, wrapped_model
from stagepack.capture.tensor_kinds import SCRIPTED, refuse_untraceable, untraceable_part
from stagepack.capture.torch_messages import format_torch_error, hold_log_records, suppress_stderr, with_location
from stagepack.capture.traced_calls import TracedCalls
from stagepack.capture.traced_code import traced_as_meant
from stagepack.capture.traced_modes import CustomFunction, TracedModes
from stagepack.errors import CaptureError, OptionError
from stagepack.format.file_writing import FileRange
from stagepack.torch_internals import (
    assert_in_trace,
    composites_of_libraries_decomposed,
    export_by_transformers,
)

# Whether modules are captured by the compiler's front end, which traces the code of a model instead of running it.
_IS_STRICT: ContextVar[bool] = ContextVar("is_strict", default=False)
# Whether this torch is 2.11, see `_export`.
_PROVES_FEW_GUARDS: Final = str(torch.__version__).startswith("2.11.")
PATCHED_EXPORT = "transformers.exporters.DynamoExporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured model."""

    program: ExportedProgram
    # The example that it was captured with.
    inputs: Inputs
    # The module that was captured, if there is one.
    model: torch.nn.Module | None = None
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

    @property
    def model_name(self) -> str:
        """The class of the user's model, for messages."""
        return "the program" if self.model is None else type(wrapped_model(self.model)).__name__

    def data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a tensor of the model; the data of a deferred one is read now."""
        return tensor if self.deferred is None else self.deferred.real(tensor)

    def location(self, tensor: torch.Tensor) -> FileRange | None:
        """Return the bytes of a file that a deferred tensor of the model consists of, or None."""
        return None if self.deferred is None else self.deferred.location(tensor)


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
    model_class = type(wrapped_model(model)).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(f"{model_class}: {SCRIPTED}")
    if type(model).forward is torch.nn.Module.forward and "forward" not in vars(model):
        parts = [name for name, _ in model.named_children()]
        raise CaptureError(
            f"{model_class} has no forward: give the inputs of each function to export, by its path ({', '.join(parts[:3]) or 'encode'}): "
            f"return (module, {{{parts[0] if parts else 'encode'!r}: stagepack.Inputs(...)}}) from the function of SOURCE (in Python: "
            "entry_points=)"
        )
    if not inputs.args and not inputs.kwargs:
        missing = required_parameters(model.forward)
        if missing:
            raise CaptureError(
                f"{model_class}: expected example inputs for {', '.join(missing)}, found none: pass --input "
                f"'{missing[0]}=float32[batch=1..64,8]' with its dtype and sizes, or --inputs FILE.py:FUNCTION, or let the function of "
                "SOURCE return (module, inputs) (in Python: inputs=, or args= and kwargs=)"
            )
    if (problem := unknown_inputs(model.forward, inputs)) is not None:
        raise CaptureError(f"{model_class}: {problem}")
    refuse_untraceable(model, inputs)
    with preserve_module(model), explicit_signature(model, inputs):
        dynamic_shapes = complete_dynamic_shapes(model.forward, inputs)
        try:
            if _IS_STRICT.get():
                return _capture_strictly(model, inputs, dynamic_shapes)
            with recorded_trace(model) as recorded:
                program = _export(model, inputs, dynamic_shapes)
        except Exception as error:
            reason = (
                untraceable_part(model)
                or f"{format_torch_error(error)}{_advice_on_pair(inputs)}{_advice_on_devices(model, inputs)}"
            )
            message = f"{model_class} cannot be captured: {reason}"
            raise CaptureError(with_location(message, error)) from error
    return Capture(program=program, inputs=inputs, model=model, **recorded)


def _capture_strictly(model: torch.nn.Module, inputs: Inputs, dynamic_shapes: Any) -> Capture:
    """Capture a module without running its code, so that nothing of its run is recorded."""
    with suppress_stderr(), composites_of_libraries_decomposed():
        program = torch.export.export(
            model, tuple(inputs.args), dict(inputs.kwargs), dynamic_shapes=dynamic_shapes, strict=True
        )
    return Capture(program=program, inputs=inputs, model=model, method="torch.export.export, strict=True")


@contextlib.contextmanager
def recorded_trace(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Trace a model as it is meant, within the ``with`` block."""
    register_model_outputs()
    calls, modes = TracedCalls(), TracedModes()
    fields: dict[str, Any] = {}
    with (
        suppress_stderr(),
        calls.recorded(),
        modes.recorded(),
        captured_results(model),
        traced_as_meant(model) as asked,
        composites_of_libraries_decomposed(),
    ):
        yield fields
    fields.update(calls=calls, functions=modes.functions, questions=asked.questions)


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


def _export(model: torch.nn.Module, inputs: Inputs, dynamic_shapes: Any) -> ExportedProgram:
    """Export a module, with narrower ranges of sizes where its code demands it.

    torch 2.11 cannot prove such guards as ``min(8*s, 16*s) == 8*s``, which grouped-query attention with a dynamic sequence needs, and
    refuses the range of `s`: it gets assertions in the program. Later versions prove them.
    """
    export = functools.partial(torch.export.export, model, tuple(inputs.args), dict(inputs.kwargs))
    try:
        return export(dynamic_shapes=dynamic_shapes)
    except RuntimeError as error:
        violation = error
    if is_range_violation(violation):
        try:
            return _export_in_ranges(export, model, dynamic_shapes)
        except RuntimeError as error:
            violation = error
    if _PROVES_FEW_GUARDS:
        return export(dynamic_shapes=dynamic_shapes, prefer_deferred_runtime_asserts_over_guards=True)
    raise violation


def _export_in_ranges(
    export: Callable[..., ExportedProgram], model: torch.nn.Module, dynamic_shapes: Any
) -> ExportedProgram:
    """Export a module that does not allow the ranges of its sizes; those that torch suggests are used."""
    with equal_from_the_start(model, dynamic_shapes):
        try:
            return export(dynamic_shapes=dynamic_shapes)
        except RuntimeError as error:
            narrowed = narrowed_dynamic_shapes(error, dynamic_shapes)
            if narrowed is None:
                raise
        return export(dynamic_shapes=narrowed)


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
        with hold_log_records("torch.export") as log_records:
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
    try:
        with preserve_module(model), recorded_trace(model) as recorded:
            program = export_by_transformers(model, input_of_parameter, dynamic_shapes)
    except Exception as error:
        raise CaptureError(with_location(format_torch_error(error), error)) from error
    capture_inputs = Inputs(kwargs=tensor_inputs, dynamic_shapes=dynamic_shapes)
    return Capture(program=program, inputs=capture_inputs, model=model, method=PATCHED_EXPORT, **recorded)


@contextlib.contextmanager
def explicit_signature(model: torch.nn.Module, inputs: Inputs) -> Iterator[None]:
    """Give a model, within the ``with`` block, a ``forward`` that names all inputs; one that names them already is left as it is."""
    forward = model.forward
    signature = inspect.signature(forward)
    named = _named_parameters(signature, inputs)
    if named is None:
        yield
        return

    @functools.wraps(forward)
    def call_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call_forward.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    is_own = "forward" in vars(model)
    model.forward = call_forward
    try:
        yield
    finally:
        del model.forward
        if is_own:
            model.forward = forward


def _named_parameters(signature: inspect.Signature, inputs: Inputs) -> list[inspect.Parameter] | None:
    """The parameters with a name for each input that ``**kwargs`` takes; None if it takes none."""
    further_names = [name for name in inputs.kwargs if name not in signature.parameters]
    parameters = list(signature.parameters.values())
    if not further_names or not parameters or parameters[-1].kind != inspect.Parameter.VAR_KEYWORD:
        return None
    return [*parameters[:-1], *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in further_names)]


@contextlib.contextmanager
def equal_from_the_start(model: torch.nn.Module, dynamic_shapes: Any) -> Iterator[None]:
    """Compare, at each call of a model within the ``with`` block, the sizes of its inputs that share a ``Dim``."""

    def compare(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first_sizes: dict[str, Any] = {}
        inputs = Inputs(args=args, kwargs=kwargs, dynamic_shapes=dynamic_shapes)
        for leaf, dims in declared_dims(module.forward, inputs):
            for axis, dim in dims.items():
                if axis is not None and isinstance(dim, Dim) and not hasattr(dim, "root"):
                    size = leaf.shape[axis]
                    assert_in_trace(first_sizes.setdefault(dim.__name__, size) == size)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
