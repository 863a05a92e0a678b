"""Operators of other libraries, operators that draw random numbers, and operators that name a device."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linear, linears

CASES: list[Case] = []
row = Rows(CASES, "operators")
_CUSTOM = 'custom operators by `allow_ops=["mylib"]`'
_RANDOM = "random operators"
_DEVICE = "factory calls with a device"
_QUANTIZED = "torchao weight-only int8 and int4 models (their subclass weights flattened)"
_LIBRARY = "tests.zoo.rows.zoolib"


def _library() -> Any:
    """The custom operators of the tests."""
    from tests.zoo.rows import zoolib

    return zoolib


@row(_CUSTOM, operators=_LIBRARY)
def custom_operators() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = lib.smooth(self.a(x), None, 0.25)
        mean, variance = lib.moments(self.b(y), [0])
        return lib.smooth(self.c(y), self.weight) + mean, variance

    return Lambda(run, **linears("abc"), weight=torch.nn.Parameter(torch.randn(4))), given()


@row(_CUSTOM, operators=_LIBRARY)
def custom_operator_of_lists() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = lib.spread([self.a(x), self.b(x)], [2, 3])
        return self.d(self.c(torch.cat([second, first])))

    return Lambda(run, **linears("abcd")), given()


@row(_CUSTOM, operators=_LIBRARY)
def custom_operator_that_writes() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * self.memory
        lib.remember(self.memory, y)
        return self.c(self.b(y)) + self.memory

    return Lambda(run, **linears("abc"), memory=torch.ones(4)).requires_grad_(False), given()


@row(_CUSTOM, operators=_LIBRARY)
def custom_operator_that_writes_what_is_never_read() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        lib.remember(self.memory, y)
        return self.c(self.b(y))

    return Lambda(run, **linears("abc"), memory=torch.zeros(4)).requires_grad_(False), given()


@row(_CUSTOM, operators=_LIBRARY)
def custom_operator_that_writes_several() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * self.left
        lib.remember_all([self.left, self.whole[1]], y)
        return self.c(self.b(y)) * self.left + self.whole.sum(0)

    held = {"left": torch.ones(4), "whole": torch.zeros(2, 4)}
    return Lambda(run, **linears("abc"), **held).requires_grad_(False), given()


@row(_CUSTOM, operators=_LIBRARY)
def custom_operator_that_writes_and_gives() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, total = lib.step(self.count, self.a(x))
        z, again = lib.step(self.count, self.b(y))
        return self.c(z) * self.count, total, again

    return Lambda(run, **linears("abc"), count=torch.zeros(1)).requires_grad_(False), given()


@row(_CUSTOM, operators=_LIBRARY)
def custom_operator_that_writes_an_activation() -> Model:
    lib = _library()

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = self.b(y)
        lib.remember(y[0], z)
        return self.d(self.c(z)) + y

    return Lambda(run, **linears("abcd")).requires_grad_(False), given()


@row.of(_RANDOM, "ab")
def dropout_that_draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(self.b(self.a(x)), 0.5) + torch.rand(4)


@row.of(_RANDOM, "abcd")
def draws_of_every_kind(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = self.a(x) + torch.randn_like(x)
    x = self.b(x) * torch.bernoulli(torch.full((4,), 0.5)) + torch.normal(0.0, torch.ones(4))
    x = self.c(x) + torch.randint(0, 9, (4,)) + torch.empty(4).uniform_()
    order = torch.randperm(4)
    return self.d(x)[:, order], order, torch.multinomial(x.softmax(-1), 2)


@row.of(_RANDOM, "abcd")
def draws_in_two_branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The branches need nothing of each other, but draw from one stream of random numbers, in this order."""
    left = torch.nn.functional.dropout(self.b(torch.nn.functional.dropout(self.a(x), 0.5)), 0.5)
    right = torch.nn.functional.dropout(self.d(self.c(x) + torch.rand(4)), 0.5)
    return left @ right.t()


@row(_RANDOM)
def layers_with_dropout_in_train_mode() -> Model:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train(), given(torch.randn(2, 5, 8))


