"""Warnings of the export: training mode by mistake, operators that loaders do not run by default."""

from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import ExportWarning, OperatorError


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))


def test_dropout_and_batch_norm_in_training_mode_warn(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    with pytest.warns(
        ExportWarning, match=r"drops values at random \(1\) and updates .*2.running_mean.*model.eval\(\)"
    ) as warned:
        stagepack.export(model(), (x,), out=tmp_path / "training.stagepack")
    assert {warning.filename for warning in warned} == {__file__}
    stagepack.export(model().eval(), (x,), out=tmp_path / "evaluation.stagepack")


def test_training_mode_without_effect_does_not_warn(tmp_path: Path) -> None:
    stagepack.export(torch.nn.Linear(4, 4).train(), (torch.ones(2, 4),), out=tmp_path / "m.stagepack")


class WithUnlistedOperator(torch.nn.Module):
    """Calls an operator that no public function of torch calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward.default(x + 1, x, 0.5)


def test_operators_that_loaders_do_not_run_by_default_are_named(tmp_path: Path) -> None:
    with pytest.warns(
        ExportWarning, match=r"uses aten\.threshold_backward, .* allow_ops=\['aten\.threshold_backward'\]"
    ):
        bundle = stagepack.export(WithUnlistedOperator(), (torch.ones(3, 1),), out=tmp_path / "m.stagepack")
    with pytest.raises(
        OperatorError,
        match=r"aten\.threshold_backward\.default .*allow_ops=\['aten\.threshold_backward'\].*\[G11\]|\[G11\].*allow_ops",
    ):
        stagepack.load(bundle)
    for allow_ops in (["aten.threshold_backward"], ["aten.threshold_backward.default"]):
        assert torch.equal(stagepack.load(bundle, allow_ops=allow_ops)(torch.ones(3, 1)), torch.full((3, 1), 2.0))
    with pytest.raises(OperatorError):
        stagepack.load(bundle, allow_ops=["aten", "aten.threshold_backward.other"])


@torch.library.custom_op("warned::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class WithCustomOperator(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.warned.twice(x)


def test_namespaces_of_custom_operators_are_named(tmp_path: Path) -> None:
    x = torch.ones(2)
    with pytest.warns(ExportWarning, match=r"WithCustomOperator uses warned, .* allow_ops=\['warned'\]"):
        bundle = stagepack.export(WithCustomOperator(), (x,), out=tmp_path / "m.stagepack")
    assert torch.equal(stagepack.load(bundle, allow_ops=["warned"])(x), x * 2)
