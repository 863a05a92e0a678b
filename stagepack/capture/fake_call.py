"""Call a model with shapes alone, to learn whether it takes inputs.

- Run a model on its example inputs, without changing either.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from stagepack.capture.inputs import Inputs, on_device_of
from stagepack.capture.module_state import container_content, preserve_module
from stagepack.capture.result_records import with_records
from stagepack.capture.torch_messages import format_torch_error, suppress_warnings, with_location
from stagepack.errors import CaptureError
from stagepack.torch_internals import (
    NO_DATA_ERRORS,
    computing_shapes,
    suppress_log_records,
    tensor_without_data,
    tree_map_tensors,
)

# It reports each operator that refuses its arguments.
_LOGGER = "torch._subclasses.fake_tensor"
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))


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


def run_model(
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    seed: int,
    written: Iterable[torch.Tensor] = (),
    changed: list[str] | None = None,
) -> Any:
    """Call a model on copies of its inputs, without gradients, and restore the model afterwards."""
    with preserve_module(model, written):
        before = None if changed is None else _attributes(model)
        result = _call(model, inputs, seed)
        if changed is not None and before is not None:
            after = _attributes(model)
            changed += [path for path in after if path not in before or not _is_same(before[path], after[path])]
        return result


def run_model_twice(model: torch.nn.Module, inputs: Inputs, *, seed: int) -> tuple[Any, Any]:
    """Call a model twice as `run_model` does; it is restored after the second call."""
    with preserve_module(model):
        return _call(model, inputs, seed), _call(model, inputs, seed)


def _call(model: torch.nn.Module, inputs: Inputs, seed: int) -> Any:
    args, kwargs = _detached_copy((tuple(inputs.args), dict(inputs.kwargs)))
    with torch.no_grad():
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


def _attributes(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """The attributes of all modules, by path, with what is in lists and dicts, but for those of every module."""
    attributes = {}
    for module_path, module in model.named_modules():
        for attribute_name, value in vars(module).items():
            if attribute_name not in _OF_EVERY_MODULE:
                attributes[f"{module_path}.{attribute_name}".removeprefix(".")] = (value, *container_content(value))
    return attributes


def _is_same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether all are the same objects, or equal numbers and texts."""
    return len(values) == len(others) and all(
        value is other
        or (type(value) is type(other) and isinstance(value, bool | int | float | str) and value == other)
        for value, other in zip(values, others, strict=True)
    )
