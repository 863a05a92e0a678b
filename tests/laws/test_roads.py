"""Every road answers as the captured program does, at the example and at other sizes that the bundle allows."""

from pathlib import Path

import pytest
import torch

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_module
from tests.distributed.forked_processes import forked_launches
from tests.laws.roads import disagreements

ROWS = ({0: torch.export.Dim("rows", min=1, max=9)},)
INPUTS = Inputs(args=(torch.ones(3, 4),), dynamic_shapes=ROWS)


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)]
        self.layers = torch.nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class OtherWhenCaptured(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (0.5 if torch.compiler.is_exporting() else 0.0)


@pytest.mark.process
def test_all_roads_agree(tmp_path: Path) -> None:
    with forked_launches():
        assert list(disagreements(capture_module(Tower().eval(), INPUTS), tmp_path, processes=True)) == []


@pytest.mark.filterwarnings("ignore::stagepack.errors.ExportWarning")
def test_a_model_that_is_captured_otherwise_is_named_at_each_size(tmp_path: Path) -> None:
    lines = list(disagreements(capture_module(OtherWhenCaptured().eval(), INPUTS), tmp_path, processes=False))
    assert lines[0] == "the model itself, the example: differs from the captured program by 0.5"
    assert any("rows = 1" in line for line in lines)
    assert all("the model itself" in line for line in lines)
