"""Dropout and batch norm do what they do in one process, and a bundle in evaluation mode says so."""

from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, and not in its type hints

import stagepack
from stagepack.errors import EvaluationModeWarning, MicrobatchWarning
from tests.train.gradient_checks import check_modes
from tests.train.mode_models import batch, export_model, loss_of, new_model
from tests.train.processes import run_workers

pytestmark = pytest.mark.xdist_group("train")

RUNS = ("2:1f1b:4", "4:interleaved-zero-bubble:2")


def test_dropout_and_batch_norm_are_those_of_one_process(tmp_path: Path) -> None:
    for stage_count in (2, 4):
        export_model(tmp_path / f"{stage_count}.stagepack", stage_count)
    run_workers("tests.train.mode_worker", 2, tmp_path, *RUNS)
    for run in RUNS:
        check_modes(tmp_path, run, 2)


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


def test_trained_weights_go_into_the_graphs_of_the_evaluation_mode(tmp_path: Path) -> None:
    (x, target), model = batch(0), new_model()
    export_model(tmp_path / "training.stagepack", 2)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    stagepack.export(model.eval(), (x,), out=tmp_path / "evaluation.stagepack", dynamic_shapes=shapes)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(MicrobatchWarning, match="computes its statistics from all rows"):
            training = stagepack.train(tmp_path / "training.stagepack", loss_of, microbatches=2, schedule="looped-bfs")
        training.step(x, target=target)
        with torch.no_grad():
            for parameter in training.parameters():
                parameter.mul_(0.5)
        stagepack.save(training, out=tmp_path / "trained.stagepack")
        weights = dict(training.own_weights())
    finally:
        torch.distributed.destroy_process_group()
    served = stagepack.export(
        tmp_path / "trained.stagepack", graph_from=tmp_path / "evaluation.stagepack", out=tmp_path / "served.stagepack"
    )
    model.load_state_dict(weights)
    with torch.no_grad():
        assert torch.equal(stagepack.load(served)(x), model(x))
