"""The bundle of the hostile tests for the tests of the command, and the folder of a user."""

from pathlib import Path

import pytest

from tests.hostile.conftest import editor as editor
from tests.hostile.conftest import sound as sound


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a user is in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
