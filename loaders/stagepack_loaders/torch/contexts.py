"""Run a module inside a context, and leave the context again whatever happens.

torch has operators that do the same, but they leave the grad mode changed when something inside raises, and import the
compiler when they are called first.
"""

from typing import Any

import torch


def run_with_grad_mode(enabled: bool, module: torch.nn.Module, *args: Any) -> Any:
    """Call a module with gradients recorded or not."""
    with torch.set_grad_enabled(enabled):
        return module(*args)


def run_with_autocast(
    kind: str, dtype: torch.dtype, enabled: bool, cache: bool, module: torch.nn.Module, *args: Any
) -> Any:
    """Call a module under ``torch.autocast`` for a type of device."""
    with torch.autocast(kind, dtype, enabled, cache):
        return module(*args)
