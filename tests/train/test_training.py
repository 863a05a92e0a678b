"""Training in several processes: gradients, steps and the saved bundle are those of one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import stagepack
from tests.train.gradient_checks import check_gradients
from tests.train.models import STEPS, batch, export_model, trained_reference
from tests.train.processes import run_workers

pytestmark = pytest.mark.xdist_group("train")

# tests/train/test_schedules.py has all.
TWO_PROCESSES = ("2:gpipe:1", "2:1f1b:4", "4:looped-bfs:2", "4:interleaved-zero-bubble:4", "4:zbv-zero-bubble:8")
FURTHER_RUNS = ("4:interleaved-1f1b:4:steps", "2:gpipe:4:mistakes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have written."""
    path = tmp_path_factory.mktemp("train")
    (path / "full").mkdir()
    for stage_count in (2, 4):
        export_model(path / f"{stage_count}.stagepack", stage_count)
    run_workers("tests.train.worker", 2, path, *TWO_PROCESSES, *FURTHER_RUNS)
    return path


@pytest.mark.parametrize("run", TWO_PROCESSES)
def test_gradients_are_those_of_one_process(folder: Path, run: str) -> None:
    check_gradients(folder, run, 2)


def test_steps_and_the_saved_bundle_are_those_of_one_process(folder: Path) -> None:
    losses, model = trained_reference()
    for rank in range(2):
        torch.testing.assert_close(
            load_file(folder / f"losses-{rank}.safetensors")["losses"],
            torch.tensor(losses, dtype=torch.float64),
            rtol=1e-9,
            atol=0,
        )
    trained = stagepack.open(folder / "trained.stagepack")
    trained.verify()
    args, _ = batch(STEPS)
    with torch.no_grad():
        answer, expected = stagepack.load(trained)(*args), model(*args)
    torch.testing.assert_close(answer, expected, rtol=1e-9, atol=1e-12)
    weights = load_file(folder / "weights-0.safetensors") | load_file(folder / "weights-1.safetensors")
    assert set(weights) == set(dict(model.named_parameters()))
    loaded = stagepack.load(trained)
    for stage in loaded.stages:
        for name, tensor in stage.state_dict().items():
            assert name not in weights or torch.equal(tensor, weights[name])
    assert not list(folder.glob(".*"))
