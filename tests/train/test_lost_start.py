"""A process that is lost while training starts is named by all others, as at any later moment."""

import itertools
import socket
from pathlib import Path

import pytest

from tests.train.lost_start_worker import MOMENTS
from tests.train.models import export_model
from tests.train.processes import start_workers

pytestmark = pytest.mark.xdist_group("train")

PROCESSES = 3
# Before that, nothing says that a process will ever come.
OWN_GROUP = [moment for moment in MOMENTS if moment != "open_for_loading"]
GIVEN_GROUP = [moment for moment in MOMENTS if moment != "init_process_group"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in three stages."""
    path = tmp_path_factory.mktemp("lost") / "m.stagepack"
    export_model(path, PROCESSES)
    return path


def check_loss(bundle: Path, moment: str, lost_rank: int, *, has_group: bool) -> None:
    workers = start_workers("tests.train.lost_start_worker", PROCESSES, bundle, lost_rank, moment, has_group)
    try:
        for rank, worker in enumerate(workers):
            if rank != lost_rank:
                line = worker.wait_for_line("LOST", "OTHER", "RAW", "stagepack:", seconds=60)
                named = f"process {lost_rank} on {socket.gethostname()}, which runs stage {lost_rank}, is lost"
                # The machine of process 0 has a name since the launcher says it, before the process itself does.
                assert named in line.replace("127.0.0.1", socket.gethostname()), line
    finally:
        for worker in workers:
            worker.end()


@pytest.mark.parametrize(
    ("moment", "lost_rank", "has_group"),
    [
        ("open_for_loading", 0, True),
        ("init_process_group", 1, False),
        ("check_identities", 0, True),
        ("ProcessGroup", 2, True),
        ("prepare_placed", 1, False),
    ],
)
def test_the_process_is_named(bundle: Path, moment: str, lost_rank: int, has_group: bool) -> None:
    check_loss(bundle, moment, lost_rank, has_group=has_group)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_group", "moment"), [*itertools.product([False], OWN_GROUP), *itertools.product([True], GIVEN_GROUP)]
)
@pytest.mark.parametrize("lost_rank", range(PROCESSES))
def test_each_process_at_each_moment(bundle: Path, moment: str, lost_rank: int, has_group: bool) -> None:
    check_loss(bundle, moment, lost_rank, has_group=has_group)
