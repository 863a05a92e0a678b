"""The bundle of the hostile tests for the tests of the command, and the modules of a user."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.conftest import editor as editor
from tests.hostile.conftest import sound as sound


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a user is in; what the command imports from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for module_name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[module_name], "__file__", "")):
            del sys.modules[module_name]
