"""One real bundle for all hostile tests; each damages its own copy."""

from pathlib import Path

import pytest

from tests.bundle_editor import BundleEditor
from tests.hostile.tiny import write_tiny


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that nothing is wrong with. Do not write into it."""
    return write_tiny(tmp_path_factory.mktemp("sound") / "tiny.stagepack")


@pytest.fixture
def editor(sound: Path, tmp_path: Path) -> BundleEditor:
    """A copy of the sound bundle."""
    return BundleEditor.copy(sound, tmp_path / "tiny.stagepack")
