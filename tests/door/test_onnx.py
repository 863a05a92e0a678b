"""`stagepack onnx` of a model that ONNX Runtime cannot run."""

import json
from pathlib import Path

import torch

import stagepack
from tests.door.model import EXAMPLE, Scale
from tests.hostile.attack import run


def test_onnx_of_a_bfloat16_model_fails_and_names_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "m.stagepack"
    stagepack.export(Scale().to(torch.bfloat16).eval(), (EXAMPLE.bfloat16(),), out=path, stages=2)
    result = run("onnx", str(path), "--json")
    assert result.exit_code == 1
    assert [bool(stage["torch_only"]) for stage in json.loads(result.stdout)["stages"]] == [True, True]
    expected = "no stage has an ONNX model that ONNX Runtime can run: export the model with --dtype float32 or float16"
    assert result.stderr == f"stagepack: {path}: {expected}\n"
    assert not list(path.glob("*.onnx"))
