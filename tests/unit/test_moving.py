"""`Pipeline.to`: loaded stages on other devices. The device ``meta`` stands for any other; a second CPU shows the content."""

from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import DeviceError, OptionError
from stagepack.format.reader import Bundle
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.torch.prepare import move_stages
from stagepack_loaders.torch.stage import TorchStage
from tests.zoo.case import Case, answers, assert_equal, captured_answers
from tests.zoo.cases import named


class Counting(torch.nn.Module):
    """Ties a weight across stages, has views of one memory, counts its calls, and makes tensors on its device."""

    calls: torch.Tensor
    even: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.full((), 5.0))
        table = torch.randn(4, 8)
        self.register_buffer("table", table)
        self.register_buffer("even", table[::2])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden(self.embed(ids) + self.table[1] + self.even[1] + torch.arange(8, device=ids.device))
        self.calls.add_(1)
        return hidden @ self.embed.weight.T, self.calls + 0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("moving") / "m.stagepack"
    return stagepack.export(Counting().eval(), (torch.arange(6),), out=out, stages=3)


def test_stages_run_on_the_device_that_they_are_moved_to(bundle: Bundle) -> None:
    pipe = stagepack.load(bundle)
    assert pipe.to("cpu") is pipe
    assert pipe.to(["cpu", "meta"]) is pipe
    assert set(pipe.devices) == {"cpu", "meta"}
    assert pipe.devices[0] == "cpu"
    pipe.to("meta")
    assert pipe.devices == ("meta",) * 3
    assert {parameter.device.type for parameter in pipe.parameters()} == {"meta"}
    logits, calls = pipe(torch.arange(6))
    assert (logits.device.type, calls.device.type, logits.shape) == ("meta", "meta", (6, 11))


def test_weights_move_as_they_are_and_share_what_they_shared(bundle: Bundle) -> None:
    pipe, ids = stagepack.load(bundle), torch.arange(6)
    stages = [stage for stage in pipe.stages if isinstance(stage, TorchStage)]
    with torch.no_grad():
        pipe(ids)
        for parameter in pipe.parameters():
            parameter.mul_(2)
        expected = pipe(ids)[0]
        addresses = {tensor.data_ptr() for stage in stages for tensor in stage.weights()}
        move_stages(bundle, dict(enumerate(stages)), dict.fromkeys(range(3), torch.device("cpu")))
        moved = {name: tensor for stage in pipe.stages for name, tensor in stage.state_dict().items()}
        assert addresses.isdisjoint(tensor.data_ptr() for tensor in moved.values())
        assert moved["even"].untyped_storage().data_ptr() == moved["table"].untyped_storage().data_ptr()
        embeddings = {
            parameter.data_ptr()
            for stage in stages
            for name, parameter in stage.named_parameters()
            if name == "embed.weight"
        }
        assert len(embeddings) == 1
        logits, calls = pipe(ids)
        assert torch.equal(logits, expected)
        assert calls == 8
        pipe.reset_state()
        assert pipe(ids)[1] == 6


def test_stages_that_cannot_be_moved_say_so(bundle: Bundle, tmp_path: Path) -> None:
    pipe = stagepack.load(bundle)
    with pytest.raises(DeviceError, match="device 'nowhere'"):
        pipe.to("nowhere")
    with pytest.raises(DeviceError, match="expected 1 to 3 devices for 3 stages, found 4"):
        pipe.to(["cpu"] * 4)
    with pytest.raises(OptionError, match="dtype: a bundle computes in the types of the export"):
        pipe.to(torch.float16)
    limited = stagepack.load(bundle, device_memory=8192)
    with pytest.raises(DeviceError, match=r"stage \d cannot be moved: it has device_memory, .*: load the bundle again"):
        limited.to("meta")
    compiled = stagepack.load(bundle, compile=True)
    with pytest.raises(DeviceError, match="stage 0 cannot be moved: it is compiled for its device"):
        compiled.to("meta")
    with pytest.raises(DeviceError, match="ONNX Runtime does not move stages: load the bundle again with devices="):
        find_runtime("onnxruntime").move_stages(bundle, {}, {})
    with pytest.raises(DeviceError, match="cannot move to cuda:0: the stages run in processes of their own"):
        DistributedPipeline.to(cast("Any", pipe), "cuda:0")
    assert pipe.devices == ("cpu",) * 3


def test_a_stage_takes_numpy_arrays(bundle: Bundle) -> None:
    stage = stagepack.load_stage(bundle, 0)
    ids = torch.arange(6)
    assert all(map(torch.equal, stage(ids.numpy()), stage(ids)))
    with pytest.raises(stagepack.errors.InputError, match=r"expected dtype int64, found float64"):
        stage(numpy.ones(6))


@pytest.mark.parametrize(
    "case",
    named(
        "aliasing-inputs-written",
        "aliasing-input-written-and-returned",
        "aliasing-several-inputs-written-in-several-layers",
    ),
    ids=lambda case: case.name,
)
def test_inputs_on_another_device_are_written_too(case: Case, tmp_path: Path) -> None:
    """To torch, ``cpu:0`` is another device than ``cpu``: a stage on it gets copies of its inputs."""
    capture = case.capture()
    calls = [capture.inputs] * 3
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=3))
    for devices in (["cpu", "cpu:0", "cpu"], ["cpu:0", "cpu", "cpu:0"]):
        pipeline = stagepack.load(bundle, devices[: len(bundle.stages)])
        assert_equal(answers(pipeline, calls), captured_answers(capture, calls))


class Masked(torch.nn.Module):
    """Writes the mask that it converts, which is no view of the input for integers, and trains a norm on another input."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        weights = mask.to(torch.float32)
        weights.masked_fill_(weights > 0.5, 2.0)
        return torch.nn.functional.batch_norm(x, mean, torch.ones_like(mean), training=True) * weights


@torch.no_grad()
def test_only_inputs_that_were_written_are_written_back(tmp_path: Path) -> None:
    """Tensors whose rows are one memory cannot be written, and need not be."""
    inputs = (torch.randn(2, 4), torch.ones(2, 4, dtype=torch.int64), torch.zeros(4))
    bundle = stagepack.export(Masked(), inputs, out=tmp_path / "m.stagepack", stages=1)
    x, mask, mean = torch.randn(2, 4), torch.ones(1, 4, dtype=torch.int64).expand(2, 4), torch.zeros(4)
    expected_mean = torch.zeros(4)
    expected = stagepack.load(bundle)(x, mask, expected_mean)
    assert torch.equal(stagepack.load(bundle, ["cpu:0"])(x, mask, mean), expected)
    assert torch.equal(mean, expected_mean)
    assert not torch.equal(mean, torch.zeros(4))
    with torch.inference_mode():
        stagepack.load(bundle, ["cpu:0"])(x, mask.contiguous(), mean)
