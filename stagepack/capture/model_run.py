"""Run a model on its example inputs, without changing either."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from stagepack.capture.error_location import with_location
from stagepack.capture.inputs import Inputs
from stagepack.capture.module_state import preserve_module
from stagepack.capture.result_records import with_records
from stagepack.capture.torch_messages import format_torch_error
from stagepack.errors import CaptureError
from stagepack.torch_internals import tree_map_tensors


def run_model(model: torch.nn.Module, inputs: Inputs, *, seed: int, written: Iterable[torch.Tensor] = ()) -> Any:
    """Call a model on copies of its inputs, without gradients, and restore the model afterwards.

    Args:
        model: a module.
        inputs: the inputs of the call.
        seed: the seed of torch's random number generators for the call.
        written: tensors that the model writes besides its buffers; they are restored too.

    Returns:
        A copy of the model's result, with records in the place of dataclasses that torch does not know.

    Raises:
        CaptureError: the model raises an error; the message has its reason and the line that it came from.
    """
    args, kwargs = _detached_copy((tuple(inputs.args), dict(inputs.kwargs)))
    with preserve_module(model, written), torch.no_grad():
        torch.manual_seed(seed)
        try:
            result = model(*args, **kwargs)
        except Exception as error:
            message = f"{type(model).__name__} fails on its example inputs: {format_torch_error(error)}"
            raise CaptureError(with_location(message, error)) from error
        return _detached_copy(with_records(result))


def _detached_copy(values: Any) -> Any:
    """Copy nested containers with their tensors, which lose their autograd history."""
    return copy.deepcopy(tree_map_tensors(torch.Tensor.detach, values))
