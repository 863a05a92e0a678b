"""Run a model on its example inputs, without changing either."""

import copy
from collections.abc import Iterable
from typing import Any, Final

import torch

from stagepack.capture.error_location import with_location
from stagepack.capture.inputs import Inputs
from stagepack.capture.module_state import container_content, preserve_module
from stagepack.capture.result_records import with_records
from stagepack.capture.torch_messages import format_torch_error
from stagepack.errors import CaptureError
from stagepack.torch_internals import tree_map_tensors

_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))


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
