"""Code that runs as on a machine that lacks packages."""

import json
import subprocess
import sys
from collections.abc import Collection

_ABSENCE = """
import json, sys
from click.testing import CliRunner

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

PACKAGES = json.loads(sys.argv.pop(1))
sys.meta_path.insert(0, Absent())
"""


def run_without(packages: Collection[str], code: str, *arguments: str) -> str:
    """Run Python code in a process that lacks packages; return what it prints."""
    command = [sys.executable, "-c", _ABSENCE + code, json.dumps(sorted(packages)), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
