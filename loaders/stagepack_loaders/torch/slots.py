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
        weight = self._at(0)
        for number in range(1, len(self.names)):
            other = self._at(number)
            if other is not weight and other.data_ptr() != weight.data_ptr():
                names = f"{self.names[0]} and {self.names[number]}"
                raise InputError(f"{names} are one weight in the model: give both names the new one")
        return weight

    def put(self, weight: torch.Tensor) -> None:
        """Put another weight in its place, under all its names."""
        for held, key in self.places:
            held[key] = weight

    def _at(self, number: int) -> torch.Tensor:
        held, key = self.places[number]
        weight: torch.Tensor | None = held.get(key)
        if weight is None:
            raise InputError(
                f"the weight {self.names[number]} is gone: a loaded stage cannot be pruned or parametrized"
            )
        return weight
