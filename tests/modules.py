"""A module that is made of its ``forward`` alone, and bundles of such modules in several stages."""

from collections.abc import Callable
from typing import Any

import torch

import stagepack
from stagepack.errors import CutError


def module_of(forward: Callable[..., Any], **held: Any) -> torch.nn.Module:
    """A module with a method, and the modules, parameters and buffers that it holds; a tensor becomes a buffer."""
    module: torch.nn.Module = type(forward.__name__, (torch.nn.Module,), {"forward": forward})()
    for name, value in held.items():
        if isinstance(value, torch.nn.Parameter | torch.nn.Module | torch.nn.Buffer):
            setattr(module, name, value)
        else:
            module.register_buffer(name, value)
    return module


def cut_at_most(bundle: stagepack.Bundle, stages: int) -> stagepack.Bundle:
    """Cut a bundle in place into so many stages, or into as many as its few operators allow."""
    for count in range(stages, 1, -1):
        try:
            return stagepack.recut(bundle, out=bundle.path, stages=count, overwrite=True)
        except CutError as error:
            if "stages: expected at most" not in str(error):
                raise
    return bundle
