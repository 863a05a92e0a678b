"""How long values take between two processes, for profiles."""

import json
from pathlib import Path

import pytest

from stagepack.format.reader import Bundle
from tests.hostile.attack import run


@pytest.mark.slow  # 5 s: starts a process
def test_links_are_measured(layers: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    result = run("profile", str(layers.path), "-o", str(path), "--runs", "1", "--links")
    assert result.exit_code == 0, result.output
    assert "measured between two processes: links of " in result.stdout
    link = json.loads(path.read_text())["link"]
    assert 1e-6 < link["seconds_per_value"] < 0.1
    assert 0 < link["seconds_per_byte"] < 1e-6
