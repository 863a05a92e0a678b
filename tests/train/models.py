"""Models for training, and their loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import stagepack
from stagepack.format.reader import Bundle

NEEDS_TORCH = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason=f"stagepack.train needs torch 2.13, found {torch.__version__}"
)
LEARNING_RATE = 0.05
STEPS = 10
MAX_NORM = 0.5


class TiedLanguageModel(torch.nn.Module):
    """An embedding that is the head too, a skip from the first layer to the head, a mask that every layer uses, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
            )
            for _ in range(6)
        )
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[2].requires_grad_(requires_grad=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits `[batch, seq, 50]` and a mean `[batch, seq]`."""
        hidden = self.embedding(ids)
        skip = self.layers[0](hidden).tanh()
        for layer in self.layers[1:]:
            hidden = hidden + layer(hidden) * mask[..., None] * scale
        return {"logits": self.head(hidden + skip), "mean": hidden.mean(-1)}


def loss_of(result: Any, target: Any) -> torch.Tensor:
    """The mean loss of a batch."""
    logits = result["logits"].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, target["labels"].flatten()) + result["mean"].square().mean()


def batch(number: int, microbatches: int = 8) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Arguments of the model and the target, of sizes that change from batch to batch."""
    generator = torch.Generator().manual_seed(number)
    rows, length = (microbatches, 5) if number % 2 else (2 * microbatches, 7)
    ids = torch.randint(0, 50, (rows, length), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) > 0.3).double()
    labels = torch.randint(0, 50, (rows, length), generator=generator)
    return (ids, mask, torch.tensor([0.5], dtype=torch.float64)), {"labels": labels}


def new_model() -> TiedLanguageModel:
    """The model with its first weights."""
    torch.manual_seed(0)
    return TiedLanguageModel().double()


def export_model(path: Path, stage_count: int) -> Bundle:
    """The model in some stages."""
    rows, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seq", min=2, max=64)
    shapes = ({0: rows, 1: length}, {0: rows, 1: length}, None)
    args, _ = batch(0)
    return stagepack.export(new_model(), args, out=path, stages=stage_count, dynamic_shapes=shapes)


def reference_gradients(microbatches: int = 8) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses of two batches and its gradients, in one process."""
    model = new_model()
    losses = [loss_of(model(*args), target) for args, target in (batch(number, microbatches) for number in range(2))]
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained_reference() -> tuple[list[float], TiedLanguageModel]:
    """Losses of some steps in one process, and the trained model."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for number in range(STEPS):
        args, target = batch(number)
        loss = loss_of(model(*args), target)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model
