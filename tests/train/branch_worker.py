"""What each process does: steps of two models, beside the same steps in one process: ``branch_worker.py FOLDER RUN ...``.

A run is ``STAGES:SCHEDULE:MICROBATCHES:OPTIMIZER``.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import OptionError
from stagepack_loaders.train.training import Training
from tests.train.branch_models import (
    LOSSES,
    Branches,
    batch,
    label_loss,
    loss_of,
    new_model,
    new_sequence_model,
    sequence_batch,
)

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
}


def main() -> None:
    """Train the bundles of a folder."""
    torch.distributed.init_process_group("gloo")
    for run in sys.argv[2:]:
        stage_count, schedule, microbatches, optimizer = run.split(":")
        training = stagepack.train(
            Path(sys.argv[1]) / f"{stage_count}.stagepack",
            loss_of,
            microbatches=int(microbatches),
            schedule=schedule,
        )
        try:
            compare_steps(training, new_model(), optimizer)
        except AssertionError as error:
            raise AssertionError(f"{run}: {error}") from error
        training.close()
        compare_sequences(Path(sys.argv[1]) / f"sequences-{stage_count}.stagepack", schedule, int(microbatches))
    torch.distributed.destroy_process_group()


def compare_steps(training: Training, model: Branches, optimizer_name: str) -> None:
    """Assert that each loss gives the gradients of one process, none where that has none, and the same weights afterwards."""
    optimizers = [OPTIMIZERS[optimizer_name](list(owner.parameters())) for owner in (training, model)]
    for number, name in enumerate(LOSSES):
        x = batch(number)
        found = training.step(x, target=name)
        expected = loss_of(model(x), name)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
        compare_parameters(training, model, name)
        for optimizer in optimizers:
            optimizer.step()
        compare_parameters(training, model, name)
        if number % 2:  # else gradients are added to
            for optimizer in optimizers:
                optimizer.zero_grad()


def compare_sequences(path: Path, schedule: str, microbatches: int) -> None:
    """Assert that a batch that does not go first gives the gradients of one process, and that all processes refuse a mean of means."""
    model, (args, target) = new_sequence_model(), sequence_batch()
    training = stagepack.train(path, label_loss, microbatches=microbatches, schedule=schedule, loss_reduction="sum")
    found = training.step(*args, target=target)
    expected = label_loss(model(*args), target)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    compare_parameters(training, model, schedule)
    training.close()
    training = stagepack.train(path, mean_label_loss, microbatches=microbatches, schedule=schedule)
    with pytest.raises(OptionError, match="the loss of a batch is not the mean of those of its microbatches"):
        training.step(*args, target=target)
    training.close()


def mean_label_loss(logits: Any, target: Any) -> torch.Tensor:
    """The mean loss of the labels of a microbatch."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target["labels"].flatten())


def compare_parameters(training: Training, model: torch.nn.Module, name: str) -> None:
    """Assert that parameters and their gradients are those of one process."""
    expected_parameters = dict(model.named_parameters())
    for parameter_name, parameter in training.named_parameters():
        expected = expected_parameters[parameter_name]
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
        states = [gradient is None for gradient in (parameter.grad, expected.grad)]
        assert states[0] == states[1], f"{name}: {parameter_name}: no gradient: {states}"
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-14)


if __name__ == "__main__":
    main()
