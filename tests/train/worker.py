"""What each process does: gradients of each run: ``worker.py FOLDER STAGES:SCHEDULE:MICROBATCHES ...``.

A run ``STAGES:SCHEDULE:MICROBATCHES:steps`` trains some steps, and saves the bundle; ``...:mistakes`` does what
users do by mistake.
"""

import contextlib
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stagepack
from stagepack.errors import GroupError, InputError, OptionError, WriteError
from stagepack_loaders.train.training import Training
from tests.train.models import LEARNING_RATE, MAX_NORM, STEPS, batch, loss_of


def main() -> None:
    """Train the bundles of a folder."""
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    for run in sys.argv[2:]:
        stage_count, schedule, microbatches, *options = run.split(":")
        training = stagepack.train(
            folder / f"{stage_count}.stagepack", loss_of, microbatches=int(microbatches), schedule=schedule
        )
        if options == ["steps"]:
            train_steps(training, folder)
        elif options == ["mistakes"]:
            give_different_batches(training)
            save_on_a_full_disk(training, folder)
            freeze_one_copy(training)
        else:
            write_gradients(training, folder / f"{run}-{training.rank}.safetensors", int(microbatches))
        training.close()
    torch.distributed.destroy_process_group()


def write_gradients(training: Training, path: Path, microbatches: int) -> None:
    """Write the sum of two losses, its gradients, and their norm."""
    batches = [batch(number, microbatches) for number in range(2)]
    losses = [training.step(*args, target=target) for args, target in batches]
    gradients = {name: p.grad for name, p in training.named_parameters() if p.grad is not None}
    norm = training.clip_gradients(1e9)
    save_file(gradients | {"loss": torch.stack(losses).sum(), "norm": norm}, path)


def train_steps(training: Training, folder: Path) -> None:
    """Train some steps, and write losses, weights and the bundle."""
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE)
    losses = []
    for number in range(STEPS):
        args, target = batch(number)
        losses.append(training.step(*args, target=target))
        training.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    save_file({"losses": torch.stack(losses)}, folder / f"losses-{training.rank}.safetensors")
    save_file(dict(training.own_weights()), folder / f"weights-{training.rank}.safetensors")
    assert stagepack.save(training, out=folder / "trained.stagepack").digest


def give_different_batches(training: Training) -> None:
    """Step as with samplers of different seeds: all but the process of the last stage say so."""
    (ids, *further_args), target = batch(0)
    message = "expected the same batch in all processes of a pipeline, found another one in process 0 than in process 1"
    with contextlib.nullcontext() if training.rank else pytest.raises(InputError, match=message):
        training.step(ids if training.rank else ids.flip(0), *further_args, target=target)


def save_on_a_full_disk(training: Training, folder: Path) -> None:
    """Save where one process cannot write: each says so, and nothing is left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if training.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    error_class, message = (
        (WriteError, "cannot be written") if training.rank else (GroupError, "process 1 could not save")
    )
    try:
        with pytest.raises(error_class, match=message):
            stagepack.save(training, out=folder / "full" / "m.stagepack")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    assert training.rank or not list((folder / "full").iterdir())


def freeze_one_copy(training: Training) -> None:
    """Freeze a shared parameter in one process, then in both."""
    args, target = batch(0)
    for frozen_rank, message in ((0, "embedding.weight (is frozen|requires gradients) in process"), (1, "")):
        if training.rank == frozen_rank:
            dict(training.named_parameters())["embedding.weight"].requires_grad_(False)
        with pytest.raises(OptionError, match=message) if message else contextlib.nullcontext():
            training.step(*args, target=target)


if __name__ == "__main__":
    main()
