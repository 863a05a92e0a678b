"""A model with dropout and batch norm, in training mode."""

from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.format.reader import Bundle

SEED = 7
MICROBATCHES = 4
STEPS = 2


class NoisyModel(torch.nn.Module):
    """Dropout in the first, third and fourth quarter, batch norms in all, and an attention that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Dropout(rate))
            for rate in (0.3, 0.0, 0.5, 0.2)
        )
        self.attention = torch.nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, 8]` to `[batch, 8]`."""
        for block in self.blocks:
            x = x + block(x)
        attended, _ = self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)
        return x + attended[:, 0]


def new_model() -> NoisyModel:
    """The model with its first weights."""
    torch.manual_seed(0)
    return NoisyModel().double()


def batch(number: int, microbatches: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a target."""
    generator = torch.Generator().manual_seed(number)
    rows = 4 * microbatches if 16 % microbatches else 16
    x, target = torch.randn(2, rows, 8, generator=generator, dtype=torch.float64)
    return x, target


def loss_of(result: Any, target: Any) -> torch.Tensor:
    """The mean loss of a batch."""
    return torch.nn.functional.mse_loss(result, target)


def export_model(path: Path, stage_count: int) -> Bundle:
    """The model in some stages, in training mode."""
    x, _ = batch(0)
    return stagepack.export(
        new_model(),
        (x,),
        out=path,
        stages=stage_count,
        dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},),
    )


def reference_run(microbatches: int, replicas: int = 1) -> tuple[list[float], NoisyModel]:
    """The losses of some steps without an optimizer, and the model with the sum of their gradients, in one process."""
    model = new_model()
    losses = []
    for step in range(STEPS):
        part_count = microbatches * replicas
        x, target = batch(step, part_count)
        step_loss = 0.0
        for index, (part, part_target) in enumerate(zip(x.chunk(part_count), target.chunk(part_count), strict=True)):
            torch.manual_seed(SEED + step * part_count + index)
            loss = loss_of(model(part), part_target) / part_count
            loss.backward()
            step_loss += loss.item()
        losses.append(step_loss)
    return losses, model
