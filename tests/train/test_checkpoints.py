"""A run that is killed goes on from its last checkpoint, also in another number of processes, to the same losses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.models import STEPS, export_model, trained_reference
from tests.train.resumed_worker import CHECKPOINT_STEPS, KILL_STEP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("train")]


def run_torchrun(process_count: int, *arguments: object) -> None:
    """Train under torchrun, which starts the processes again once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={process_count}", "-m", "tests.train.resumed_worker", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def steps_and_losses(folder: Path) -> tuple[list[int], list[float]]:
    lines = (folder / "losses.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines], [float(line.split()[1]) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes of which the second is killed."""
    path = tmp_path_factory.mktemp("checkpoints")
    for stage_count in (2, 4):
        export_model(path / f"{stage_count}.stagepack", stage_count)
    (path / "run").mkdir()
    run_torchrun(2, path / "2.stagepack", "1f1b", path / "run", 1)
    return path


def test_a_killed_run_goes_on(folder: Path) -> None:
    steps, losses = steps_and_losses(folder / "run")
    last_checkpoint = KILL_STEP // CHECKPOINT_STEPS * CHECKPOINT_STEPS
    assert steps == [*range(KILL_STEP), *range(last_checkpoint, STEPS)]
    expected, _ = trained_reference()
    torch.testing.assert_close(losses, [expected[step] for step in steps], rtol=1e-9, atol=0)
    assert losses[last_checkpoint:KILL_STEP] == losses[KILL_STEP : 2 * KILL_STEP - last_checkpoint]


@pytest.mark.parametrize(("process_count", "stage_count", "schedule"), [(1, 4, "looped-bfs"), (4, 4, "1f1b")])
def test_a_checkpoint_is_read_by_other_numbers_of_processes_and_stages(
    folder: Path, tmp_path: Path, process_count: int, stage_count: int, schedule: str
) -> None:
    shutil.copytree(folder / "run" / "3", tmp_path / "3")
    run_torchrun(process_count, folder / f"{stage_count}.stagepack", schedule, tmp_path, -1)
    steps, losses = steps_and_losses(tmp_path)
    assert steps == list(range(3, STEPS))
    torch.testing.assert_close(losses, trained_reference()[0][3:], rtol=1e-9, atol=0)
