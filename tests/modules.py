"""A module that is made of its ``forward`` alone."""

from collections.abc import Callable
from typing import Any

import torch


def module_of(forward: Callable[..., Any], **held: Any) -> torch.nn.Module:
    """A module with a method, and the modules, parameters and buffers that it holds; a tensor becomes a buffer."""
    module: torch.nn.Module = type(forward.__name__, (torch.nn.Module,), {"forward": forward})()
    for name, value in held.items():
        if isinstance(value, torch.nn.Parameter | torch.nn.Module | torch.nn.Buffer):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)
    return module
