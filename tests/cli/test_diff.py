"""What differs between two bundles."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.cli import main
from stagepack.format.reader import Bundle
from stagepack.roads.compare import compare_bundles
from tests.bundle_editor import BundleEditor


def net(width: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)).eval()


def exported(model: torch.nn.Module, path: Path, **options: Any) -> Bundle:
    return stagepack.export(model, (torch.ones(3, 4),), out=path, **options)


def facts(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *map(str, paths), "--json"])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


def test_equal_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        exported(net(), tmp_path / name)
    status, found = facts(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, found) == (0, {"equal": True, "graph": [], "weights": {}, "plan": [], "files": []})


def test_another_cut_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(net(), tmp_path / "a")
    exported(net(), tmp_path / "b", stages=2)
    status, found = facts(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert found["plan"][0] == "stages: 1 and 2"
    assert not found["graph"] + found["files"]
    assert found["weights"] == {}


def test_other_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = net()
    state = tuned.state_dict()
    state["0.bias"][3] += 1
    state["1.running_mean"] += 1
    exported(net(), tmp_path / "a", stages=2)
    exported(tuned, tmp_path / "b", stages=3)
    status, found = facts(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert found["weights"] == {"0.bias": "other values", "1.running_mean": "other values"}
    assert found["graph"] == []
    assert found["files"] == ["example.safetensors: other content"]
    with pytest.raises(SystemExit):
        main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "0.bias" in capsys.readouterr().out


def test_another_model(tmp_path: Path) -> None:
    wider = torch.nn.Sequential(*list(net(9))[:-1], torch.nn.ReLU(), torch.nn.Linear(9, 2, bias=False)).eval()
    found = compare_bundles(exported(net(), tmp_path / "a"), exported(wider, tmp_path / "b"))
    assert found.weights["0.weight"] == "float32[8, 4] and float32[9, 4]"
    assert found.weights["2.weight"] == "only in A"
    assert found.weights["3.weight"] == "only in B"
    assert any(line.startswith("nodes: ") for line in found.graph)
    assert any("is the first that differs: aten." in line for line in found.graph)


class Constants(torch.nn.Module):
    """Constants that equality in Python does not tell apart, or that do not equal themselves."""

    whole: torch.Tensor
    part: torch.Tensor

    def __init__(self, zero: float, first: int) -> None:
        super().__init__()
        self.zero = zero
        memory = torch.arange(6.0)
        self.register_buffer("whole", memory)
        self.register_buffer("part", memory[first : first + 3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 1, torch.nan) / self.zero + self.whole.sum() + self.part.sum()


@pytest.mark.parametrize(
    ("zero", "first", "differs"), [(0.0, 0, ""), (-0.0, 0, "graph"), (0.0, 2, "weights")], ids=["nan", "zero", "view"]
)
def test_what_python_takes_for_equal(
    zero: float, first: int, differs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, model in (("a", Constants(0.0, 0)), ("b", Constants(zero, first))):
        stagepack.export(model, (torch.ones(4),), out=tmp_path / name)
    BundleEditor(tmp_path / "b").edit_manifest(lambda manifest: manifest["producer"].update(torch="2.0.0"))
    status, found = facts(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, {field for field in ("graph", "weights", "plan") if found[field]}) == (1, {differs} - {""})
