"""What each process does that loses another one while training starts: ``lost_start_worker.py BUNDLE RANK MOMENT HAS_GROUP``.

The process of the rank ends, as if it were killed, when it comes to the moment: the first call of a function of `stagepack.train`.
"""

import os
import sys
import time
from typing import Any

import torch

import stagepack
from stagepack.errors import StageLostError, StagepackError
from stagepack_loaders.train import meeting, start
from tests.train.models import batch, loss_of

# Where the functions are looked up.
MOMENTS: dict[str, Any] = {
    "init_process_group": torch.distributed,
    "open_for_loading": start,
    "own_identity": meeting,
    "open_store": meeting,
    "check_identities": meeting,
    "ProcessGroup": meeting,
    "reachable_address": meeting,
    "_facts": meeting,
    "ProcessWatch": start,
    "prepare_placed": start,
    "finish_prepared": start,
    "Training": start,
    "step": None,
}


def main() -> None:
    """Start to train; print what the error says, or that there was none."""
    bundle, lost_rank, moment, has_group = sys.argv[1:]
    is_lost = os.environ["RANK"] == lost_rank
    if has_group == "True":
        torch.distributed.init_process_group("gloo")
        wait_for_others(is_lost)
    if is_lost and MOMENTS[moment] is not None:
        setattr(MOMENTS[moment], moment, end)
    try:
        training = stagepack.train(bundle, loss_of, microbatches=4, schedule="gpipe", silence_seconds=3.0)
        if is_lost:
            end()
        args, target = batch(0)
        while True:
            training.step(*args, target=target)
    except StageLostError as error:
        tell(f"LOST {error}")
    except StagepackError as error:
        tell(f"OTHER {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - what the test looks for
        tell(f"RAW {type(error).__name__}: {error}")
    time.sleep(30)  # a process that does not end must not keep the others from noticing


def wait_for_others(is_lost: bool) -> None:
    """Let the process that is lost go on when all others have a group: one that is lost before is an error of torch."""
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store.set(f"has a group/{rank}", "")
    if is_lost:
        store.wait([f"has a group/{other}" for other in range(size)])


def end(*_: object, **__: object) -> Any:
    """End without a word."""
    os._exit(1)


def tell(text: str) -> None:
    """Write a line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
