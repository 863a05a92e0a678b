"""What each process does whose training goes on from its last checkpoint: ``resumed_worker.py BUNDLE SCHEDULE FOLDER KILL_RANK``."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import stagepack
from tests.train.models import LEARNING_RATE, MAX_NORM, STEPS, batch, loss_of

KILL_STEP = 7
CHECKPOINT_STEPS = 3


def main() -> None:
    """Train with checkpoints; a process is killed by a signal in the first run."""
    bundle, schedule, folder, kill_rank = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    training = stagepack.train(bundle, loss_of, microbatches=4, schedule=schedule)
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE)
    checkpoints = sorted(path.parent for path in folder.glob("*/.metadata"))
    if checkpoints:
        state = training.state_dict(optimizer)
        load(state, checkpoint_id=checkpoints[-1])
        training.load_state_dict(state, optimizer)
    is_first_run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while training.steps < STEPS:
        number = training.steps
        args, target = batch(number)
        if number == KILL_STEP and training.rank == kill_rank and is_first_run:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = training.step(*args, target=target)
        if not training.rank:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{number} {loss.item()!r}\n")
        training.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if training.steps % CHECKPOINT_STEPS == 0:
            save(training.state_dict(optimizer), checkpoint_id=folder / str(training.steps))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
