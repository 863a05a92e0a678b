"""What ``pip install`` meets: all extras at once, in the oldest and the newest versions that their bounds allow."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import MissingPackageError
from stagepack.extras import require_extras

ROOT = Path(__file__).parents[2]
EXTRAS = ("torch", "hf", "sentence-transformers", "onnx", "serve", "remote", "sign", "triton")
# The resolver of pip tries one version after the other where bounds meet in no newest one; 11 minutes of that were measured.
SECONDS = 120


@pytest.mark.process
@pytest.mark.parametrize("python_version", ["3.11", pytest.param("3.14", marks=pytest.mark.slow)])
@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
def test_all_extras_resolve_together(python_version: str, resolution: str, tmp_path: Path) -> None:
    resolved_path = tmp_path / "resolved.txt"
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--only-binary", ":all:"]
    command += ["--python-version", python_version, "--resolution", resolution, "--output-file", str(resolved_path)]
    command += [option for extra in EXTRAS for option in ("--extra", extra)] + [str(ROOT / "pyproject.toml")]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if "error sending request" in completed.stderr:
        pytest.skip("the package index cannot be reached, so that bounds of versions are not tested")
    assert completed.returncode == 0, completed.stderr
    resolved = resolved_path.read_text()
    assert all(f"\n{name}==" in f"\n{resolved}" for name in ("torch", "transformers", "onnxruntime", "grpcio", "s3fs"))


def test_a_report_of_the_machine_has_versions_devices_and_limits() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["stagepack"] == stagepack.__version__
    assert facts["extras"]["torch"]["torch"] == importlib.metadata.version("torch")
    assert facts["devices"][0][0] == "cpu"
    assert {"open files", "address space"} <= facts["limits"].keys()
    shown = CliRunner().invoke(main, ["doctor"]).output
    assert f"stagepack {stagepack.__version__}, CPython" in shown
    assert "cache of remote bundles: " in shown


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    words = {"COMP_WORDS": "stagepack ver", "COMP_CWORD": "1" if shell != "fish" else "ver"}
    environment = os.environ | words | {"_STAGEPACK_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(
        [Path(sys.executable).with_name("stagepack")], env=environment, capture_output=True, text=True, check=False
    )
    assert "verify" in done.stdout, done


def test_all_missing_extras_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extras("torch", "hf", "onnx")
    for module in ("transformers", "onnxscript", "model_signing"):
        monkeypatch.setitem(sys.modules, module, None)
    require_extras("torch", "hf")  # its import says so
    with pytest.raises(MissingPackageError, match=r"'transformers', 'onnxscript' .*pip install '\.\[hf,onnx\]'"):
        require_extras("torch", "hf", "onnx")
    result = CliRunner().invoke(main, ["export", "org/model", "-o", "nowhere", "--onnx"])
    assert "the packages 'transformers', 'onnxscript' are not installed: the extras hf,onnx" in result.stderr
    for module in ("onnxruntime", "tritonclient", "aiohttp"):
        monkeypatch.setitem(sys.modules, module, None)
    url = "https://models.example.com/net.stagepack"
    for command, extras in (
        (["load", url, "--runtime", "onnxruntime"], "onnxruntime,remote"),
        (["triton", url, "-o", "nowhere", "--runtime", "onnxruntime"], "triton,onnxruntime,remote"),
        (["serve", url, "--require-signature", "key.pub"], "serve,remote,sign"),
    ):
        result = CliRunner().invoke(main, command)
        assert f"the extras {extras} of stagepack" in result.stderr
