"""Assertions that processes have the losses, gradients and running statistics of one process."""

from pathlib import Path

import torch
from safetensors.torch import load_file

import stagepack
from tests.train import mode_models, models


def check_gradients(folder: Path, run: str, process_count: int) -> None:
    """Assert that processes have the gradients of the model with tied weights, skips and a frozen part."""
    total, gradients = models.reference_gradients(int(run.split(":")[2]))
    seen = set()
    for rank in range(process_count):
        found = load_file(folder / f"{run}-{rank}.safetensors")
        torch.testing.assert_close(found.pop("loss"), total, rtol=1e-12, atol=0)
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        torch.testing.assert_close(found.pop("norm"), norm, rtol=1e-12, atol=0)
        for name, gradient in found.items():
            seen.add(name)
            scale = gradients[name].abs().max().item()
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12 * scale)
    assert seen == set(gradients)


def check_modes(folder: Path, run: str, process_count: int) -> None:
    """Assert that processes have the gradients and running statistics of the model with dropout and batch norms."""
    losses, model = mode_models.reference_run(int(run.split(":")[2]))
    parameters, weights = dict(model.named_parameters()), model.state_dict()
    seen = set()
    for rank in range(process_count):
        found = load_file(folder / f"{run}-{rank}.safetensors")
        torch.testing.assert_close(found.pop("losses").tolist(), losses, rtol=1e-12, atol=0)
        for name, gradient in found.items():
            expected = parameters[name].grad
            assert expected is not None
            # A bias before a batch norm has the gradient 0, and rounding of the size of other gradients.
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
        seen |= set(found)
    assert seen == set(parameters)
    saved = stagepack.load(folder / f"{run}.stagepack")
    for stage in saved.stages:
        for name, tensor in stage.state_dict().items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-12, atol=1e-15)
