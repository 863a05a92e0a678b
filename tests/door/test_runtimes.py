"""The runtime that is chosen without a word, on machines that lack one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import OperatorError
from tests.bundle_editor import BundleEditor
from tests.door.model import EXAMPLE, Scale
from tests.hostile.attack import run

# A package of these names is not found, as if it was not installed.
PROGRAM = """
import json, sys

sys.modules.update(dict.fromkeys(json.loads(sys.argv[2])))
import numpy
import stagepack
from click.testing import CliRunner
from stagepack.cli import main

outcomes = {}
x = numpy.linspace(-1, 1, 3 * 64, dtype=numpy.float32).reshape(3, 64)
for name, options in {"load": {}, "list": {"runtime": "onnxruntime", "processes": 2}}.items():
    try:
        pipeline = stagepack.load(sys.argv[1], **options)
        outcomes[name] = [[stage.runtime for stage in pipeline.stages], numpy.asarray(pipeline(x)).tolist()]
    except stagepack.errors.StagepackError as error:
        outcomes[name] = [type(error).__name__, str(error)]
for command in ("load", "verify --run"):
    result = CliRunner().invoke(main, [*command.split(), sys.argv[1]])
    outcomes["stagepack " + command] = [result.exit_code, result.output]
print(json.dumps(outcomes))
"""


def outcomes_without(packages: list[str], bundle_path: Path) -> dict[str, list[object]]:
    command = [sys.executable, "-c", PROGRAM, str(bundle_path), json.dumps(packages)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    outcomes: dict[str, list[object]] = json.loads(completed.stdout)
    return outcomes


@pytest.mark.process
def test_a_machine_with_onnx_runtime_alone_runs_in_it(exported: tuple[Path, object]) -> None:
    outcomes = outcomes_without(["torch"], exported[0])
    assert outcomes["load"][0] == ["onnxruntime", "onnxruntime"]
    assert outcomes["list"][0] == "MissingPackageError"
    assert "'torch'" in str(outcomes["list"][1])
    for command in ("stagepack load", "stagepack verify --run"):
        assert outcomes[command][0] == 0, outcomes[command][1]
    assert "onnxruntime" in str(outcomes["stagepack load"][1])


@pytest.mark.process
def test_a_stage_runs_in_onnx_runtime_where_another_has_no_model(exported: tuple[Path, object], tmp_path: Path) -> None:
    editor = BundleEditor.copy(exported[0], tmp_path / "m.stagepack")
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][0].pop("onnx"))
    program = (
        "import sys; sys.modules['torch'] = None; import stagepack; print(stagepack.load_stage(sys.argv[1], 1).runtime)"
    )
    command = [sys.executable, "-c", program, str(editor.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "onnxruntime\n"


@pytest.mark.process
def test_without_any_runtime_the_error_names_them(exported: tuple[Path, object]) -> None:
    outcomes = outcomes_without(["torch", "onnxruntime"], exported[0])
    assert outcomes["load"] == [
        "MissingPackageError",
        "the package 'torch' is not installed: the extra 'torch' of stagepack (in a checkout: pip install '.[torch]') installs it",
    ]


def test_an_object_from_before_the_onnx_models_says_so(exported: tuple[Path, object], tmp_path: Path) -> None:
    bundle = stagepack.recut(exported[0], out=tmp_path / "m.stagepack", stages=2)
    stagepack.add_onnx(bundle)
    says = "no ONNX model of stage 0, 1: the bundle was written again after it was opened"
    with pytest.raises(OperatorError, match=says):
        stagepack.load(bundle, runtime="onnxruntime")
    stagepack.load(bundle.path, runtime="onnxruntime")


@pytest.mark.process
def test_without_torch_and_without_onnx_models_both_cures_are_named(
    exported: tuple[Path, object], tmp_path: Path
) -> None:
    bundle = stagepack.recut(exported[0], out=tmp_path / "m.stagepack", stages=2)
    name, message = outcomes_without(["torch"], bundle.path)["load"]
    assert name == "MissingPackageError"
    assert "the package 'torch' is not installed: " in str(message)
    assert "; onnxruntime is installed: " in str(message)
    assert "stagepack onnx" in str(message)


def test_onnx_of_a_bfloat16_model_fails_and_names_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "m.stagepack"
    stagepack.export(Scale().to(torch.bfloat16).eval(), (EXAMPLE.bfloat16(),), out=path, stages=2)
    result = run("onnx", str(path), "--json")
    assert result.exit_code == 1
    assert [bool(stage["torch_only"]) for stage in json.loads(result.stdout)["stages"]] == [True, True]
    expected = "no stage has an ONNX model that ONNX Runtime can run: export the model with --dtype float32 or float16"
    assert result.stderr == f"stagepack: {path}: {expected}\n"
    assert not list(path.glob("*.onnx"))
