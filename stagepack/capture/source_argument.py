"""The SOURCE argument of the command line -> a captured model."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from stagepack.capture.entry_points import capture_entry_points, capture_modules
from stagepack.capture.example_inputs import example_inputs
from stagepack.capture.inputs import Inputs
from stagepack.capture.module_checkpoint import make_with_checkpoint
from stagepack.capture.pretrained_model import load_pretrained
from stagepack.capture.programs import Capture, capture_module
from stagepack.capture.source import capture_source
from stagepack.capture.user_modules import call_user_function
from stagepack.errors import CaptureError, OptionError

# The name of the only entry point of a model.
FORWARD = "forward"

# Of one call of the model, or of functions of it by their paths.
ExampleInputs = Inputs | dict[str, Inputs]


def capture_source_argument(
    source: str,
    inputs_function: str | None,
    weights: str | None = None,
    dtype: str | None = None,
    modules: Sequence[str] = (),
) -> dict[str, Capture]:
    """Capture the model that the command line names.

    Args:
        source: ``file.py:factory``, ``package.module:factory``, a ``.pt2`` file, or a Hugging Face folder or hub name. A factory takes
            no arguments and returns a module, or a module and its `Inputs`.
        inputs_function: ``file.py:function`` or ``package.module:function``. The function takes no arguments and returns `Inputs`, a
            tuple of inputs by position, or a dict of inputs by name; or a dict of `Inputs` by paths of functions, see
            `capture_entry_points`. It takes precedence over inputs from the factory.
        weights: a checkpoint of the weights of the module that a factory makes, see `read_checkpoint`.
        dtype: of a Hugging Face folder or hub name: the dtype that its weights are converted to.
        modules: paths of modules, each of which becomes an entry point, see `capture_modules`; none for the model itself.

    Returns:
        The captured programs by the name of the entry point, which is ``forward`` unless the inputs name functions.

    Raises:
        CaptureError: there is no such file or function, it raises or returns something else, or the model cannot be captured.
        OptionError: `dtype` is wrong, or for another kind of source.
        MissingPackageError: a Hugging Face model needs transformers, which is not installed.
    """
    if modules:
        if weights is not None:
            raise CaptureError(f"{weights}: weights of a checkpoint are for a whole model")
        model, model_inputs = load_source_argument(source, inputs_function, dtype)
        return capture_modules(model, model_inputs, modules)
    inputs = None if inputs_function is None else to_inputs(call_user_function(inputs_function), inputs_function)
    if ":" not in source or os.path.exists(source):
        if weights is not None:
            raise CaptureError(
                f"{source}: weights are for a module that FILE.py:FUNCTION makes; this source has its own"
            )
        if isinstance(inputs, dict):
            return capture_entry_points(load_pretrained(source, dtype=dtype), inputs)
        return {FORWARD: capture_source(source, inputs or Inputs(), dtype=dtype)}
    _refuse_dtype(source, dtype)
    if weights is not None:
        if isinstance(inputs, dict):
            raise CaptureError(f"{weights}: weights of a checkpoint are for a model with one entry point")
        return {FORWARD: capture_with_checkpoint(lambda: _call_factory(source), inputs, weights)}
    model, factory_inputs = _call_factory(source)
    inputs = inputs or factory_inputs or Inputs()
    if isinstance(inputs, dict):
        if not isinstance(model, torch.nn.Module):
            raise CaptureError(
                f"{source}: expected a torch.nn.Module for several entry points, found an ExportedProgram"
            )
        return capture_entry_points(model, inputs)
    return {FORWARD: capture_source(model, inputs)}


def load_source_argument(
    source: str, inputs_function: str | None, dtype: str | None = None
) -> tuple[torch.nn.Module, Inputs]:
    """Return the model that the command line names, and its example inputs, without capturing it.

    Args:
        source: see `capture_source_argument`; not a ``.pt2`` file, which is captured already.
        inputs_function: see `capture_source_argument`.
        dtype: see `capture_source_argument`.

    Raises:
        CaptureError: there is no such model, or it has several entry points.
        OptionError: `dtype` is wrong, or for another kind of source.
        MissingPackageError: a Hugging Face model needs transformers, which is not installed.
    """
    inputs = None if inputs_function is None else to_inputs(call_user_function(inputs_function), inputs_function)
    if ":" in source and not os.path.exists(source):
        _refuse_dtype(source, dtype)
        model, factory_inputs = _call_factory(source)
        inputs = inputs or factory_inputs or Inputs()
    else:
        model = load_pretrained(source, dtype=dtype)
        inputs = inputs or example_inputs(model)
    if not isinstance(model, torch.nn.Module) or isinstance(inputs, dict):
        raise CaptureError(f"{source}: expected a torch.nn.Module and the inputs of one call")
    return model, inputs


def _refuse_dtype(source: str, dtype: str | None) -> None:
    if dtype is not None:
        raise OptionError(
            f"dtype: it is for a Hugging Face folder or hub name: let {source} return a module of this dtype"
        )


def capture_with_checkpoint(
    make_model: Callable[[], tuple[Any, ExampleInputs | None]], inputs: Inputs | None, weights: str | os.PathLike[str]
) -> Capture:
    """Capture a module that a function makes, with weights that stay in a checkpoint as far as possible.

    Args:
        make_model: returns the module, and its example inputs or None.
        inputs: example inputs that take precedence.
        weights: the checkpoint, see `read_checkpoint`.

    Raises:
        CaptureError: the checkpoint does not fit the module, or the module cannot be captured.
    """

    def module_of(made: tuple[Any, ExampleInputs | None]) -> torch.nn.Module:
        if not isinstance(made[0], torch.nn.Module):
            raise CaptureError(f"{weights}: expected a function that makes a torch.nn.Module for these weights")
        return made[0]

    (model, factory_inputs), deferred = make_with_checkpoint(make_model, module_of, weights)
    if isinstance(factory_inputs, dict):
        raise CaptureError(f"{weights}: weights of a checkpoint are for a model with one entry point")
    inputs = inputs or factory_inputs or Inputs()
    if deferred is None:
        return capture_source(model, inputs)
    return replace(capture_module(model, inputs), deferred=deferred)


def _call_factory(source: str) -> tuple[Any, ExampleInputs | None]:
    """Call a factory; return the module and its inputs, or None."""
    model = call_user_function(source)
    inputs = None
    if isinstance(model, tuple) and len(model) == 2:
        model, factory_inputs = model
        inputs = to_inputs(factory_inputs, source)
    if not isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        raise CaptureError(
            f"{source}: expected a torch.nn.Module, or a module and its inputs, found {type(model).__name__}"
        )
    return model, inputs


def to_inputs(returned: object, reference: str) -> ExampleInputs:
    """Convert the result of a user's function to inputs.

    Args:
        returned: the result of the function.
        reference: the name of the function, for the error.

    Raises:
        CaptureError: the result is not `Inputs`, a tuple or a dict.
    """
    if isinstance(returned, Inputs):
        return returned
    if isinstance(returned, dict) and returned and all(isinstance(value, Inputs) for value in returned.values()):
        return returned
    if isinstance(returned, dict):
        return Inputs(kwargs=returned)
    if isinstance(returned, tuple):
        return Inputs(args=returned)
    raise CaptureError(
        f"{reference}: expected stagepack.Inputs, a tuple or a dict of example inputs, found {type(returned).__name__}"
    )
