"""Warnings of the export: training mode by mistake, operators that loaders do not run by default."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import ExportWarning, OperatorError
from tests.modules import module_of


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))


def test_dropout_and_batch_norm_in_training_mode_warn(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    says = r"drops values at random \(1\) and updates .*2.running_mean.*model.eval\(\)"
    with pytest.warns(ExportWarning, match=says) as warned:
        stagepack.export(model(), (x,), out=tmp_path / "training.stagepack")
    assert {warning.filename for warning in warned} == {__file__}
    stagepack.export(model().eval(), (x,), out=tmp_path / "evaluation.stagepack")


def test_training_mode_without_effect_does_not_warn(tmp_path: Path) -> None:
    stagepack.export(torch.nn.Linear(4, 4).train(), (torch.ones(2, 4),), out=tmp_path / "m.stagepack")


def test_operators_that_loaders_do_not_run_by_default_are_named(tmp_path: Path) -> None:
    model = module_of(lambda self, x: torch.ops.aten.threshold_backward.default(x + 1, x, 0.5))
    allowed = r"allow_ops=\['aten\.threshold_backward'\]"
    with pytest.warns(ExportWarning, match=rf"uses aten\.threshold_backward, .* {allowed}"):
        bundle = stagepack.export(model, (torch.ones(3, 1),), out=tmp_path / "m.stagepack")
    says = rf"aten\.threshold_backward\.default .*{allowed}.*\[G11\]|\[G11\].*allow_ops"
    with pytest.raises(OperatorError, match=says):
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


def test_namespaces_of_custom_operators_are_named(tmp_path: Path) -> None:
    def doubles(_: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.warned.twice(x)

    x = torch.ones(2)
    with pytest.warns(ExportWarning, match=r"doubles uses warned, .* allow_ops=\['warned'\]"):
        bundle = stagepack.export(module_of(doubles), (x,), out=tmp_path / "m.stagepack")
    assert torch.equal(stagepack.load(bundle, allow_ops=["warned"])(x), x * 2)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: tuple[float, ...] = (0.0,)) -> torch.Tensor:
        return x * scale + shift[0]


def test_constants_that_are_not_the_defaults_of_the_model_are_named(tmp_path: Path) -> None:
    x = torch.ones(2)
    with pytest.warns(ExportWarning, match=r"scale, whose default is 1.0, shift, whose default is \(0.0,\)"):
        stagepack.export(Scaled(), (x, 3.0), {"shift": (1.0,)}, out=tmp_path / "others.stagepack")
    stagepack.export(Scaled(), (x, 1.0), {"shift": (0.0,)}, out=tmp_path / "defaults.stagepack")
