"""Code that `torch.export` alone stops at, or fixes to the sizes of the example."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import stagepack
from stagepack.errors import ExportWarning
from tests.modules import cut_at_most, module_of

BATCH = Dim("batch", min=1, max=64)
LENGTH = Dim("length", min=2, max=100)


def assert_right(model: nn.Module, inputs: stagepack.Inputs, others: tuple[Any, ...], folder: Path) -> stagepack.Bundle:
    """Export a model; the bundle answers as the model does, to other sizes, too."""
    bundle = stagepack.export(
        model, inputs.args, inputs.kwargs, dynamic_shapes=inputs.dynamic_shapes, out=folder / "m.stagepack"
    )
    bundle = cut_at_most(bundle, 2)
    pipe = stagepack.load(bundle)
    with torch.no_grad():
        for args in (inputs.args, others):
            found, wanted = pipe(*args, **inputs.kwargs), model(*args, **inputs.kwargs)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return bundle


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.project = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        y, state = self.layer(x)
        return self.project(y), state


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("error:The tensor attributes:UserWarning")
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
        nn.LSTM(4, 6, proj_size=3, batch_first=True),
        nn.GRU(4, 6, batch_first=True),
        nn.RNN(4, 6, batch_first=True, nonlinearity="relu"),
    ],
    ids=["lstm", "lstm-with-projection", "gru", "rnn"],
)
def test_recurrent_layers_take_sequences_of_any_length(layer: nn.Module, tmp_path: Path) -> None:
    model = Recurrent(layer).eval()
    x = torch.randn(2, 5, 4)
    model(x)
    inputs = stagepack.Inputs(args=(x,), dynamic_shapes=({0: BATCH, 1: LENGTH},))
    bundle = assert_right(model, inputs, (torch.randn(3, 11, 4),), tmp_path)
    assert [symbol.name for symbol in bundle.entry_point.symbols] == ["batch", "length"]
    kernels = torch.ops.aten.lstm.input.py_kernels
    assert all(kernel.__module__ == "torch._decomp.decompositions" for kernel in kernels.values())


def reads_data(_: Any, x: torch.Tensor) -> torch.Tensor:
    table = x.new_zeros(x.shape[0], 4)
    table.data[:, 1:].copy_(x[:, 1:])
    return table.cos() + x.data


def doubles_and_halves(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = torch.cat([x, y]).sin().chunk(2)
    return first * second


def counts(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(len(x)).expand(4, len(x)).T


def catches(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls its modules with arguments that some do not take, as speechbrain does."""
    for block in self.blocks:
        try:
            x = block(x, lengths=None)
        except TypeError:
            x = block(x)
    return x


@pytest.mark.parametrize(
    "model",
    [
        module_of(reads_data),
        module_of(doubles_and_halves),
        module_of(counts, unused=nn.Buffer(torch.eye(2).to_sparse(), persistent=False)),
        module_of(catches, blocks=nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])),
    ],
    ids=["data-of-a-tensor", "doubled-and-halved-batch", "length-of-a-tensor", "error-that-the-model-catches"],
)
def test_a_model_keeps_any_number_of_rows(model: nn.Module, tmp_path: Path) -> None:
    count = len(inspect.signature(model.forward).parameters)
    args, others = (tuple(torch.randn(rows, 4) for _ in range(count)) for rows in (2, 5))
    assert_right(model, stagepack.Inputs(args=args, dynamic_shapes=({0: BATCH},) * count), others, tmp_path)
    assert "len" not in globals()


def test_a_range_that_the_code_does_not_allow_is_narrowed_with_a_warning(tmp_path: Path) -> None:
    def limited(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.shape[0] >= 32 else x.cos()

    inputs = stagepack.Inputs(args=(torch.randn(2, 4),), dynamic_shapes={"x": {0: BATCH}})
    with pytest.warns(ExportWarning, match=r"limited does not allow all declared sizes, .*: batch from 1..64 to 1..31"):
        bundle = assert_right(module_of(limited), inputs, (torch.randn(5, 4),), tmp_path)
    [symbol] = bundle.entry_point.symbols
    assert (symbol.min, symbol.max) == (1, 31)


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(args[0]) + kwargs["scale"])
        return y


def test_inputs_that_the_signature_does_not_name_have_dynamic_sizes(tmp_path: Path) -> None:
    model = TakesAnything()
    kwargs = {"scale": torch.randn(4)}
    inputs = stagepack.Inputs(args=(torch.randn(2, 4),), kwargs=kwargs, dynamic_shapes={"args": ({0: BATCH},)})
    assert_right(model, inputs, (torch.randn(7, 4),), tmp_path)
    assert "forward" not in vars(model)


def test_autocast_of_a_device_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    def for_gpus(_: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            y = x.sin()
        return y @ y.T

    assert_right(module_of(for_gpus), stagepack.Inputs(args=(torch.randn(2, 4),)), (torch.randn(2, 4),), tmp_path)


def test_an_export_leaves_the_tensors_of_the_model_as_they_are(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.ones(3)
            self.buffer = nn.Buffer(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.contiguous() + self.constant.contiguous() + self.buffer

    model = Shifted()
    before = [dict(vars(tensor)) for tensor in (model.constant, model.buffer)]
    stagepack.export(model, (torch.randn(2, 3),), out=tmp_path / "m")
    assert [vars(tensor) for tensor in (model.constant, model.buffer)] == before
