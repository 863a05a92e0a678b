"""What `export` accepts as a model, and what it says when the model cannot be captured."""

import importlib.metadata
import math
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from packaging.version import InvalidVersion, Version
from torch import nn
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.model_runs import are_identical
from stagepack.capture.torch_messages import describe_error
from stagepack.errors import CaptureError, OptionError, UnsupportedError
from stagepack.torch_internals import uncompiled_module
from tests.modules import module_of
from tools.benchmark_models import llama


class Net(nn.Module):
    """Two layers; it has no truth value, as a module of a user may."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def __bool__(self) -> bool:
        raise AssertionError("the truth value of a user's module is not asked for")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.relu(self.first(x)))
        return y


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 4)


def test_a_compiled_module_is_exported_as_the_original_one(x: torch.Tensor, tmp_path: Path) -> None:
    net = Net()
    compiled: Any = torch.compile(net)
    assert uncompiled_module(compiled) is net
    bundle = stagepack.export(compiled, (x,), out=tmp_path / "m.stagepack", split_at=["last"])
    names = [weight.names for stage in range(2) for weight in bundle.graph(stage).weights]
    assert names == [("first.weight",), ("first.bias",), ("last.weight",), ("last.bias",)]
    assert torch.equal(stagepack.load(bundle)(x), net(x))


@pytest.mark.process
def test_a_module_compiled_in_place_is_exported_as_it_was(x: torch.Tensor, tmp_path: Path) -> None:
    net = Net()
    net.compile(backend="eager")
    bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack")
    assert bundle.graph(0).weights[0].names == ("first.weight",)
    assert torch.equal(stagepack.load(bundle)(x), Net.forward(net, x))


def test_a_module_with_a_compiled_part_keeps_the_names_of_its_state_dict(x: torch.Tensor, tmp_path: Path) -> None:
    first: Any = Net()
    first.first = torch.compile(first.first, backend="eager")
    net = nn.Sequential(first, nn.ReLU())
    bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack")
    assert {weight.names[0] for weight in bundle.graph(0).weights} == set(net.state_dict())
    assert torch.equal(stagepack.load(bundle)(x), net(x))


@pytest.mark.parametrize(
    ("model", "kind"), [(torch.relu, "builtin_function_or_method"), (Net, "type"), (None, "NoneType"), (3, "int")]
)
def test_what_is_no_model_is_refused(model: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=f"expected a torch.nn.Module, an ExportedProgram or a path, found {kind}"):
        stagepack.export(model, out=tmp_path / "m.stagepack")


def test_an_error_of_the_model_itself_has_its_line(x: torch.Tensor, tmp_path: Path) -> None:
    class OnlyTraced(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                raise KeyError("missing")
            return super().forward(x)

    reason = r"OnlyTraced fails on its example inputs: 'missing' \(.*test_capture.py, line \d+, in forward\)"
    with pytest.raises(CaptureError, match=reason):
        stagepack.export(OnlyTraced(), (x,), out=tmp_path / "m.stagepack")


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (torch.zeros(2, 4), None, r"args: expected a tuple of example inputs, such as \(x,\), found Tensor"),
        ((), [1], "kwargs: expected a dict of example inputs by name, found list"),
    ],
)
def test_example_inputs_of_another_type_are_refused(args: Any, kwargs: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=reason):
        stagepack.export(Net(), args, kwargs, out=tmp_path / "m.stagepack")


def test_numpy_arrays_are_example_inputs(tmp_path: Path) -> None:
    model = module_of(lambda self, pair, scale: (pair[0] + pair[1]) * scale)
    first, second = numpy.ones((2, 3), numpy.float32), numpy.full((2, 3), 2, numpy.float32)
    bundle = stagepack.export(model, ([first, second],), {"scale": numpy.float32(2)}, out=tmp_path / "m.stagepack")
    answer = stagepack.load(bundle)([first, second], scale=numpy.array(2, numpy.float32))
    assert numpy.array_equal(answer, numpy.full((2, 3), 6, numpy.float32))
    with pytest.raises(CaptureError, match="an array of object has no tensor"):
        stagepack.export(model, (numpy.array([model]),), out=tmp_path / "objects.stagepack")


def test_an_error_in_a_library_has_its_package_and_its_line(x: torch.Tensor, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Calls(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            transformers.activations.get_activation("none")
            return x

    line = r"transformers [\d.]+, transformers/activations.py, line \d+, in get_activation: raise KeyError"
    with pytest.raises(CaptureError, match=line):
        stagepack.export(Calls(), (x,), out=tmp_path / "m.stagepack")


def test_a_module_around_a_model_of_transformers_returns_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = llama(layers=1, hidden=8, intermediate=8, heads=2, kv_heads=2, vocab_size=16)
    around = module_of(lambda self, tokens: self.model(input_ids=tokens, use_cache=True), model=model)
    tokens = torch.tensor([[1, 2, 3]])
    bundle = stagepack.export(around, (tokens,), out=tmp_path / "m.stagepack", stages=1)
    answer = stagepack.load(bundle)(tokens)
    with torch.no_grad():
        expected = around(tokens)
    (cache,) = expected.past_key_values.layers
    assert torch.equal(answer["logits"], expected.logits)
    assert torch.equal(answer["past_key_values"]["layers"][0]["keys"], cache.keys)


class _Holder:
    """Holds a value. Registered as a container that holds itself, which cannot be flattened."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def test_containers_that_cannot_be_flattened_pass_between_modules(x: torch.Tensor, tmp_path: Path) -> None:
    doubling = module_of(lambda self, holder: holder.value * 2)
    net = module_of(lambda self, x: self.doubling(_Holder(x + 1)), doubling=doubling)
    pytree.register_pytree_node(_Holder, lambda holder: ([holder], None), lambda children, _: next(iter(children)))
    stagepack.export(net, (x,), out=tmp_path / "net.stagepack")
    assert torch.equal(stagepack.load(tmp_path / "net.stagepack")(x), (x + 1) * 2)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_answers_are_identical_if_all_bits_but_those_of_nan_are(dtype: torch.dtype) -> None:
    zeros, nan = torch.zeros(2).to(dtype), torch.full((2,), math.nan).to(dtype)
    negative_zeros = (-torch.zeros(2)).to(dtype)
    assert are_identical([zeros, nan, 0.0, math.nan], [zeros.clone(), nan.clone(), 0.0, math.nan])
    assert not are_identical(zeros, negative_zeros)
    assert not are_identical(zeros, nan)
    assert not are_identical(0.0, -0.0)
    assert not are_identical(1, 1.0)


