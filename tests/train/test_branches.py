"""Gradients, and which parameters have none, are those of one process in each schedule, also where the batch does not go first."""

from pathlib import Path

import pytest

from tests.train.branch_models import export_model, export_sequence_model
from tests.train.processes import run_workers

pytestmark = pytest.mark.xdist_group("train")

RUNS = (
    "2:gpipe:4:adamw",
    "2:1f1b:2:adamw",
    "4:looped-bfs:2:sgd",
    "4:interleaved-1f1b:4:adamw",
    "4:interleaved-zero-bubble:4:adamw",
    "4:zbv-zero-bubble:4:adamw",
)


def test_parameters_and_gradients_are_those_of_one_process_in_each_schedule(tmp_path: Path) -> None:
    export_model(tmp_path / "2.stagepack", ["upper"])
    export_model(tmp_path / "4.stagepack", ["early", "middle", "upper"])
    export_sequence_model(tmp_path / "sequences-2.stagepack", ["layers.2"])
    export_sequence_model(tmp_path / "sequences-4.stagepack", ["layers.1", "layers.2", "layers.3"])
    run_workers("tests.train.branch_worker", 2, tmp_path, *RUNS)
