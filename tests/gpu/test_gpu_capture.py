"""Captured on one device and run on another; devices that the model names; random numbers; autocast."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import CaptureError
from stagepack.format.graph import DeviceArg
from stagepack.format.reader import Bundle
from stagepack.format.traversal import leaf_arguments, node_arguments
from tests.gpu.answers import assert_close

pytestmark = pytest.mark.gpu


class Mixed(torch.nn.Module):
    """A layer before and after a part that the model computes on the CPU on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        on_host = y.to("cpu").cumsum(-1) + torch.arange(16, device="cpu")
        return self.last(on_host.to(y.device) + torch.ones(16, device=y.device)) + torch.eye(16, device=y.device)[0]


class Draws(torch.nn.Module):
    """Random numbers in both stages, from factories and from other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(self.first(x), 0.5) + torch.rand(16, device=x.device)
        order = torch.randperm(16, device=x.device)
        return self.last(y)[:, order] + torch.randn_like(y) * torch.bernoulli(torch.full_like(y, 0.5))


class Autocast(torch.nn.Module):
    """An autocast region of one device type and dtype, over the cut."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.device_type, self.dtype = device_type, dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self.device_type, self.dtype):
            y = self.first(x)
            z = self.last(y.relu())
        return y, z


def export(model: torch.nn.Module, x: torch.Tensor, out: Path, **options: Any) -> Bundle:
    """A bundle in two stages, captured where the model is."""
    return stagepack.export(model.eval(), (x,), out=out, **({"split_at": ["last"]} | options))


@torch.no_grad()
@pytest.mark.parametrize("captured_on_device", [False, True], ids=["captured-on-cpu", "captured-on-device"])
@pytest.mark.parametrize("runs_on_device", [False, True], ids=["runs-on-cpu", "runs-on-device"])
def test_a_bundle_runs_on_another_device_than_that_of_its_capture(
    captured_on_device: bool, runs_on_device: bool, device: torch.device, tmp_path: Path
) -> None:
    capture_device = device if captured_on_device else torch.device("cpu")
    run_device = device if runs_on_device else torch.device("cpu")
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers).to(capture_device).eval()
    out = tmp_path / "m"
    bundle = stagepack.export(model, inputs="input=float32[batch=1..8,length=2..64,16]", out=out, stages=2)
    assert bundle.manifest.device == capture_device.type
    x = torch.randn(2, 5, 16)
    found, expected = stagepack.load(bundle, [str(run_device)])(x.to(run_device)), model(x.to(capture_device))
    assert found.device == run_device
    assert_close(found, expected)
    assert capture_device != run_device or torch.equal(found, expected)


@torch.no_grad()
def test_a_device_that_the_model_names_is_kept(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Mixed().to(device), torch.randn(2, 16, device=device)
    bundle = export(model, x, tmp_path / "m")
    named = {
        leaf.name
        for graph in bundle.graphs()
        for node in graph.nodes
        for argument in node_arguments(node)
        for leaf in leaf_arguments(argument)
        if isinstance(leaf, DeviceArg)
    }
    assert named == ({"cpu", None} if device.type == "cuda" else {None})
    found = stagepack.load(bundle, [str(device)])(x)
    assert found.device == device
    assert torch.equal(found, model(x))
    assert_close(stagepack.load(bundle, ["cpu"])(x.cpu()), found)
    # Factories of a program of the CPU make tensors on the device.
    captured_on_cpu = export(model.cpu(), x.cpu(), tmp_path / "cpu")
    found = stagepack.load(captured_on_cpu, [str(device)])(x)
    assert found.device == device
    assert_close(found, model(x.cpu()))


@torch.no_grad()
def test_random_numbers_are_those_of_the_generator_of_the_device(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Draws().train(), torch.randn(4, 16, device=device)
    with pytest.warns(stagepack.errors.ExportWarning, match="training mode"):
        bundle = stagepack.export(model, (x.cpu(),), out=tmp_path / "m", split_at=["last"])
    pipeline, on_device = stagepack.load(bundle, [str(device)]), model.to(device)
    for seed in range(3):
        torch.manual_seed(seed)
        found = pipeline(x)
        torch.manual_seed(seed)
        assert torch.equal(found, on_device(x))


@torch.no_grad()
def test_inputs_that_the_export_makes_are_on_the_device_of_the_model(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4).to(device)
    bundle = stagepack.export(model, inputs="input=float32[batch=1..8,16]", out=tmp_path / "described")
    x = torch.randn(3, 16, device=device)
    assert torch.equal(stagepack.load(bundle, [str(device)])(x), model(x))
    transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    bert = transformers.BertModel(config).eval().to(device)
    bundle = stagepack.export(bert, out=tmp_path / "bert", stages=2)
    ids = torch.randint(0, 64, (2, 7), device=device)
    mask = torch.ones_like(ids)
    found = stagepack.load(bundle, [str(device)])(ids, mask)
    assert_close(found["last_hidden_state"], bert(ids, mask).last_hidden_state)


def test_inputs_on_another_device_than_the_model_are_named(cuda: torch.device, tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"position 0 is on cpu and the model on cuda:0: move one of them, as in x.to\('cuda:0'\)"
    ):
        stagepack.export(Mixed().to(cuda), (torch.randn(2, 16),), out=tmp_path / "m")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_autocast_is_that_of_the_device(dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    """A region of the device that the model was captured on becomes one of the device that it runs on."""
    torch.manual_seed(0)
    x = torch.randn(2, 16)
    for capture_device in {torch.device("cpu"), device}:
        model = Autocast(capture_device.type, dtype).to(capture_device)
        bundle = export(model, x.to(capture_device), tmp_path / capture_device.type)
        answer = stagepack.load(bundle, [str(device)])(x.to(device))
        expected_model = Autocast(device.type, dtype).to(device)
        expected_model.load_state_dict(model.state_dict())
        assert [tensor.dtype for tensor in answer] == [dtype, dtype]
        assert all(map(torch.equal, answer, expected_model(x.to(device))))


@torch.no_grad()
def test_numpy_callers_get_arrays_of_the_host(device: torch.device, tmp_path: Path) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)), torch.randn(2, 16)
    bundle = stagepack.export(model.eval(), (x,), out=tmp_path / "m", stages=2)
    found = stagepack.load(bundle, [str(device)])(x.numpy())
    assert_close(torch.from_numpy(found), model(x))
