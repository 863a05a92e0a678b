"""What ``pip install`` meets: all extras at once, in the oldest and the newest versions that their bounds allow."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("torch", "hf", "onnx", "serve", "remote", "sign", "triton")
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
