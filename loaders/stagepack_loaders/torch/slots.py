"""Where a loaded stage holds its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.graph import Weight
from stagepack.torch_internals import child_modules, mark_non_persistent, weight_tensors
from stagepack_loaders.torch.container import Container


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight in the modules that hold it. It is looked up at each call, so that a weight which the user puts there is used.

    Attributes:
        names: its names in the model; more than one for a tied weight.
        entries: for each name, the parameters or buffers of a module, and the key in them.
    """

    names: tuple[str, ...]
    entries: tuple[tuple[dict[str, Any], str], ...]

    def get(self) -> torch.Tensor:
        """Return the weight."""
        weight = self._entry(0)
        for index in range(1, len(self.names)):
            tied_weight = self._entry(index)
            if tied_weight is not weight and tied_weight.data_ptr() != weight.data_ptr():
                raise InputError(
                    f"{self.names[0]} and {self.names[index]} are one weight in the model, and hold two: assign the new one to both"
                )
        return weight

    def put(self, weight: torch.Tensor) -> None:
        """Replace the weight, under all its names."""
        for tensors, key in self.entries:
            tensors[key] = weight

    def _entry(self, index: int) -> torch.Tensor:
        tensors, key = self.entries[index]
        weight: torch.Tensor | None = tensors.get(key)
        if weight is None:
            raise InputError(
                f"the weight {self.names[index]} was removed: a loaded stage cannot be pruned or parametrized"
            )
        return weight


def register_weight(stage: torch.nn.Module, weight: Weight, tensor: torch.Tensor) -> Slot:
    """Register a weight in a stage under all its names, in modules that are made where there are none."""
    slot_entries = []
    for weight_name in weight.names:
        *module_path, attribute_name = weight_name.split(".")
        module = submodule(stage, module_path)
        tensors = weight_tensors(module, parameters=weight.kind == "parameter")
        tensors[attribute_name] = tensor
        if weight.kind in ("non_persistent_buffer", "constant"):
            mark_non_persistent(module, attribute_name)
        slot_entries.append((tensors, attribute_name))
    return Slot(weight.names, tuple(slot_entries))


def submodule(root: torch.nn.Module, path: Sequence[str]) -> torch.nn.Module:
    """Return the module at a path, and make containers where there are none."""
    module = root
    for module_name in path:
        module_children = child_modules(module)
        child_module = module_children.get(module_name)
        if child_module is None:
            child_module = module_children[module_name] = Container()
        module = child_module
    return module
