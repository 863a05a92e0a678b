"""`stagepack onnx`, `export --onnx`, and the runtimes of `load` and `verify`, as a user calls them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from stagepack.cli import main

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())

def make():
    torch.manual_seed(0)
    return Net()

def inputs():
    return (torch.ones(2, 4),)
"""


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, list(arguments))
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def test_export_with_onnx_files_and_everything_after_it(net: Path) -> None:
    shown = run("export", "net.py:make", "--inputs", "net.py:inputs", "-o", "a.stagepack", "--stages", "2", "--onnx")
    assert shown.stdout.count("largest difference from torch ") == 2
    run("export", "net.py:make", "--inputs", "net.py:inputs", "-o", "b.stagepack", "--stages", "2")
    assert not (net / "b.stagepack" / "stage-0.onnx").exists()
    facts = json.loads(run("onnx", "b.stagepack", "--json").stdout)
    assert [stage["torch_only"] for stage in facts["stages"]] == [None, None]
    assert all(
        0 <= stage["difference"] < 1e-5 and stage["bytes"] > 0 == stage["own_bytes"] for stage in facts["stages"]
    )
    a, b = (json.loads(run("inspect", name, "--json").stdout) for name in ("a.stagepack", "b.stagepack"))
    assert a["digest"] == b["digest"]
    assert "ONNX models" in run("inspect", "a.stagepack").stdout
    loaded = json.loads(
        run("load", "a.stagepack", "--runtime", "onnxruntime", "--outputs", "out.safetensors", "--json").stdout
    )
    assert [stage["runtime"] for stage in loaded["stages"]] == ["onnxruntime"] * 2
    assert [stage["files"][0] for stage in loaded["stages"]] == ["stage-0.onnx", "stage-1.onnx"]
    assert "import onnxruntime" in loaded["start"]
    mixed = run("load", "a.stagepack", "--runtime", "torch", "--runtime", "onnxruntime")
    assert "torch        cpu" in mixed.stdout
    run("load", "a.stagepack", "--outputs", "torch.safetensors")
    found, wanted = load_file("out.safetensors"), load_file("torch.safetensors")
    assert torch.allclose(found["output.0"], wanted["output.0"], atol=1e-5)
    verified = json.loads(run("verify", "a.stagepack", "--run", "--runtime", "onnxruntime", "--json").stdout)
    assert verified["ok"]
    assert verified["difference"] < 1e-5
    cut = run("recut", "a.stagepack", "-o", "c.stagepack", "--stages", "1")
    assert "add new ones with: stagepack onnx c.stagepack" in cut.stdout


def test_an_answer_that_is_too_far_off_fails_the_check(net: Path, tower: Path) -> None:
    path = shutil.copytree(tower, net / "t.stagepack")
    done = CliRunner().invoke(main, ["verify", str(path), "--run", "--runtime", "onnxruntime"])
    assert done.exit_code == 0
    tensors = load_file(path / "example.safetensors")
    assert tensors["output.0"].dtype == torch.float32
    from tests.bundle_editor import BundleEditor

    editor = BundleEditor.copy(tower, net / "forged.stagepack")
    content = bytearray((tower / "example.safetensors").read_bytes())
    place = content.rindex(tensors["output.1"].numpy().tobytes())
    content[place : place + 4] = (tensors["output.1"][:1] + 1).numpy().tobytes()
    editor.write_file("example.safetensors", bytes(content))
    done = CliRunner().invoke(main, ["verify", str(editor.path), "--run", "--runtime", "onnxruntime"])
    assert done.exit_code == 1
    assert "largest difference 1" in done.stdout
    assert "expected the recorded results of the example, found " in done.stderr
