"""What each process does: gradients of each run, then some steps and a saved bundle."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import stagepack
from tests.train.models import LEARNING_RATE, MAX_NORM, STEPS, batch, loss_of


def main() -> None:
    """Train the bundles of a folder: ``worker.py FOLDER STAGES:SCHEDULE:MICROBATCHES ...``."""
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for run in sys.argv[2:]:
        stage_count, schedule, microbatches = run.split(":")
        bundle = folder / f"{stage_count}.stagepack"
        training = stagepack.train(bundle, loss_of, microbatches=int(microbatches), schedule=schedule)
        losses = [training.step(*args, target=target) for args, target in map(batch, range(2))]
        gradients = {name: p.grad for name, p in training.named_parameters() if p.grad is not None}
        norm = training.clip_gradients(1e9)
        save_file(gradients | {"loss": torch.stack(losses).sum(), "norm": norm}, folder / f"{run}-{rank}.safetensors")
    training = stagepack.train(bundle, loss_of, microbatches=4, schedule=schedule)
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE)
    losses = []
    for number in range(STEPS):
        args, target = batch(number)
        losses.append(training.step(*args, target=target))
        training.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    save_file({"losses": torch.stack(losses)}, folder / f"losses-{rank}.safetensors")
    save_file(dict(training.own_weights()), folder / f"weights-{rank}.safetensors")
    assert stagepack.save(training, out=folder / "trained.stagepack").digest
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
