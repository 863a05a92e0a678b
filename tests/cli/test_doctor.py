"""`stagepack doctor` on models that can be captured or not."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.attack import run

MODELS = """
import torch
import stagepack


class Branches(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1


class Net(torch.nn.Module):
    def __init__(self, last):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.blocks = torch.nn.Sequential(torch.nn.Linear(3, 3), last)

    def forward(self, x):
        return self.blocks(self.first(x))


class OnlyTwoRows(torch.nn.Module):
    def forward(self, x):
        assert x.shape[0] == 2
        return x * 2


class Turned(torch.nn.Module):
    def forward(self, x):
        return x.t_() * 2


def turned():
    return Turned(), (torch.ones(2, 3),)


def inputs():
    rows = torch.export.Dim("rows", min=1, max=9)
    return stagepack.Inputs(args=(torch.ones(2, 3),), dynamic_shapes={"x": {0: rows}})


def whole():
    return Net(torch.nn.ReLU()), inputs()


def branches():
    return Net(Branches()), inputs()


def fixed():
    return Net(OnlyTwoRows()), inputs()


def broken():
    return Net(torch.nn.Linear(4, 4)), inputs()
"""


# draft_export of torch leaves its log open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _close_logs() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "models.py"
    path.write_text(MODELS)
    return path


def test_a_model_that_can_be_captured_needs_nothing(models: Path) -> None:
    done = run("doctor", f"{models}:whole", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 0
    expected = [("the model runs", None), ("torch.export.export", None), ("stagepack export", None)]
    assert [(attempt["way"], attempt["error"]) for attempt in facts["attempts"]] == expected
    assert facts["modules"] == []


def test_a_model_that_no_loader_accepts_is_not_fine(models: Path) -> None:
    done = run("doctor", f"{models}:turned", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1
    assert facts["attempts"][-1]["way"] == "stagepack export"
    assert "changes the shape or the strides of x" in facts["attempts"][-1]["error"]
    line = 1 + MODELS.splitlines().index("        return x.t_() * 2")
    assert f"models.py, line {line}, in forward" in facts["attempts"][-1]["error"]


def test_the_module_in_the_way_is_named(models: Path) -> None:
    done = run("doctor", f"{models}:branches", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [(module["path"], module["type"]) for module in facts["modules"]] == [("blocks.1", "Branches")]
    assert "models.py, line 8" in facts["modules"][0]["error"]
    draft = facts["attempts"][-1]
    assert draft["way"] == "torch.export.draft_export"
    assert "data dependent error: Eq(u0, 1) (line 8, in forward: if x.sum() > 0:)" in draft["error"]


def test_a_way_that_works_is_said_with_what_to_do(models: Path) -> None:
    done = run("doctor", f"{models}:fixed")
    assert done.exit_code == 1
    assert "without dynamic sizes works: leave out dynamic_shapes" in done.stdout


def test_a_model_that_does_not_run_is_not_captured(models: Path) -> None:
    done = run("doctor", f"{models}:broken", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [attempt["way"] for attempt in facts["attempts"]] == ["the model runs"]
    assert "shapes cannot be multiplied" in facts["attempts"][0]["error"]
