"""Training in several processes: gradients, steps and the saved bundle are those of one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import stagepack
from tests.train.models import STEPS, batch, export_model, reference_gradients, trained_reference
from tests.train.processes import run_workers

pytestmark = pytest.mark.xdist_group("train")

TWO_PROCESSES = (
    "2:gpipe:1",
    "2:gpipe:8",
    "2:1f1b:4",
    "4:looped-bfs:4",
    "4:interleaved-zero-bubble:4",
    "4:zbv-zero-bubble:8",
    "4:interleaved-1f1b:2",
)
FOUR_PROCESSES = ("4:gpipe:2", "4:1f1b:4", "4:1f1b:8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have written."""
    path = tmp_path_factory.mktemp("train")
    for stage_count in (2, 4):
        export_model(path / f"{stage_count}.stagepack", stage_count)
    run_workers("tests.train.worker", 2, path, *TWO_PROCESSES)
    return path


def assert_gradients(folder: Path, run: str, process_count: int) -> None:
    total, gradients = reference_gradients()
    seen = set()
    for rank in range(process_count):
        found = load_file(folder / f"{run}-{rank}.safetensors")
        torch.testing.assert_close(found.pop("loss"), total, rtol=1e-12, atol=0)
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        torch.testing.assert_close(found.pop("norm"), norm, rtol=1e-12, atol=0)
        for name, gradient in found.items():
            seen.add(name)
            scale = gradients[name].abs().max().item()
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12 * scale)
    assert seen == set(gradients)


@pytest.mark.parametrize("run", TWO_PROCESSES)
def test_gradients_are_those_of_one_process(folder: Path, run: str) -> None:
    assert_gradients(folder, run, 2)


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


@pytest.mark.slow
def test_gradients_in_four_processes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "4.stagepack").symlink_to(folder / "4.stagepack")
    run_workers("tests.train.worker", 4, tmp_path, *FOUR_PROCESSES)
    for run in FOUR_PROCESSES:
        assert_gradients(tmp_path, run, 4)
