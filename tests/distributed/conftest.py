"""Bundles, each made once for the tests of a module."""

import pytest

from stagepack.format.reader import Bundle
from tests.distributed.bundles import export_counting, export_layers


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_layers(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_counting(tmp_path_factory.mktemp("bundles"))
