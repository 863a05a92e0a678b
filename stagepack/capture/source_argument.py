"""The SOURCE argument of the command line -> a captured model."""

import os

import torch

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import Capture
from stagepack.capture.source import capture_source
from stagepack.capture.user_modules import call_user_function
from stagepack.errors import CaptureError


def capture_source_argument(source: str, inputs_function: str | None) -> Capture:
    """Capture the model that the command line names.

    Args:
        source: ``file.py:factory``, ``package.module:factory``, a ``.pt2`` file, or a Hugging Face folder or hub name. A factory takes
            no arguments and returns a module, or a module and its `Inputs`.
        inputs_function: ``file.py:function`` or ``package.module:function``. The function takes no arguments and returns `Inputs`, a
            tuple of inputs by position, or a dict of inputs by name. It takes precedence over inputs from the factory.

    Raises:
        CaptureError: there is no such file or function, it raises or returns something else, or the model cannot be captured.
        MissingPackageError: a Hugging Face model needs transformers, which is not installed.
    """
    inputs = None if inputs_function is None else to_inputs(call_user_function(inputs_function), inputs_function)
    if ":" not in source or os.path.exists(source):
        return capture_source(source, inputs or Inputs())
    model = call_user_function(source)
    if isinstance(model, tuple) and len(model) == 2:
        model, factory_inputs = model
        inputs = to_inputs(factory_inputs, source) if inputs is None else inputs
    if not isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        raise CaptureError(
            f"{source}: expected a torch.nn.Module, or a module and its inputs, found {type(model).__name__}"
        )
    return capture_source(model, inputs or Inputs())


def to_inputs(returned: object, reference: str) -> Inputs:
    """Convert the result of a user's function to inputs.

    Args:
        returned: the result of the function.
        reference: the name of the function, for the error.

    Raises:
        CaptureError: the result is not `Inputs`, a tuple or a dict.
    """
    if isinstance(returned, Inputs):
        return returned
    if isinstance(returned, dict):
        return Inputs(kwargs=returned)
    if isinstance(returned, tuple):
        return Inputs(args=returned)
    raise CaptureError(
        f"{reference}: expected stagepack.Inputs, a tuple or a dict of example inputs, found {type(returned).__name__}"
    )
