"""A model with several results, some of which no gradient leads from to the first parameters, and losses that use some of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.format.reader import Bundle


class Branches(torch.nn.Module):
    """Results of each quarter of the model; one of them is detached, and the derivative of another one is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = torch.nn.Parameter(torch.randn(8, 8))
        self.trunk, self.middle, self.upper = (torch.nn.Linear(8, 8) for _ in range(3))
        self.early, self.probe, self.main = (torch.nn.Linear(8, 3) for _ in range(3))
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map `[batch, 8]` to results of `[batch, 3]` and `[batch, 8]`."""
        hidden = torch.tanh(self.trunk(x) @ self.tied)
        results = {"early": self.early(hidden)}
        hidden = torch.tanh(self.frozen(self.middle(hidden)))
        results["root"] = (hidden - hidden.detach()).abs().sqrt()
        hidden = torch.tanh(self.upper(hidden))
        results["probe"] = self.probe(hidden.detach())
        results["main"] = self.main(hidden @ self.tied.T)
        return results


# Each uses some results; the first element of the target, which all rows share, chooses.
LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "main": lambda results: results["main"].square().mean(),
    "probe": lambda results: results["probe"].square().mean(),
    "early": lambda results: results["early"].square().mean(),
    "early-and-probe": lambda results: results["early"].square().mean() + results["probe"].mean(),
    "main-detached": lambda results: results["main"].detach().mean() + results["early"].square().mean(),
    "all-but-root": lambda results: sum(results[name].square().mean() for name in ("early", "probe", "main")),
}


def loss_of(results: Any, target: Any) -> torch.Tensor:
    """The loss that the target names."""
    return LOSSES[target](results)


def new_model() -> Branches:
    """The model with its first weights."""
    torch.manual_seed(0)
    return Branches().double()


def batch(number: int) -> torch.Tensor:
    """A batch of eight rows."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def export_model(path: Path, split_at: list[str]) -> Bundle:
    """The model, cut in front of some modules."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    return stagepack.export(new_model(), (batch(0),), out=path, split_at=split_at, dynamic_shapes=shapes)
