"""The device of these tests. They are skipped where it is not there, and never count as passed."""

from collections.abc import Iterator, Sequence

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Skip all tests marked gpu if the device is not there."""
    device = torch.device(config.getoption("--gpu-device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        skip = pytest.mark.skip(
            reason=f"no CUDA: torch {torch.__version__} sees no GPU; --gpu-device cpu tries the body"
        )
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)


@pytest.fixture
def device(pytestconfig: pytest.Config) -> torch.device:
    """The device that is tested."""
    return torch.device(pytestconfig.getoption("--gpu-device"))


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, of a test whose body makes no sense without CUDA."""
    if device.type != "cuda":
        pytest.skip(f"needs CUDA itself, found --gpu-device {device}")
    return device


@pytest.fixture
def turns(device: torch.device) -> list[str]:
    """Two devices that stages are on in turns. Of a tensor on ``cpu``, ``cpu:0`` makes a copy, as any other device does."""
    return ["cpu", "cpu:0" if device.type == "cpu" else str(device)]


@pytest.fixture(autouse=True)
def _plain_float32() -> Iterator[None]:
    """Compute convolutions in float32, as the CPU does, and not in TF32. Matrix products do by default."""
    was_allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = was_allowed
