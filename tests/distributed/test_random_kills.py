"""Processes killed at random moments: each call is answered rightly or fails with the stage that is lost, and all work again."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.distributed import DistributedPipeline
from stagepack.errors import StageLostError
from stagepack.format.reader import Bundle
from tests.distributed.bundles import assert_gone, has_restarts, in_processes, process_ids
from tests.waiting import wait_until

_LOST_SECONDS = 5.0
_REQUESTS = 16
_LONGEST_DELAY = 0.03  # seconds; about as long as the requests take


class Kills:
    """Kills processes of a pipeline at moments that a seed determines."""

    def __init__(self, bundle: Bundle, seed: int) -> None:
        one = stagepack.load(bundle)
        self._moments = random.Random(seed)  # noqa: S311 - the same moments in each run
        self._calls = [torch.arange(1 + number) % 10 for number in range(_REQUESTS)]
        with torch.no_grad():
            self._expected = [one(ids) for ids in self._calls]

    def run_round(self, pipeline: DistributedPipeline) -> str:
        """Kill a process before, during or after calls, and wait until the pipeline answers again. Returns what was done."""
        restart_count = pipeline.restart_count
        moment = self._moments.choice(["before", "during", "after"])
        rank, delay = self._moments.choice([1, 2, 3]), self._moments.random() * _LONGEST_DELAY
        kill = partial(os.kill, process_ids(pipeline)[rank], signal.SIGKILL)
        if moment == "during":
            timer = threading.Timer(delay, kill)
            timer.start()
            answers = self._submit(pipeline)
            timer.join()
        elif moment == "before":
            kill()
            answers = self._submit(pipeline)
        else:
            answers = self._submit(pipeline)
            assert self._count_lost(answers, rank) == 0
            kill()
        kill_time = time.monotonic()
        lost_count = self._count_lost(answers, rank)
        while pipeline.restart_count == restart_count and pipeline.lost is None:
            assert time.monotonic() - kill_time < _LOST_SECONDS
            time.sleep(0.005)
        assert time.monotonic() - kill_time < _LOST_SECONDS
        wait_until(partial(has_restarts, pipeline, restart_count + 1))
        assert self._count_lost(self._submit(pipeline), rank) == 0
        return f"{moment}: process {rank}, {1000 * delay:.0f} ms, {lost_count} of {len(answers)} calls lost"

    def _submit(self, pipeline: DistributedPipeline) -> list["Future[torch.Tensor]"]:
        answers = []
        for ids in self._calls:
            try:
                answers.append(pipeline.submit(ids))
            except StageLostError as error:
                answers.append(Future())
                answers[-1].set_exception(error)
        return answers

    def _count_lost(self, answers: list["Future[torch.Tensor]"], rank: int) -> int:
        """How many calls were lost with a process. The others must have the answers of one process."""
        lost_count = 0
        for answer, expected in zip(answers, self._expected, strict=False):
            error = answer.exception(timeout=_LOST_SECONDS)
            if error is None:
                assert torch.equal(answer.result(), expected)
            else:
                assert isinstance(error, StageLostError), error
                assert (error.stages, error.exit_status) == ((rank - 1,), -signal.SIGKILL)
                lost_count += 1
        return lost_count


@pytest.mark.parametrize(("seed", "rounds"), [(0, 5), pytest.param(1, 50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_started_again(seed: int, rounds: int, layers: Bundle) -> None:
    kills = Kills(layers, seed)
    with in_processes(layers, max_restarts=rounds) as pipeline:
        for _ in range(rounds):
            print(f"seed {seed}, {kills.run_round(pipeline)}")  # noqa: T201 - shown if the test fails
        numbers = process_ids(pipeline)
        os.kill(numbers[1], signal.SIGKILL)
        wait_until(lambda: pipeline.has_ended)
        with pytest.raises(StageLostError):
            pipeline(torch.arange(3))
    assert_gone(numbers)


@pytest.mark.slow
def test_no_process_outlives_the_one_that_has_started_it(layers: Bundle, tmp_path: Path) -> None:
    bundle = shutil.copytree(layers.path, tmp_path / "copy.stagepack")  # a path that no other test uses
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, stagepack\n"
        "with stagepack.load(sys.argv[1], processes=True) as pipeline:\n"
        "    while True:\n"
        "        pipeline(torch.arange(4))\n"
    )
    moments = random.Random(0)  # noqa: S311 - the same moments in each run
    for _ in range(8):
        process = subprocess.Popen([sys.executable, str(script), str(bundle)], start_new_session=True)
        time.sleep(8 * moments.random())  # loading takes about half of this
        signal_number = moments.choice([signal.SIGKILL, signal.SIGTERM])
        process.send_signal(signal_number)
        assert process.wait(timeout=_LOST_SECONDS) == -signal_number
        wait_until(lambda: not processes_with_argument(str(bundle)), 10.0)


def processes_with_argument(text: str) -> list[int]:
    """The processes in whose command lines a text occurs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found
