"""Bundles with ONNX files that tests read and do not write into."""

from pathlib import Path

import pytest

TOWER = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"


@pytest.fixture
def tower() -> Path:
    """Three stages of a model with whole numbers; the last one writes a buffer, and all have ONNX files."""
    return TOWER
