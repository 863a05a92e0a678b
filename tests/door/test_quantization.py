"""Models that torch.ao.quantization has packed are refused by name; those of torchao and PT2E are exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.ao.quantization import quantize_dynamic

import stagepack
from stagepack.errors import CaptureError, UnsupportedError
from tests.hostile.attack import run
from tests.modules import module_of

# Packing is deprecated since torch 2.10, and torchao warns of its CUDA libraries.
pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.linspace(-1, 1, 128).reshape(2, 64)
MODEL = """
import torch


def packed():
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}), (torch.ones(2, 64),)
"""


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()


def statically() -> torch.nn.Module:
    stubs = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
    model: Any = torch.nn.Sequential(stubs[0], *net(), stubs[1]).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    torch.ao.quantization.prepare(model, inplace=True)
    model(X)
    torch.ao.quantization.convert(model, inplace=True)
    return model


def with_lstm() -> torch.nn.Module:
    model = module_of(lambda self, x: self.l(x)[0], l=torch.nn.LSTM(64, 8))
    return quantize_dynamic(model, {torch.nn.LSTM})


def with_quantized_buffer() -> torch.nn.Module:
    model = module_of(lambda self, x: x @ self.w.dequantize())
    model.register_buffer("w", torch.quantize_per_tensor(torch.randn(64, 4), 0.1, 0, torch.qint8))
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: quantize_dynamic(net(), {torch.nn.Linear}),
            r"0 \(torch.ao.nn.quantized.dynamic.modules.linear.Linear\) has weights that torch.ao.quantization packed",
        ),
        (statically, r"1 \(torch.ao.nn.quantized.modules.linear.Linear\) has weights that"),
        (with_lstm, r"l \(torch.ao.nn.quantized.dynamic.modules.rnn.LSTM\) has weights that"),
    ],
    ids=["dynamic", "static", "recurrent"],
)
def test_packed_weights_are_refused_by_name(make: Callable[[], Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=rf"{says}.*advice: quantize the model with torchao: quantize_\(model, Int8"):
        stagepack.export(make(), (X,), out=tmp_path / "m.stagepack")


def test_a_quantized_buffer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"the buffer w is quantized \(torch.qint8\), .* or quantize with torchao"):
        stagepack.export(with_quantized_buffer(), (X,), out=tmp_path / "m.stagepack")


def test_doctor_names_the_module_and_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    done = run("doctor", "net.py:packed")
    assert done.exit_code == 1
    assert "has weights that torch.ao.quantization packed" in done.stdout
    assert "has worked: quantize the model with torchao" in done.stdout


def test_weights_of_torchao_are_exported(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = net()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    bundle = stagepack.export(model, (X,), out=tmp_path / "m.stagepack", stages=2)
    assert {weight.dtype for weight in bundle.graph(0).weights} == {"int8", "float32"}
    assert torch.equal(stagepack.load(bundle)(X), model(X))


@pytest.mark.slow
def test_programs_of_pt2e_are_exported(tmp_path: Path) -> None:
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason="torchao is not installed")
    x86: Any = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer", reason="torchao is not installed"
    )
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(torch.export.export(net(), (X,)).module(), quantizer)
    prepared(X)
    model = pt2e.convert_pt2e(prepared)
    bundle = stagepack.export(model, (X,), out=tmp_path / "m.stagepack")
    loaded = stagepack.load(bundle, allow_ops=["quantized_decomposed"])
    assert torch.equal(loaded(X), model(X))


def test_a_quantized_value_within_a_model_is_refused(tmp_path: Path) -> None:
    """Its trace states floats, so that a stage that sends it would answer with another dtype than its manifest says."""

    class Rounded(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.dequantize(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))

    with pytest.raises(UnsupportedError, match=r"quantize_per_tensor\.default returns a quantized tensor"):
        stagepack.export(Rounded(), (torch.randn(2, 8),), out=tmp_path / "m.stagepack")
