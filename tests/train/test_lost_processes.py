"""A process that is killed, stopped or fails is named by all others, which do not wait for it."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.train.models import export_model
from tests.train.processes import Worker, start_workers

pytestmark = pytest.mark.xdist_group("train")

_LIMIT_SECONDS = 10.0


@contextmanager
def running(bundle: Path, process_count: int, pause: float) -> Iterator[list[Worker]]:
    """Processes that train, each after its first steps."""
    workers = start_workers("tests.train.lost_worker", process_count, bundle, pause)
    try:
        for worker in workers:
            worker.wait_for_line("stepped")
        yield workers
    finally:
        for worker in workers:
            worker.end()


def check_loss(bundle: Path, process_count: int, lost_rank: int, signal_number: int, pause: float) -> None:
    with running(bundle, process_count, pause) as workers:
        workers[lost_rank].send_signal(signal_number)
        start = time.monotonic()
        for rank, worker in enumerate(workers):
            if rank != lost_rank:
                line = worker.wait_for_line("LOST", "stagepack:")
                assert f"process {lost_rank} on {socket.gethostname()}, which runs stage {lost_rank}, is lost" in line
                assert time.monotonic() - start < _LIMIT_SECONDS
        if signal_number == signal.SIGSTOP:
            workers[lost_rank].send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in two and four stages."""
    path = tmp_path_factory.mktemp("lost")
    for stage_count in (2, 4):
        export_model(path / f"{stage_count}.stagepack", stage_count)
    return path


def test_a_killed_process(bundles: Path) -> None:
    check_loss(bundles / "2.stagepack", 2, 1, signal.SIGKILL, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["in a step", "between steps"])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost_rank", range(4))
def test_each_of_four_processes(bundles: Path, lost_rank: int, signal_number: int, pause: float) -> None:
    check_loss(bundles / "4.stagepack", 4, lost_rank, signal_number, pause)
