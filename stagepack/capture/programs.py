"""A module, an exported program or its file -> `torch.export.ExportedProgram`.

This is the only place that runs the user's code.
"""

import contextlib
import copy
import inspect
import io
import itertools
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from stagepack.capture.module_calls import TracedCalls
from stagepack.capture.module_state import preserve_module
from stagepack.errors import CaptureError

_ADVICE = ("For more information", "For extended logs", "from user code", "Set TORCH", "The error above", "User Stack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Example inputs of a model, and which of their dimensions may change (``torch.export``'s `dynamic_shapes`)."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured model.

    Attributes:
        program: the capture.
        inputs: the example that it was captured with.
        model: the module it came from, when there is one.
        method: the function that captured it, for the log.
        calls: the calls of its modules, as far as they were recorded.
    """

    program: ExportedProgram
    inputs: Inputs
    model: torch.nn.Module | None = None
    method: str = "torch.export.export"
    calls: TracedCalls = field(default_factory=TracedCalls)


def capture_module(model: torch.nn.Module, inputs: Inputs) -> Capture:
    """Capture a module as it stands; it comes back unchanged.

    Raises:
        CaptureError: ``torch.export`` cannot capture it; the message is torch's reason.
    """
    if not inputs.args and not inputs.kwargs:
        required = _required_parameters(model)
        if required:
            raise CaptureError(
                f"{type(model).__name__}: example inputs are missing for {', '.join(required)}: pass args or kwargs"
            )
    calls = TracedCalls()
    with preserve_module(model):
        try:
            with suppress_stderr(), calls.recorded():
                program = torch.export.export(
                    model, tuple(inputs.args), dict(inputs.kwargs), dynamic_shapes=_complete(model, inputs)
                )
        except Exception as error:
            raise CaptureError(f"{type(model).__name__} cannot be captured: {format_torch_error(error)}") from error
    return Capture(program=program, inputs=inputs, model=model, calls=calls)


def capture_program(program: ExportedProgram, inputs: Inputs) -> Capture:
    """Take an exported program with its own example inputs, unless other ones are given.

    Raises:
        CaptureError: there are no example inputs.
    """
    if not inputs.args and not inputs.kwargs:
        if program.example_inputs is None:
            raise CaptureError("the exported program carries no example inputs: pass args or kwargs")
        args, kwargs = program.example_inputs
        inputs = Inputs(args=args, kwargs=kwargs)
    return Capture(program=program, inputs=inputs, method="an exported program")


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """Read a ``.pt2`` file. It is not safe input when it comes from a stranger: torch reads part of it with pickle.

    Raises:
        CaptureError: the file is missing or is not a ``.pt2`` file of this torch.
    """
    if not zipfile.is_zipfile(path):
        raise CaptureError(f"{path}: expected a .pt2 file that torch.export.save wrote")
    try:
        return torch.export.load(os.fspath(path))
    except Exception as error:
        raise CaptureError(f"{path}: torch.export.load cannot read it: {format_torch_error(error)}") from error


def dimension_names(capture: Capture) -> dict[str, str]:
    """The names that the caller gave to dynamic dimensions: torch's symbol -> ``Dim`` name."""
    shapes = capture.inputs.dynamic_shapes
    if not shapes or capture.model is None:
        return {}
    given = _given(capture.model, capture.inputs)
    specs = shapes if isinstance(shapes, Mapping) else dict(zip(given, shapes, strict=False))
    dims = [dims for name, value in given.items() for dims in _dims_of_leaves(value, specs.get(name))]
    program = capture.program
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"][-len(dims) :]
    names: dict[str, str] = {}
    for node, leaf in zip(inputs, dims, strict=False):
        for position, dim in leaf.items():
            size = node.meta["val"].shape[position]
            if isinstance(dim, Dim) and isinstance(size, torch.SymInt) and str(size).isidentifier():
                names.setdefault(str(size), dim.__name__)
    return names


def format_torch_error(error: BaseException) -> str:
    """One line that says why: torch's message up to its advice on logging and debugging."""
    lines = itertools.takewhile(lambda line: not line.startswith(_ADVICE), map(str.strip, str(error).splitlines()))
    return " ".join(line for line in lines if line)[:600] or type(error).__name__


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
    """Hold back what is written to standard error; drop it on failure, since torch prints graphs then beside its message."""
    with contextlib.redirect_stderr(io.StringIO()) as held:
        yield
    sys.stderr.write(held.getvalue())


def run_model(model: torch.nn.Module, inputs: Inputs, *, seed: int, written: Iterable[torch.Tensor] = ()) -> Any:
    """What a model answers, without gradients; the model and the inputs stay as they are.

    Args:
        model: a module.
        inputs: what to call it with.
        seed: of the random numbers.
        written: tensors that it writes besides its buffers.
    """
    args, kwargs = _copied((tuple(inputs.args), dict(inputs.kwargs)))
    with preserve_module(model, written), torch.no_grad():
        torch.manual_seed(seed)
        return _copied(model(*args, **kwargs))


def _copied(given: Any) -> Any:
    """A copy of tensors in containers, without their gradients' history."""
    return copy.deepcopy(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given))


def _required_parameters(model: torch.nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in plain
    ]


def _given(model: torch.nn.Module, inputs: Inputs) -> dict[str, Any]:
    """What the example gives to each parameter of the model's call, by name, in the order given."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*inputs.args)
    except TypeError as error:
        raise CaptureError(f"{type(model).__name__}: the example inputs do not fit its forward: {error}") from None
    return {**bound.arguments, **inputs.kwargs}


def _children(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else pytree.tree_leaves(value)


def _complete(model: torch.nn.Module, inputs: Inputs) -> Any:
    """The dynamic shapes with None for the parameters that they leave out, as ``torch.export`` wants them."""
    if not isinstance(inputs.dynamic_shapes, Mapping):
        return inputs.dynamic_shapes
    return dict.fromkeys(_given(model, inputs)) | dict(inputs.dynamic_shapes)


def _dims_of_leaves(value: Any, spec: Any) -> Iterator[Mapping[int, Any]]:
    """Yield, for each leaf of an input from left to right, its dynamic dimensions by position."""
    if isinstance(value, torch.Tensor):
        yield dict(enumerate(spec)) if isinstance(spec, list | tuple) else spec or {}
    elif isinstance(value, Mapping) and isinstance(spec, Mapping):
        for key, part in value.items():
            yield from _dims_of_leaves(part, spec.get(key))
    elif isinstance(spec, list | tuple):  # of a list or a tuple, or of an object: one for each child
        for part, inner in zip(_children(value), spec, strict=True):
            yield from _dims_of_leaves(part, inner)
    else:
        yield from ({} for _ in pytree.tree_leaves(value))
