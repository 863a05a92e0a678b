"""A model with several results, some of which no gradient leads from to the first parameters, and losses that use some of them.

And a model of sequences that has time first, with labels of which some are ignored.
"""

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


class Sequences(torch.nn.Module):
    """Transformer layers that take time first, and the logits of each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(4))
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Map `[time, batch, 8]` and `[batch, time]` to logits `[time, batch, 5]`."""
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        logits: torch.Tensor = self.head(x)
        return logits


def new_sequence_model() -> Sequences:
    """The model with its first weights."""
    torch.manual_seed(0)
    return Sequences().double()


def sequence_batch() -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """Eight sequences of different lengths, and labels of the times that they have."""
    lengths = torch.tensor([6, 6, 5, 2, 6, 3, 1, 4])
    padding = torch.arange(6) >= lengths[:, None]
    labels = torch.randint(0, 5, (6, 8), generator=torch.Generator().manual_seed(1)).masked_fill(padding.T, -100)
    x = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (x, padding), {"labels": labels, "count": lengths.sum()}


def label_loss(logits: Any, target: Any) -> torch.Tensor:
    """The mean loss of all labels of a batch, as the part of one microbatch in it."""
    logits, labels = logits.flatten(0, 1), target["labels"].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / target["count"]


def export_sequence_model(path: Path, split_at: list[str]) -> Bundle:
    """The model of sequences, cut in front of some modules."""
    time, rows = torch.export.Dim("time", min=1, max=64), torch.export.Dim("batch", min=1, max=64)
    args, _ = sequence_batch()
    shapes = ({0: time, 1: rows}, {0: rows, 1: time})
    return stagepack.export(new_sequence_model(), args, out=path, split_at=split_at, dynamic_shapes=shapes)
