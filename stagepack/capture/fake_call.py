"""Call a model with shapes alone, to learn whether it takes inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stagepack.capture.error_location import with_location
from stagepack.capture.inputs import Inputs, on_device_of
from stagepack.capture.module_state import preserve_module
from stagepack.capture.torch_messages import format_torch_error, suppress_warnings
from stagepack.torch_internals import (
    NO_DATA_ERRORS,
    computing_shapes,
    suppress_log_records,
    tensor_without_data,
    tree_map_tensors,
)

# It reports each operator that refuses its arguments.
_LOGGER = "torch._subclasses.fake_tensor"


@dataclass(frozen=True, slots=True)
class FakeCall:
    """What a call with shapes alone has told.

    Attributes:
        result: the result, whose tensors have no data; None if the call failed.
        error: why the call failed; None if it did not, or the model asked for data, so that nothing is known.
    """

    result: Any = None
    error: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the model is known to take the inputs."""
        return self.error is None and self.result is not None


def call_with_shapes(model: torch.nn.Module, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> FakeCall:
    """Call a function of a model with shapes alone. The model is unchanged afterwards."""
    with (
        preserve_module(model),
        suppress_warnings(),
        suppress_log_records(_LOGGER),
        torch.no_grad(),
        computing_shapes(model) as mode,
    ):
        try:
            kwargs_on_device = on_device_of(model, Inputs(kwargs=kwargs)).kwargs
            fake_kwargs = tree_map_tensors(partial(tensor_without_data, mode), kwargs_on_device)
            return FakeCall(result=function(**fake_kwargs))
        except NO_DATA_ERRORS:
            return FakeCall()
        except Exception as error:  # noqa: BLE001 - the code of the model may raise anything
            return FakeCall(error=with_location(format_torch_error(error), error))
