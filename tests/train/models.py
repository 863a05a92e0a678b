"""Models for training, their losses and batches, and what one process gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.utils import _pytree as pytree

import stagepack
from stagepack.format.reader import Bundle
from stagepack_train.training import Training

NEEDS_TORCH = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason=f"stagepack.train needs torch 2.13, found {torch.__version__}"
)
LEARNING_RATE = 0.05
STEPS = 10
MAX_NORM = 0.5
SEED = 7
# The number of steps without an optimizer.
GRADIENT_STEPS = 2
LAYERS = 16
# Arguments of a model and the target.
Call = tuple[tuple[torch.Tensor, ...], Any]


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with its loss, its batches by number and number of microbatches, and the dimensions that change."""

    build: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    batch: Callable[[int, int], Call]
    shapes: Callable[[], Any]
    draws: bool = False

    def new(self) -> Any:
        """The model with its first weights."""
        torch.manual_seed(0)
        return self.build().double()

    def export(self, path: Path, **options: Any) -> Bundle:
        """The model, cut as the options say."""
        args, _ = self.batch(0, 8)
        return stagepack.export(self.new(), args, out=path, dynamic_shapes=self.shapes(), **options)

    def reference(self, microbatches: int, replicas: int = 1) -> tuple[list[float], torch.nn.Module]:
        """The losses of some steps without an optimizer, and the model with the sum of their gradients, in one process."""
        model, losses = self.new(), []
        part_count = microbatches * replicas if self.draws else 1
        for step in range(GRADIENT_STEPS):
            losses.append(0.0)
            for index, (args, target) in enumerate(cut(self.batch(step, microbatches * replicas), part_count)):
                torch.manual_seed(SEED + step * part_count + index)
                loss = self.loss(model(*args), target) / part_count
                loss.backward()
                losses[-1] += loss.item()
        return losses, model

    def trained_reference(self) -> tuple[list[float], torch.nn.Module]:
        """Losses of some steps in one process, and the trained model."""
        model = self.new()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = []
        for number in range(STEPS):
            args, target = self.batch(number, 8)
            loss = self.loss(model(*args), target)
            loss.backward()
            losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return losses, model


def cut(call: Call, count: int) -> Sequence[Call]:
    """The parts of a batch; tensors of one dimension are the same for each."""
    leaves, spec = pytree.tree_flatten(call)
    columns = [leaf.chunk(count) if leaf.dim() > 1 else [leaf] * count for leaf in leaves]
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*columns, strict=True)]


def assert_step(
    training: Training,
    model: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    call: Call,
    loss_tolerance: tuple[float, float],
    gradient_tolerance: tuple[float, float],
) -> None:
    """Assert that a step gives the loss and the gradients of one process, and none where that has none. Tolerances: rtol, atol."""
    args, target = call
    expected_loss = loss(model(*args), target)
    expected_loss.backward()
    found_loss = training.step(*args, target=target)
    rtol, atol = loss_tolerance
    torch.testing.assert_close(found_loss, expected_loss.detach().double(), rtol=rtol, atol=atol)
    assert_gradients(training, model, gradient_tolerance)


def assert_gradients(training: Training, model: torch.nn.Module, tolerance: tuple[float, float]) -> None:
    """Assert that parameters have the gradients of one process, and none where that has none."""
    parameters, (rtol, atol) = dict(model.named_parameters()), tolerance
    if torch.distributed.get_world_size() == 1:
        assert {name for name, _ in training.named_parameters()} == set(parameters)
    for name, parameter in training.named_parameters():
        expected = parameters[name].grad
        assert (parameter.grad is None) == (expected is None), f"step {training.steps}: {name}"
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=rtol, atol=atol, msg=name)


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


def tied_loss(result: Any, target: Any) -> torch.Tensor:
    logits = result["logits"].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, target["labels"].flatten()) + result["mean"].square().mean()


