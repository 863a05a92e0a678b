"""One real bundle for the tests of the command, and the modules of a user."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundle_editor import BundleEditor
from tests.hostile.tiny import write_tiny


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in three stages that nothing is wrong with. Do not write into it."""
    return write_tiny(tmp_path_factory.mktemp("sound") / "tiny.stagepack")


@pytest.fixture
def editor(sound: Path, tmp_path: Path) -> BundleEditor:
    """A copy of the sound bundle."""
    return BundleEditor.copy(sound, tmp_path / "tiny.stagepack")


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
