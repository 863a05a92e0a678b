"""The commands `stagepack` and `model_signing`, for tests of signatures."""

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from stagepack.cli import main

MODEL_SIGNING = Path(sys.executable).with_name("model_signing")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def model_signing(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(MODEL_SIGNING), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
