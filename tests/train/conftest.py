"""These tests need the schedules of torch 2.13. Many train all stages in one process."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, and not in its type hints

from tests.train.models import NEEDS_TORCH


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip the tests of this folder where torch is older."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(NEEDS_TORCH)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
