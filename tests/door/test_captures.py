"""Models whose code torch.export alone fixes or refuses, and sources that cannot be captured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.capture.diagnosis import find_failing_modules, try_export
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_module
from stagepack.capture.torch_messages import capture_advice
from stagepack.errors import CaptureError
from tests.modules import module_of

LENGTH = Dim("length", min=1, max=100)
SEQUENCES: dict[str, Callable[[Any], torch.Tensor]] = {
    "linspace": lambda n: torch.linspace(end=2, start=0, steps=n, dtype=torch.float64),
    "linspace of integers": lambda n: torch.linspace(0, 100, n, dtype=torch.int64, device="cpu"),
    "linspace of another size": lambda n: torch.linspace(0, 1, 2 * n + 1, layout=torch.strided, requires_grad=False),
    "logspace": lambda n: torch.logspace(-1, 1.0, n, base=2.0, dtype=torch.float16),
    "hann_window": lambda n: torch.hann_window(n, periodic=False),
    "hamming_window": lambda n: torch.hamming_window(n, True, 0.5),
    "kaiser_window": lambda n: torch.kaiser_window(window_length=n, periodic=True, beta=9.0),
    "fftfreq": lambda n: torch.fft.fftfreq(n),
    "rfftfreq": lambda n: torch.fft.rfftfreq(n, 0.5),
}


def test_a_sequence_of_a_size_has_any_length(tmp_path: Path) -> None:
    model = module_of(lambda self, x: (x.sum(), *(make(x.shape[1]) for make in SEQUENCES.values())))
    shapes = {"x": {1: LENGTH}}
    pipe = stagepack.load(stagepack.export(model, (torch.ones(2, 9),), out=tmp_path / "m", dynamic_shapes=shapes))
    for length in (1, 2, 3, 9, 64, 100):
        x = torch.randn(2, length)
        found, expected = pipe(x), model(x)
        assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
        assert all(map(torch.equal, found, expected)), length


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_max_pool1d_takes_any_length(ceil_mode: bool, tmp_path: Path) -> None:
    model = torch.nn.MaxPool1d(3, stride=1, padding=1, ceil_mode=ceil_mode)
    bundle = stagepack.export(
        model, (torch.randn(2, 2, 16),), out=tmp_path / "m.stagepack", dynamic_shapes={"input": {2: LENGTH}}
    )
    pipe = stagepack.load(bundle)
    for length in (1, 7, 16, 100):
        x = torch.randint(-1, 2, (2, 2, length)) * 0.0
        x[0, 0, 0] = float("nan")
        assert torch.equal(pipe(x).view(torch.int32), model(x).view(torch.int32))  # zeros of both signs, too


class AnyInputs(torch.nn.Module):
    def forward(self, *args: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        result = sum(args[1:], args[0])
        return result if scale is None else result * scale


@pytest.mark.parametrize(
    "shapes",
    [
        ({1: LENGTH}, {1: LENGTH}),
        [{1: LENGTH}, {1: LENGTH}],
        (({1: LENGTH}, {1: LENGTH}),),
        {"args": [{1: LENGTH}, {1: LENGTH}]},
    ],
    ids=["each", "list", "tuple", "dict"],
)
def test_inputs_of_any_number_have_a_shape_each(shapes: Any, tmp_path: Path) -> None:
    x = torch.ones(2, 5)
    bundle = stagepack.export(AnyInputs(), (x, x), out=tmp_path / "m.stagepack", dynamic_shapes=shapes)
    assert [(symbol.name, symbol.min, symbol.max) for symbol in bundle.entry_point.symbols] == [("length", 1, 100)]
    assert torch.equal(stagepack.load(bundle)(torch.ones(2, 7), torch.ones(2, 7)), torch.full((2, 7), 2.0))


@pytest.mark.parametrize("shapes", [({1: LENGTH},), {"x": {1: LENGTH}}, (({1: LENGTH},),), ((None, LENGTH),)])
def test_one_of_any_number_of_inputs_has_its_shape_or_a_name(shapes: Any, tmp_path: Path) -> None:
    bundle = stagepack.export(AnyInputs(), (torch.ones(2, 5),), out=tmp_path / "m.stagepack", dynamic_shapes=shapes)
    assert stagepack.load(bundle)(torch.ones(2, 7)).shape == (2, 7)


def test_inputs_of_any_number_and_by_name_have_their_shapes(tmp_path: Path) -> None:
    x, scale = torch.ones(2, 5), torch.ones(5)
    shapes = ({1: LENGTH}, {1: LENGTH}, {0: LENGTH})
    bundle = stagepack.export(AnyInputs(), (x, x), {"scale": scale}, out=tmp_path / "m", dynamic_shapes=shapes)
    answer = stagepack.load(bundle)(torch.ones(2, 7), torch.ones(2, 7), scale=torch.full((7,), 2.0))
    assert torch.equal(answer, torch.full((2, 7), 4.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_in_one_sentence(tmp_path: Path) -> None:
    net, x = torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)
    traced = torch.jit.trace(net, x)
    torch.jit.save(traced, tmp_path / "net.pt")
    sentence = "is TorchScript, which torch.export does not trace: export the torch.nn.Module that it was made of"
    for source, name in (
        (traced, "TopLevelTracedModule: "),
        (torch.jit.script(net), "RecursiveScriptModule: "),
        (torch.nn.Sequential(net, torch.jit.script(net)), "Sequential cannot be captured: 1: "),
        (tmp_path / "net.pt", f"{tmp_path / 'net.pt'}: "),
    ):
        with pytest.raises(CaptureError) as caught:
            stagepack.export(source, (x,), out=tmp_path / "m.stagepack")
        assert str(caught.value).startswith(f"{name}{sentence}")
    assert [*find_failing_modules(traced, Inputs(args=(x,)))] == []


def test_doctor_shows_no_log_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    fixed = module_of(lambda self, x: x + torch.tril_indices(int(x.shape[1]), 1).sum())
    inputs = Inputs(args=(torch.ones(2, 5),), dynamic_shapes={"x": {1: LENGTH}})
    for attempt in try_export(fixed, inputs, lambda _: None):
        if attempt.way == "strict=True":
            assert "specialized" in str(attempt.error)
            break  # the next one leaves a file of torch open
    assert capfd.readouterr() == ("", "")


def by_autograd(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)[0]


def by_jacobian(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    jacobian: torch.Tensor = torch.func.jacrev(lambda value: layer(value).sin())(x)
    return jacobian


def unless_equal(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = x if torch.equal(x, x + 1) else layer(x)
    return result


@pytest.mark.parametrize(
    ("derive", "advice"),
    [
        (by_autograd, "torch.autograd.grad"),
        (by_jacobian, "jacrev"),
        (unless_equal, "the line compares the data of tensors"),
    ],
)
def test_code_that_needs_data_or_gradients_has_advice(derive: Any, advice: str) -> None:
    model = module_of(lambda self, x: derive(self.layer, x), layer=torch.nn.Linear(4, 1)).eval()
    with pytest.raises(CaptureError) as caught:
        capture_module(model, Inputs(args=(torch.ones(2, 4),)))
    [sentence] = capture_advice([str(caught.value)])
    assert advice in sentence


@pytest.mark.parametrize("dim", [torch.export.Dim("rows"), torch.export.Dim.DYNAMIC])
def test_example_of_size_1_where_the_size_may_change_has_advice(dim: Any) -> None:
    inputs = Inputs(args=(torch.ones(1, 4),), dynamic_shapes=({0: dim},))
    with pytest.raises(CaptureError) as caught:
        capture_module(torch.nn.Linear(4, 1), inputs)
    assert "take an example of size 2 or more" in capture_advice([str(caught.value)])[0]


def test_advice_names_no_way_that_was_seen_to_fail() -> None:
    branch = module_of(lambda self, x: x + 1 if x.sum() > 0 else x)
    with pytest.raises(CaptureError) as caught:
        capture_module(branch, Inputs(args=(torch.ones(2),)))
    [sentence] = capture_advice([str(caught.value)])
    assert "draft_export" in sentence
    assert capture_advice([str(caught.value)], draft_fails=True) == [sentence[: sentence.index(", or pass")]]
