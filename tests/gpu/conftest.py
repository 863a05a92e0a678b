"""The device of these tests. They are skipped where it is not there, and never count as passed."""

import sys
from collections.abc import Sequence

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


@pytest.fixture
def module_as_command(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What runs the command of this checkout, which need not be installed."""
    pytest.importorskip("grpc", reason="the server needs the packages of the extra serve", exc_type=ImportError)
    monkeypatch.setattr("tests.serve.servers.STAGEPACK", "stagepack")
    return sys.executable, "-m"


@pytest.fixture(autouse=True)
def _plain_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute convolutions in float32, as the CPU does, and not in TF32. Matrix products do by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
