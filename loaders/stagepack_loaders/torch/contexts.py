"""Grad mode and autocast of a part of a graph: functions that run a module inside a context.

They leave the context again even if the module raises. torch has operators that do the same, but they leave the grad mode changed when
something inside raises, and import the compiler when they are called first.
"""

from collections.abc import Callable
from typing import Any

import torch

from stagepack.format.graph import Context
from stagepack_loaders.torch.devices import device_type_of, has_device
from stagepack_loaders.torch.torch_attributes import torch_attribute


def context_call(context: Context, stage_device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that runs a module inside a context, and its arguments before the module."""
    autocast = context.autocast
    if autocast is None:
        return run_with_grad_mode, (context.grad,)
    device_type = stage_device.type if autocast.device is None else device_type_of(autocast.device)
    if device_type != stage_device.type and not has_device(device_type):
        # No operator runs on a device that this machine lacks. Code that is written for a GPU opens its autocast on a CPU, too.
        return run_unchanged, ()
    dtype = torch_attribute(autocast.dtype, torch.dtype)
    return run_with_autocast, (device_type, dtype, autocast.enabled, autocast.cache)


def run_unchanged(module: torch.nn.Module, *args: Any) -> Any:
    """Call a module."""
    return module(*args)


def run_with_grad_mode(enabled: bool, module: torch.nn.Module, *args: Any) -> Any:
    """Call a module with gradients recorded or not."""
    with torch.set_grad_enabled(enabled):
        return module(*args)


def run_with_autocast(
    device_type: str, dtype: torch.dtype, enabled: bool, cache: bool, module: torch.nn.Module, *args: Any
) -> Any:
    """Call a module under `torch.autocast` for a type of device."""
    with torch.autocast(device_type, dtype, enabled, cache):
        return module(*args)
