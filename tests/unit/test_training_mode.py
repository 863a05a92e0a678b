"""A model that is exported in training mode by mistake is told."""

from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import ExportWarning


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))


def test_dropout_and_batch_norm_in_training_mode_warn(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    with pytest.warns(
        ExportWarning, match=r"drops values at random \(1\) and updates .*2.running_mean.*model.eval\(\)"
    ):
        stagepack.export(model(), (x,), out=tmp_path / "training.stagepack")
    stagepack.export(model().eval(), (x,), out=tmp_path / "evaluation.stagepack")


def test_training_mode_without_effect_does_not_warn(tmp_path: Path) -> None:
    stagepack.export(torch.nn.Linear(4, 4).train(), (torch.ones(2, 4),), out=tmp_path / "m.stagepack")
