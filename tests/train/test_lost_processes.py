"""A process that is killed, stopped or fails is an error in all others, which do not wait for it; it is named when they have met."""

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.train.models import TIED
from tests.train.processes import started_workers

pytestmark = pytest.mark.xdist_group("train")

_LIMIT_SECONDS = 10.0
# From that on, the processes have met, and name the one that is lost.
NAMED = ("ProcessWatch", "prepare_placed", "finish_prepared", "Training", "step")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in two, three and four stages."""
    path = tmp_path_factory.mktemp("lost")
    for stage_count in (2, 3, 4):
        TIED.export(path / f"{stage_count}.stagepack", stages=stage_count)
    return path


def text_of_loss(lost_rank: int) -> str:
    return f"process {lost_rank} on {socket.gethostname()}, which runs stage {lost_rank}, is lost"


def check_loss(
    folder: Path, process_count: int, lost_rank: int, signal_number: int, pause: float, telling_seconds: float = 0.0
) -> None:
    bundle = folder / f"{process_count}.stagepack"
    with started_workers(process_count, "lose", bundle, pause, telling_seconds) as workers:
        for worker in workers:
            worker.wait_for_line("stepped")
        workers[lost_rank].send_signal(signal_number)
        start = time.monotonic()
        for rank, worker in enumerate(workers):
            if rank != lost_rank:
                assert text_of_loss(lost_rank) in worker.wait_for_line("LOST", "stagepack:")
                assert time.monotonic() - start < _LIMIT_SECONDS
        if signal_number == signal.SIGSTOP:
            workers[lost_rank].send_signal(signal.SIGCONT)


def check_loss_at_start(folder: Path, moment: str, lost_rank: int, *, has_group: bool) -> None:
    with started_workers(3, "lose-start", folder / "3.stagepack", lost_rank, moment, has_group) as workers:
        for rank, worker in enumerate(workers):
            if rank != lost_rank:
                line = worker.wait_for_line("LOST", "OTHER", "RAW", "stagepack:", seconds=200)
                if moment in NAMED:
                    assert text_of_loss(lost_rank) in line
                else:
                    assert line.startswith(("LOST", "OTHER GroupError")), line


def test_a_killed_process(bundles: Path) -> None:
    check_loss(bundles, 2, 1, signal.SIGKILL, 0.0)


def test_process_that_ends_for_a_lost_one_is_not_named_in_its_place(bundles: Path) -> None:
    check_loss(bundles, 3, 1, signal.SIGKILL, 0.0, telling_seconds=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["in a step", "between steps"])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost_rank", range(4))
def test_each_of_four_processes(bundles: Path, lost_rank: int, signal_number: int, pause: float) -> None:
    check_loss(bundles, 4, lost_rank, signal_number, pause)


@pytest.mark.parametrize(
    ("moment", "lost_rank", "has_group"),
    [
        ("own_identity", 1, True),
        ("prepare_placed", 1, False),
        # Gloo waits a minute for a process that has ended, and a store for two.
        *(
            pytest.param(moment, lost_rank, has_group, marks=pytest.mark.slow)
            for moment, lost_rank, has_group in (
                ("open_for_loading", 0, True),
                ("own_identity", 2, False),
                ("check_identities", 0, True),
                ("ProcessGroup", 2, True),
                ("ProcessWatch", 1, False),
                ("finish_prepared", 2, True),
                ("Training", 0, False),
                ("step", 1, False),
            )
        ),
    ],
)
def test_a_process_that_is_lost_while_training_starts(
    bundles: Path, moment: str, lost_rank: int, has_group: bool
) -> None:
    check_loss_at_start(bundles, moment, lost_rank, has_group=has_group)
