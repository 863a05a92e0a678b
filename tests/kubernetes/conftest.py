"""A bundle of three stages."""

import pytest

from stagepack.format.reader import Bundle
from tests.distributed.bundles import export_layers


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_layers(tmp_path_factory.mktemp("bundles"))
