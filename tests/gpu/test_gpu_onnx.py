"""ONNX Runtime on a GPU, where it has an execution provider for one: stages of it alone, and beside stages of torch."""

from pathlib import Path

import numpy
import pytest
import torch

import stagepack
from stagepack.format.reader import Bundle
from stagepack_loaders.torch.stage import TorchStage
from tests.gpu.answers import assert_close

pytestmark = pytest.mark.gpu

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed", exc_type=ImportError)
pytest.importorskip("onnxscript", reason="ONNX models are written by onnxscript", exc_type=ImportError)


class Counting(torch.nn.Module):
    """Two layers, one of them in bfloat16, and a counter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.add_(1)
        y = self.first(x).relu()
        return self.last(y) + self.count, y > 0


@pytest.fixture
def counting(device: torch.device, tmp_path: Path) -> Bundle:
    """A bundle in two stages with ONNX models."""
    if device.type == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has no CUDAExecutionProvider: it is the build for CPUs")
    torch.manual_seed(0)
    path = tmp_path / "m.stagepack"
    stagepack.export(Counting().eval(), (torch.randn(2, 16),), out=path, split_at=["last"])
    stagepack.add_onnx(path)
    return stagepack.open(path)


@torch.no_grad()
@pytest.mark.parametrize(
    "runtimes", [["onnxruntime"] * 2, ["torch", "onnxruntime"], ["onnxruntime", "torch"]], ids="-".join
)
def test_stages_of_both_runtimes_share_the_memory_of_the_device(
    counting: Bundle, runtimes: list[str], device: torch.device
) -> None:
    pipeline = stagepack.load(counting, [str(device)], runtime=runtimes)
    expected = stagepack.load(counting)
    x = torch.randn(2, 16)
    for _ in range(3):
        answer, wanted = pipeline(x.to(device)), expected(x)
        assert [tensor.device for tensor in answer] == [device] * 2
        assert_close(answer, wanted)
    pipeline.reset_state()
    expected.reset_state()
    found = pipeline(x.numpy())
    assert isinstance(found[0], numpy.ndarray)
    assert_close([torch.from_numpy(array) for array in found], expected(x))
    assert any(isinstance(stage, TorchStage) for stage in pipeline.stages) == ("torch" in runtimes)