def test_warnings_of_tried_sizes_do_not_reach_the_user(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    dynamic_shapes = {"x": {0: torch.export.Dim.AUTO}}
    model = module_of(lambda self, x: x.std(0))  # warns of no rows
    stagepack.export(model, (torch.randn(4, 3),), out=tmp_path / "m.stagepack", dynamic_shapes=dynamic_shapes)
    assert "degrees of freedom" not in capfd.readouterr().err


def test_pair_of_positional_and_named_inputs_is_explained(x: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"pass stagepack\.Inputs\(args=\.\.\., kwargs=\.\.\.\)"):
        stagepack.export(Net(), ((x,), {}), out=tmp_path / "m.stagepack")


def test_inputs_on_another_device_than_the_model_are_named(x: torch.Tensor, tmp_path: Path) -> None:
    says = "the input at position 0 is on meta and the model on cpu: move one of them, as in x.to('cpu')"
    with pytest.raises(CaptureError, match=re.escape(says)):
        stagepack.export(Net(), (x.to("meta"),), out=tmp_path / "m.stagepack")


def test_export_without_the_onnx_models_that_fail_says_what_is_written(x: torch.Tensor, tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(OptionError, match=r"m\.stagepack is written without the ONNX models.*stagepack onnx"):
        stagepack.export(net, (x,), out=tmp_path / "m.stagepack", onnx=True, rtol=-1)
    assert torch.equal(stagepack.load(tmp_path / "m.stagepack")(x), net(x))


def test_errors_in_a_library_read_the_installed_packages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read_packages, reads = importlib.metadata.packages_distributions, []

    def counted() -> object:
        reads.append(1)
        return read_packages()

    monkeypatch.setattr(importlib.metadata, "packages_distributions", counted)
    for _ in range(3):
        with pytest.raises(InvalidVersion) as raised:
            Version("no version")
        assert f"packaging {importlib.metadata.version('packaging')}, packaging/version.py, line" in describe_error(
            raised.value
        )
    assert len(reads) <= 1


@pytest.mark.parametrize(
    ("forward", "x", "says"),
    [
        (
            lambda _, x: torch.sparse.mm(x, torch.ones(3, 2)),
            torch.eye(3).to_sparse(),
            "the input x: .* torch.sparse_coo",
        ),
        (lambda _, x: x.to_sparse(), torch.eye(3), "the result to_sparse: .* return its indices"),
    ],
)
def test_sparse_inputs_and_results_are_refused(forward: Any, x: torch.Tensor, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=says):
        stagepack.export(module_of(forward), (x,), out=tmp_path / "m.stagepack")
