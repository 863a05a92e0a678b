"""Signers, and a bundle to be signed."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.conformance.vectors import TINY

if TYPE_CHECKING:
    from tests.signing.signers import Authority, Signer


@pytest.fixture(scope="session")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="session")
def signers() -> ModuleType:
    """What makes keys, which needs the packages of the extra ``sign``."""
    return importlib.import_module("tests.signing.signers")


@pytest.fixture(scope="session")
def signer(signers: ModuleType, key_folder: Path) -> "Signer":
    return signers.make_signer(key_folder, "release")


@pytest.fixture(scope="session")
def stranger(signers: ModuleType, key_folder: Path) -> "Signer":
    return signers.make_signer(key_folder, "stranger")


@pytest.fixture(scope="session")
def authority(signers: ModuleType, key_folder: Path) -> "Authority":
    return signers.make_authority(key_folder, "known")


@pytest.fixture(scope="session")
def other_authority(signers: ModuleType, key_folder: Path) -> "Authority":
    return signers.make_authority(key_folder, "other")


@pytest.fixture
def bundle_path(tmp_path: Path) -> Path:
    """A bundle of two stages that is not signed."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny.stagepack"))
