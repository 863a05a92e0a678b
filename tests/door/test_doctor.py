"""`stagepack doctor` takes every SOURCE of `stagepack export`, and failed captures lead to it or to a recipe."""

import json
from pathlib import Path

import pytest
import torch

import stagepack
from tests.hostile.attack import command_fails, run

MODEL = """
import torch
import stagepack


class Pair(torch.nn.Module):
    def encode(self, x):
        return x + 1

    def decode(self, x):
        return x * 2 if x.sum() > 0 else x


class Data(torch.nn.Module):
    def forward(self, x):
        return x[: int(x[0])]


class Odd(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("odd")


def pair():
    return Pair(), {"encode": stagepack.Inputs(args=(torch.ones(2),)), "decode": stagepack.Inputs(args=(torch.ones(2),))}


def data():
    return Data(), (torch.tensor([2, 1, 1]),)


def odd():
    return Odd(), (torch.ones(2),)


def linear():
    return torch.nn.Linear(3, 2), (torch.ones(2, 3),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODEL)
    return tmp_path


# draft_export of torch leaves its log open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_entry_point_is_diagnosed(folder: Path) -> None:
    done = run("doctor", "models.py:pair")
    assert done.exit_code == 1
    encode, decode = done.stdout.split("entry point decode\n")
    assert encode.startswith("entry point encode\n")
    assert "stagepack export" in encode
    assert "stagepack export" not in decode


def test_a_program_is_written(folder: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(3, 2), (torch.ones(2, 3),)), "net.pt2")
    done = run("doctor", "net.pt2", "--json")
    assert done.exit_code == 0, done.output
    attempts = json.loads(done.stdout)["attempts"]
    assert [(attempt["way"], attempt["error"]) for attempt in attempts] == [("stagepack export", None)]


def test_a_failed_capture_ends_with_the_recipe_or_with_doctor(folder: Path) -> None:
    command_fails("export", "models.py:data", "-o", "m", says="advice: the line makes a number of a tensor's data")
    command_fails("export", "models.py:pair", "-o", "m", says="advice: the line asks a tensor for an answer")
    command_fails("export", "models.py:odd", "-o", "m", says="run 'stagepack doctor SOURCE', which tries other ways$")


def test_strict_has_a_flag(folder: Path) -> None:
    done = run("export", "models.py:linear", "--strict", "-o", "m", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["captured_by"] == "torch.export.export, strict=True"
    assert stagepack.load("m")(torch.randn(2, 3)).shape == (2, 2)
