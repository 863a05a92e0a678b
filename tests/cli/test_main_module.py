"""``python -m stagepack`` is the command, for launchers such as torchrun that take a module."""

import subprocess
import sys

import pytest


@pytest.mark.process
def test_the_module_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "stagepack", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "export" in done.stdout
