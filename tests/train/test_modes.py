"""Dropout and batch norm do what they do in one process, and a bundle in evaluation mode says so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, and not in its type hints

import stagepack
from stagepack.errors import EvaluationModeWarning
from tests.train.mode_models import export_model, loss_of, new_model, reference_run
from tests.train.processes import run_workers

pytestmark = pytest.mark.xdist_group("train")

TWO_PROCESSES = ("2:1f1b:4", "4:interleaved-zero-bubble:2")
MORE_RUNS = (
    *(f"2:{schedule}:{microbatches}" for schedule in ("gpipe", "1f1b") for microbatches in (2, 4)),
    "2:gpipe:1",
    "2:gpipe:8",
    "4:looped-bfs:4",
    "4:interleaved-1f1b:4",
    "4:zbv-zero-bubble:4",
)
FOUR_PROCESSES = ("4:gpipe:1", "4:gpipe:4", "4:1f1b:4")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in two and four stages."""
    path = tmp_path_factory.mktemp("modes")
    for stage_count in (2, 4):
        export_model(path / f"{stage_count}.stagepack", stage_count)
    return path


def check_runs(bundles: Path, folder: Path, process_count: int, runs: tuple[str, ...]) -> None:
    """Losses, gradients and running statistics are those of one process."""
    for bundle in bundles.glob("?.stagepack"):
        if folder != bundles:
            (folder / bundle.name).symlink_to(bundle)
    run_workers("tests.train.mode_worker", process_count, folder, *runs)
    for run in runs:
        losses, model = reference_run(int(run.split(":")[2]))
        parameters, weights = dict(model.named_parameters()), model.state_dict()
        seen = set()
        for rank in range(process_count):
            found = load_file(folder / f"{run}-{rank}.safetensors")
            torch.testing.assert_close(found.pop("losses").tolist(), losses, rtol=1e-12, atol=0)
            for name, gradient in found.items():
                expected = parameters[name].grad
                assert expected is not None
                # A bias before a batch norm has the gradient 0, and rounding of the size of other gradients.
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
            seen |= set(found)
        assert seen == set(parameters)
        saved = stagepack.load(folder / f"{run}.stagepack")
        for stage in saved.stages:
            for name, tensor in stage.state_dict().items():
                torch.testing.assert_close(tensor, weights[name], rtol=1e-12, atol=1e-15)


def test_dropout_and_batch_norm_are_those_of_one_process(bundles: Path) -> None:
    check_runs(bundles, bundles, 2, TWO_PROCESSES)


@pytest.mark.slow
@pytest.mark.parametrize(("process_count", "runs"), [(2, MORE_RUNS), (4, FOUR_PROCESSES)])
def test_each_schedule(bundles: Path, tmp_path: Path, process_count: int, runs: tuple[str, ...]) -> None:
    check_runs(bundles, tmp_path, process_count, runs)


def test_a_bundle_in_evaluation_mode_says_so(tmp_path: Path) -> None:
    bundle = stagepack.export(
        new_model().eval(), (torch.randn(4, 8, dtype=torch.float64),), out=tmp_path / "e.stagepack"
    )
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(
            EvaluationModeWarning, match=r"7 modules .* such as 'blocks.0.1', were exported in evaluation mode"
        ):
            stagepack.train(bundle, loss_of, microbatches=1, schedule="looped-bfs")
    finally:
        torch.distributed.destroy_process_group()