@row.of(_RANDOM, "abcd")
def one_draw_used_in_every_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cheap to make, but it must be made once."""
    noise = torch.rand(4)
    mask = noise > 0.5
    for layer in (self.a, self.b, self.c, self.d):
        x = layer(x) * mask
    return x


@row.of(_DEVICE, "abc", lambda: (torch.randn(2, 4),), dynamic=({0: Dim("batch", min=2, max=64)},))
def factories_with_a_device(self: Any, x: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(x.shape[0], 4, device=x.device)
    x = self.a(x) + torch.arange(4, device=x.device) + torch.ones(4, device="cpu")
    x = self.b(x) + torch.full((4,), 0.5, dtype=x.dtype, device=x.device) + torch.eye(4)[0]
    return self.c(torch.where(x > 0, x, zeros)) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


@row.of(_DEVICE, "abc")
def moves_to_a_device(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x).to("cpu")
    x = self.b(x).to(x.device, torch.float64)
    return self.c(x.cpu().float()).to(self.a.weight.device)


@row.of(_DEVICE, "ab")
def text_arguments(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.gelu(self.a(x), approximate="tanh")
    y = torch.einsum("bi,ij->bj", self.b(y), self.a.weight) + math.inf * 0.0
    return y + torch.full((4,), -math.inf).exp()


@row.of(
    _DEVICE,
    "abcd",
    lambda: (torch.randn(2, 4), torch.tensor([0, 2])),
    held=lambda: {"table": torch.zeros(4)},
    frozen=True,
)
def optional_tensors_in_a_list(self: Any, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Indexing passes a list of tensors and None, by reading and by writing."""
    y = self.a(x)
    picked = self.b(y)[:, index]
    z = self.c(y)
    z[:, index] = picked + 1
    self.table[index] = z[0, index]
    return self.d(z), picked, x[None, :, index, ...], self.table


# torch 2.11 states a wrong shape for the hidden state of an LSTM with several layers.
@row.of(
    _DEVICE,
    "ab",
    lambda: (torch.randn(2, 5, 4),),
    held=lambda: {"long": torch.nn.LSTM(4, 4, num_layers=2, batch_first=True), "short": torch.nn.GRU(4, 4)},
    evaluates=True,
    oldest_torch="2.13",
)
def recurrent_layers(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operators that take lists of weights."""
    y, (hidden, cell) = self.long(x)
    z, last = self.short(self.a(y))
    return self.b(z), hidden, cell, last


def _quantized(config: Callable[[ModuleType], Any]) -> torch.nn.Sequential:
    """Three layers with weights that torchao has quantized, by a configuration of its own."""
    from torchao import quantization

    model = torch.nn.Sequential(linear(64), torch.nn.ReLU(), linear(64), torch.nn.ReLU(), linear(64))
    quantization.quantize_(model.eval().requires_grad_(False), config(quantization))
    return model


@row(_QUANTIZED)
def int8_weights() -> Model:
    return _quantized(lambda ao: ao.Int8WeightOnlyConfig()), given(torch.randn(2, 64))


@row(_QUANTIZED)
def int8_weights_in_bfloat16() -> Model:
    return _quantized(lambda ao: ao.Int8WeightOnlyConfig()).to(torch.bfloat16), given(torch.randn(2, 64).bfloat16())


@row(_QUANTIZED, operators="torchao.quantization")
def int8_weights_in_groups() -> Model:
    return _quantized(lambda ao: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32))), given(torch.randn(2, 64))


@row(_QUANTIZED, operators="torchao.quantization")
def int4_weights() -> Model:
    """The one int4 form of torchao that runs on a CPU: four bits of range, held as int8."""

    def config(ao: ModuleType) -> Any:
        return ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            granularity=ao.PerGroup(32),
        )

    batch = Dim("batch", min=2, max=64)
    return _quantized(config), Inputs(args=(torch.randn(2, 64),), dynamic_shapes=({0: batch},))


@row(_QUANTIZED)
def int8_weights_tied() -> Model:
    model = _quantized(lambda ao: ao.Int8WeightOnlyConfig())
    model[4].weight = model[0].weight
    return model, given(torch.randn(2, 64))


@row(_QUANTIZED)
def int8_weights_unwrapped() -> Model:
    """With torchao's own way to make plain weights of the subclass."""
    from torchao.utils import unwrap_tensor_subclass

    model = _quantized(lambda ao: ao.Int8WeightOnlyConfig())
    return unwrap_tensor_subclass(model), given(torch.randn(2, 64))
