"""Where a loaded stage holds its weights."""

from dataclasses import dataclass
from typing import Any

import torch

from stagepack.errors import InputError


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight in the modules that hold it; it is looked up at each call, so that one which the user puts there is used.

    Attributes:
        names: its names in the model; more than one for a tied weight.
        places: for each name, the parameters or buffers of a module, and the key.
    """

    names: tuple[str, ...]
    places: tuple[tuple[dict[str, Any], str], ...]

    def get(self) -> torch.Tensor:
        """The weight.

        Raises:
            InputError: it is gone, or its names no longer stand for one weight.
        """
        found: list[Any] = [held.get(key) for held, key in self.places]
        for name, tensor in zip(self.names, found, strict=True):
            if tensor is None:
                raise InputError(f"the weight {name} is gone: a loaded stage cannot be pruned or parametrized")
            if tensor is not found[0] and tensor.data_ptr() != found[0].data_ptr():
                raise InputError(f"{self.names[0]} and {name} are one weight in the model: give both names the new one")
        weight: torch.Tensor = found[0]
        return weight
