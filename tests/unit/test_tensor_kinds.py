"""Tensors that no capture takes are refused by name, wherever the model or its example has them."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import stagepack
from stagepack.errors import CaptureError, StagepackError, UnsupportedError
from tests.modules import module_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own on prototypes: nested, masked, sparse


class Wrapper(torch.Tensor):
    """A tensor of a class of its own, whose memory another tensor has."""

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.whole = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args = tuple(arg.whole if isinstance(arg, Wrapper) else arg for arg in args)
        result = func(*args, **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


def distributed() -> torch.Tensor:
    return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Replicate()])


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(4, 4), torch.ones(2, 4)])


def masked() -> torch.Tensor:
    tensor: torch.Tensor = torch.masked.masked_tensor(torch.ones(4, 4), torch.eye(4) > 0)
    return tensor


def functional() -> torch.Tensor:
    tensor: torch.Tensor = torch._to_functional_tensor(torch.ones(4, 4))
    return tensor


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)


# Each kind with what the error says of it.
KINDS: Mapping[str, tuple[Callable[[], torch.Tensor], str]] = {
    "lazy": (nn.UninitializedParameter, "has no shape before the model is first called: call the model once"),
    "distributed": (distributed, "is a DTensor, of which each process has a part: .*full_tensor"),
    "nested": (nested, "is a nested tensor: give a padded one"),
    "masked": (masked, "is a MaskedTensor, which has no memory of its own: make it a plain torch.Tensor"),
    "wrapper": (lambda: Wrapper(torch.ones(4, 4)), "is a Wrapper, which has no memory of its own"),
    "functional": (functional, "is a (Tensor|Parameter), which has no memory of its own"),
    "quantized": (quantized, r"is quantized \(torch.qint8\), which torch.export does not take: give tensor.dequantize"),
}
Holder = Callable[[torch.Tensor], tuple[nn.Module, Any]]


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return (
        tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    )


def as_parameter(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    return module_of(lambda self, x: x @ self.w, w=_parameter(tensor)), ()


def as_tied_parameter(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    parameter = _parameter(tensor)
    inner = module_of(lambda self, x: x @ self.v, v=parameter)
    return module_of(lambda self, x: self.inner(x) @ self.w, w=parameter, inner=inner), ()


def as_buffer(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    model = module_of(lambda self, x: x @ self.w)
    model.register_buffer("w", tensor)
    return model, ()


def as_unused_buffer_within(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    inner = module_of(lambda self, x: x + 1)
    inner.register_buffer("w", tensor)
    return module_of(lambda self, x: self.inner(x), inner=inner), ()


def as_item(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    model: Any = module_of(lambda self, x: x @ self.tables[0]["w"])
    model.tables = [{"w": tensor}]
    return model, ()


def as_input(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    return module_of(lambda self, x, w: x @ w), (tensor,)


def as_input_in_a_dict(tensor: torch.Tensor) -> tuple[nn.Module, Any]:
    return module_of(lambda self, x, w: x @ w["w"]), ({"w": tensor},)


PLACES: Mapping[str, Holder] = {
    "the parameter w": as_parameter,
    "the parameter (w|inner.v)": as_tied_parameter,
    "the buffer w": as_buffer,
    "the buffer inner.w": as_unused_buffer_within,
    "the attribute tables": as_item,
    "the input w": as_input,
    "the input w ": as_input_in_a_dict,
}


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            stack.callback(torch.distributed.destroy_process_group)
        yield


@pytest.mark.parametrize(("kind", "place"), list(itertools.product(KINDS, PLACES)))
def test_tensor_that_no_capture_takes_is_named(kind: str, place: str, tmp_path: Path) -> None:
    make, says = KINDS[kind]
    model, further_args = PLACES[place](make())
    with pytest.raises(CaptureError, match=f"{place.strip()} {says}"):
        stagepack.export(model, (torch.ones(2, 4), *further_args), out=tmp_path / "m.stagepack")


def test_attributes_that_the_model_does_not_read_may_have_no_memory(tmp_path: Path) -> None:
    for kind, (make, _) in KINDS.items():
        model: Any = module_of(lambda self, x: x + 1)
        model.kept = [make()]
        bundle = stagepack.export(model, (torch.ones(2),), out=tmp_path / kind)
        assert torch.equal(stagepack.load(bundle)(torch.ones(2)), torch.full((2,), 2.0)), kind


def test_lazy_model_is_exported_once_it_was_called(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).eval(), torch.ones(2, 3)
    for call in (
        functools.partial(stagepack.plan, model, (x,), stages=1),
        functools.partial(_export, model, x, tmp_path),
    ):
        with pytest.raises(CaptureError, match=r"the parameter 0.weight has no shape .* call the model once"):
            call()
    expected = model(x)
    assert torch.equal(stagepack.load(_export(model, x, tmp_path))(x), expected)


def test_model_without_data_is_planned_and_not_exported(tmp_path: Path) -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    assert len(stagepack.plan(model, (torch.ones(2, 4),), stages=2).stages) == 2
    with pytest.raises(UnsupportedError, match=re.escape("'0.weight' has no data: it is a FakeTensor")):
        _export(model, torch.ones(2, 4), tmp_path)


def _export(model: nn.Module, x: torch.Tensor, folder: Path) -> Any:
    return stagepack.export(model, (x,), out=folder / "m.stagepack")


INPUTS: Mapping[str, tuple[Callable[[], torch.Tensor], str]] = {
    "opaque": (lambda: torch.ones(4, 4).to_mkldnn(), "of the layout torch._mkldnn, which copy.deepcopy does not copy"),
    "subclass": (
        lambda: torch.ones(4, 4).as_subclass(type("Mine", (torch.Tensor,), {})),
        "is a Mine, which copy.deepcopy does not copy: give a plain torch.Tensor",
    ),
    "freed": (lambda: _freed(torch.ones(4, 4)), "has no data: its storage is empty"),
}


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", INPUTS)
def test_input_without_a_copy_is_named(kind: str, tmp_path: Path) -> None:
    make, says = INPUTS[kind]
    with pytest.raises(CaptureError, match=f"the input w .*{says}"):
        stagepack.export(module_of(lambda self, x, w: x @ w), (torch.ones(4), make()), out=tmp_path / "m.stagepack")


RESULTS: Mapping[str, Callable[[Any, torch.Tensor], Any]] = {
    "masked": lambda _, x: torch.masked.masked_tensor(x, x > 0),
    "nested": lambda _, x: torch.nested.as_nested_tensor([x, x]),
    "wrapper": lambda _, x: Wrapper(x),
    "meta": lambda _, x: x.to("meta"),
    "opaque": lambda _, x: x.to_mkldnn(),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_result_that_no_bundle_returns_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StagepackError):
        stagepack.export(module_of(RESULTS[kind]), (torch.ones(2, 4),), out=tmp_path / "m.stagepack")
