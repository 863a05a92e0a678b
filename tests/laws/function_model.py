"""A model that is one function, for laws on what a model computes."""

from collections.abc import Callable
from typing import Any

import torch


class Calls(torch.nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)
