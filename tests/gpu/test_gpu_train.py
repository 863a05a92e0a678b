"""Training with stages on a GPU: a plain loop, and `stagepack.train` in one process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from tests.gpu.answers import assert_close
from tests.train.models import NEEDS_TORCH, TIED

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("train")]

STEPS = 3
MICROBATCHES = 4


def batch_on(number: int, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), TIED.batch(number, MICROBATCHES))


def trained_losses(
    model: Any, device: torch.device, step: Callable[[Any, Any], torch.Tensor] | None = None
) -> list[float]:
    """The losses of some steps of what has these parameters, by `step`, or by calling it as a module."""

    def step_of_module(args: Any, target: Any) -> torch.Tensor:
        loss = TIED.loss(model(*args), target)
        loss.backward()
        return loss.detach()

    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(STEPS):
        losses.append(float((step or step_of_module)(*batch_on(number, device))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_loop_trains_a_loaded_pipeline(device: torch.device, tmp_path: Path) -> None:
    pipeline, model = stagepack.load(TIED.export(tmp_path / "m", stages=2), [str(device)]), TIED.new().to(device)
    assert trained_losses(pipeline, device) == pytest.approx(trained_losses(model, device), rel=1e-9)
    saved = stagepack.save(pipeline, out=tmp_path / "trained")
    args, _ = batch_on(STEPS, device)
    with torch.no_grad():
        assert_close(stagepack.load(saved, [str(device)])(*args), model(*args))
        assert_close(stagepack.load(saved)(*TIED.batch(STEPS, MICROBATCHES)[0]), model(*args))


@NEEDS_TORCH
def test_one_process_trains_all_stages(device: torch.device, tmp_path: Path) -> None:
    training = stagepack.train(
        TIED.export(tmp_path / "m", stages=2),
        TIED.loss,
        microbatches=MICROBATCHES,
        schedule="looped-bfs",
        device=device,
    )
    model = TIED.new().to(device)
    try:
        losses = trained_losses(training, device, lambda args, target: training.step(*args, target=target))
        saved = stagepack.save(training, out=tmp_path / "trained")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert losses == pytest.approx(trained_losses(model, device), rel=1e-6)
    args, _ = batch_on(STEPS, device)
    with torch.no_grad():
        assert_close(stagepack.load(saved, [str(device)])(*args), model(*args))


def test_gradients_flow_to_inputs_on_the_device(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).eval()
    pipeline = stagepack.load(stagepack.export(model, (torch.randn(2, 8),), out=tmp_path / "m", stages=2), str(device))
    on_device = copy.deepcopy(model).to(device)
    x = torch.randn(2, 8, device=device)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    pipeline(mine).square().sum().backward()
    on_device(theirs).square().sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)
