"""Signers, and a bundle to be signed."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.vectors import TINY

if TYPE_CHECKING:
    from tests.signing.signers import Authority, Signer


@pytest.fixture(scope="session")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="session")
def signer(key_folder: Path) -> "Signer":
    from tests.signing.signers import make_signer

    return make_signer(key_folder, "release")


@pytest.fixture(scope="session")
def stranger(key_folder: Path) -> "Signer":
    from tests.signing.signers import make_signer

    return make_signer(key_folder, "stranger")


@pytest.fixture(scope="session")
def authority(key_folder: Path) -> "Authority":
    from tests.signing.signers import make_authority

    return make_authority(key_folder, "known")


@pytest.fixture(scope="session")
def other_authority(key_folder: Path) -> "Authority":
    from tests.signing.signers import make_authority

    return make_authority(key_folder, "other")


@pytest.fixture
def bundle_path(tmp_path: Path) -> Path:
    """A bundle of two stages that is not signed."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny.stagepack"))
