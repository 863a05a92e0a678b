"""These tests need the schedules of torch 2.13."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.models import NEEDS_TORCH


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip the tests of this folder where torch is older."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(NEEDS_TORCH)
