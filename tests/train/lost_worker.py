"""What each process does whose training loses another one: ``lost_worker.py BUNDLE PAUSE``."""

import os
import sys
import time

import torch

import stagepack
from stagepack.errors import StageLostError
from tests.train.models import batch, loss_of


def tell(text: str) -> None:
    """Write a line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Step until another process is lost; print when, and what the error says."""
    torch.distributed.init_process_group("gloo")
    training = stagepack.train(sys.argv[1], loss_of, microbatches=4, schedule="1f1b", silence_seconds=3.0)
    args, target = batch(0)
    try:
        while True:
            training.step(*args, target=target)
            tell("stepped")
            time.sleep(float(sys.argv[2]))
    except StageLostError as error:
        tell(f"LOST {error}")
    if os.environ["RANK"] != "0":
        time.sleep(30)  # a process that does not end must not keep the others from noticing


if __name__ == "__main__":
    main()
