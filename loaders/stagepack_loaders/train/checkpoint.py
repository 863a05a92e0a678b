"""What a training goes on from: weights, the state of an optimizer and the number of steps, by names that all processes agree on."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from stagepack.errors import InputError
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


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a checkpoint has all entries, and each tensor in its shape."""
    for entry, expected_values in expected.items():
        if entry not in state:
            raise InputError(f"expected the entry {entry} in the checkpoint, found {', '.join(state) or 'none'}")
        if not isinstance(expected_values, Mapping):
            continue
        for key, expected_value in expected_values.items():
            if key not in state[entry]:
                raise InputError(f"expected {key} in the entry {entry} of the checkpoint, found none")
            if isinstance(expected_value, torch.Tensor):
                _check_tensor(state[entry][key], expected_value, f"{entry}, {key}")


def _check_tensor(found: Any, expected: torch.Tensor, location: str) -> None:
    found_text = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if found_text != list(expected.shape):
        raise InputError(
            f"{location}: expected a tensor of shape {list(expected.shape)} in the checkpoint, found {found_text}"
        )


def load_optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Set the state of an optimizer to that of `optimizer_state`."""
    set_optimizer_state_dict(module, optimizer, state, options=_OPTIONS)
