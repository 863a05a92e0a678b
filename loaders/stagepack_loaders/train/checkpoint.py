"""What a training goes on from: weights, the state of an optimizer and the number of steps, by names that all processes agree on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from stagepack.torch_internals import weight_tensors
from stagepack_loaders.torch.slots import submodule

# Each parameter has entries of its own, so that processes may have other parameters when they read them.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def module_of(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], buffers: Iterable[tuple[str, torch.Tensor]]
) -> torch.nn.Module:
    """Return modules that hold parameters and buffers under their names."""
    root = torch.nn.Module()
    for tensors, are_parameters in ((parameters, True), (buffers, False)):
        for tensor_name, tensor in tensors:
            *module_path, attribute_name = tensor_name.split(".")
            module = submodule(root, module_path)
            weight_tensors(module, parameters=are_parameters)[attribute_name] = tensor
    return root


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer by the names of its parameters. Parameters without a state get one."""
    return dict(get_optimizer_state_dict(module, optimizer, options=_OPTIONS))


def load_optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Set the state of an optimizer to that of `optimizer_state`."""
    set_optimizer_state_dict(module, optimizer, state, options=_OPTIONS)
