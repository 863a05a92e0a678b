"""`stagepack doctor --differential`: every road answers as the captured program does, or the disagreement is named."""

import json
from pathlib import Path

import pytest

from tests.hostile.attack import run

MODELS = """
import torch

ROWS = ({0: torch.export.Dim("rows", min=1, max=9)},)


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        return self.layers(x)


class OtherWhenCaptured(Tower):
    def forward(self, x):
        return super().forward(x) + (0.5 if torch.compiler.is_exporting() else 0.0)


def tower():
    return Tower().eval(), dict(args=(torch.ones(3, 4),), dynamic_shapes=ROWS)


def other():
    return OtherWhenCaptured().eval(), dict(args=(torch.ones(3, 4),), dynamic_shapes=ROWS)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(
        MODELS.replace("dict(args=", "stagepack.Inputs(args=").replace(
            "import torch\n", "import torch\nimport stagepack\n", 1
        )
    )
    return path


def test_roads_that_agree_are_no_failure(source: Path) -> None:
    result = run("doctor", f"{source}:tower", "--differential", "--json")
    assert json.loads(result.stdout)["disagreements"] == []
    assert result.exit_code == 0


def test_a_model_that_is_captured_otherwise_is_named_at_each_size(source: Path) -> None:
    result = run("doctor", f"{source}:other", "--differential")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("disagrees: ")]
    assert lines[0] == "disagrees: the model itself, the example: differs from the captured program by 0.5"
    assert any("rows = 1" in line for line in lines)
    assert all("the model itself" in line for line in lines)
