"""Adapters in the modules of stages, in the place of frozen weights: trained, checkpointed, merged and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import OptionError
from stagepack_train.training import Training
from tests.train.models import LAYERS, LayerModel, export_layers, noisy_batch

pytestmark = [pytest.mark.xdist_group("train"), pytest.mark.usefixtures("one_process")]


class Adapter(torch.nn.Module):
    """A linear layer with a product of two small matrices beside it (LoRA, https://arxiv.org/abs/2106.09685)."""

    def __init__(self, base: Any, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows, columns = base.weight.shape
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(2, columns, generator=generator, dtype=torch.float64))
        self.up = torch.nn.Parameter(torch.randn(rows, 2, generator=generator, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, columns]` to `[batch, rows]`."""
        result: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return result

    def merged(self) -> Any:
        """The base with the product added to its weight."""
        with torch.no_grad():
            self.base.weight += self.up @ self.down
        return self.base


def add_adapters(layers: Any) -> None:
    """Replace the first linear of each layer."""
    for name, layer in layers.named_children():
        if name.isdecimal():
            layer.first = Adapter(layer.first, seed=int(name))


def adapted_training(bundle: Path) -> Training:
    training = stagepack.train(
        bundle, torch.nn.functional.mse_loss, microbatches=2, schedule="looped-bfs", modules=True
    )
    for parameter in training.parameters():
        parameter.requires_grad_(False)
    for stage in training.stages.values():
        add_adapters(stage.layers)
    return training


def test_adapters_are_trained_and_merged(tmp_path: Path) -> None:
    export_layers(tmp_path / "m.stagepack", width=8, dropout=0.0)
    training = adapted_training(tmp_path / "m.stagepack")
    model = LayerModel(8, 0.0).double().requires_grad_(requires_grad=False)
    add_adapters(model.layers)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * LAYERS
    optimizers = [
        torch.optim.AdamW([p for p in training.parameters() if p.requires_grad], lr=0.01),
        torch.optim.AdamW(trainable, lr=0.01),
    ]
    for step in range(3):
        (x,), target = noisy_batch(step)
        loss = training.step(x, target=target)
        expected = torch.nn.functional.mse_loss(model(x), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    checkpoint = training.state_dict(optimizers[0])
    assert "layers.0.first.up" in checkpoint["model"]
    assert "state.layers.0.first.up.exp_avg" in checkpoint["optimizer"]
    with pytest.raises(OptionError, match=r"found others, such as layers.0.first.base.bias: merge adapters"):
        stagepack.save(training, out=tmp_path / "trained.stagepack")
    for stage in training.stages.values():
        for layer in stage.get_submodule("layers").children():
            if isinstance(layer.first, Adapter):
                layer.first = layer.first.merged()
    saved = stagepack.load(stagepack.save(training, out=tmp_path / "trained.stagepack"))
    (x,), _ = noisy_batch(9)
    torch.testing.assert_close(saved(x), model(x), rtol=1e-9, atol=1e-12)


def test_parameters_that_were_frozen_at_the_export(tmp_path: Path) -> None:
    model = LayerModel(8, 0.0).double().requires_grad_(requires_grad=False)
    (x,), target = noisy_batch(0)
    stagepack.export(model, (x,), out=tmp_path / "m.stagepack", stages=2)
    training = adapted_training(tmp_path / "m.stagepack")
    training.step(torch.cat([x, x]), target=torch.cat([target, target]))
    assert all(p.grad is not None for p in training.parameters() if p.requires_grad)
    frozen = stagepack.train(
        tmp_path / "m.stagepack", torch.nn.functional.mse_loss, microbatches=1, schedule="looped-bfs"
    )
    next(frozen.parameters()).requires_grad_()
    with pytest.raises(OptionError, match="was frozen at the export, and gets no gradients"):
        frozen.step(x, target=target)