def tied_batch(number: int, microbatches: int = 8) -> Call:
    """Sizes change from batch to batch."""
    generator = torch.Generator().manual_seed(number)
    rows, length = (microbatches, 5) if number % 2 else (2 * microbatches, 7)
    ids = torch.randint(0, 50, (rows, length), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) > 0.3).double()
    labels = torch.randint(0, 50, (rows, length), generator=generator)
    return (ids, mask, torch.tensor([0.5], dtype=torch.float64)), {"labels": labels}


def tied_shapes() -> Any:
    rows, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seq", min=2, max=64)
    return {0: rows, 1: length}, {0: rows, 1: length}, None


class NoisyModel(torch.nn.Module):
    """Dropout in the first, third and fourth quarter, batch norms in all, and an attention that drops; in training mode."""

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


def mean_square(result: Any, target: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(result, target)


def noisy_batch(number: int, microbatches: int = 4) -> Call:
    generator = torch.Generator().manual_seed(number)
    rows = 4 * microbatches if 16 % microbatches else 16
    x, target = torch.randn(2, rows, 8, generator=generator, dtype=torch.float64)
    return (x,), target


class Branches(torch.nn.Module):
    """Results of each quarter of the model; one of them is detached, and the derivative of another one is infinite.

    No gradient leads from some results to the first parameters.
    """

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


# Each uses some results; the target of a batch names one.
BRANCH_LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "main": lambda results: results["main"].square().mean(),
    "probe": lambda results: results["probe"].square().mean(),
    "early": lambda results: results["early"].square().mean(),
    "early-and-probe": lambda results: results["early"].square().mean() + results["probe"].mean(),
    "main-detached": lambda results: results["main"].detach().mean() + results["early"].square().mean(),
    "all-but-root": lambda results: sum(results[name].square().mean() for name in ("early", "probe", "main")),
}


def branch_batch(number: int, _: int) -> Call:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (x,), list(BRANCH_LOSSES)[number]


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


def sequence_batch(*_: int) -> Call:
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


def sequence_shapes() -> Any:
    time, rows = torch.export.Dim("time", min=1, max=64), torch.export.Dim("batch", min=1, max=64)
    return {0: time, 1: rows}, {0: rows, 1: time}


def batch_shapes() -> Any:
    return ({0: torch.export.Dim("batch", min=2, max=64)},)


TIED = TrainedModel(build=TiedLanguageModel, loss=tied_loss, batch=tied_batch, shapes=tied_shapes)
NOISY = TrainedModel(build=NoisyModel, loss=mean_square, batch=noisy_batch, shapes=batch_shapes, draws=True)
BRANCHES = TrainedModel(
    build=Branches,
    loss=lambda results, target: BRANCH_LOSSES[target](results),
    batch=branch_batch,
    shapes=lambda: ({0: torch.export.Dim("batch", min=1, max=64)},),
)
SEQUENCES = TrainedModel(build=Sequences, loss=label_loss, batch=sequence_batch, shapes=sequence_shapes)
MODELS = {"tied": TIED, "noisy": NOISY, "branches": BRANCHES, "sequences": SEQUENCES}


class Layer(torch.nn.Module):
    """A layer whose output is of the dtype of its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, width]` to `[batch, width]`."""
        return x + self.dropout(self.second(torch.nn.functional.gelu(self.first(self.norm(x))))).to(x.dtype)


class LayerModel(torch.nn.Module):
    """Equal layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(width, dropout) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, width]` to `[batch, width]`."""
        for layer in self.layers:
            x = layer(x)
        return x


def export_layers(path: Path, *, width: int, dtype: torch.dtype = torch.float64, dropout: float = 0.3) -> None:
    """Export `LayerModel` in two stages."""
    model = LayerModel(width, dropout).to(dtype)
    shapes = ({0: torch.export.Dim("batch", min=2, max=2**20)},)
    stagepack.export(model, (torch.randn(4, width, dtype=dtype),), out=path, stages=2, dynamic_shapes=shapes)
