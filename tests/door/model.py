"""The model of the tests of this folder."""

import torch


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


EXAMPLE = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)
