"""Constants of a call and of a graph: 1 is not 1.0, 0.0 is not -0.0, and a NaN keeps its sign."""

import enum
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stagepack
from stagepack.errors import InputError, UnsupportedError
from stagepack.roads.compare import compare_bundles
from tests.modules import module_of

X = torch.tensor([1.0, -1.0])
# NaNs of other bits than `math.nan`, as 0/0 on some processors gives them.
NEGATIVE_NAN, MARKED_NAN = (
    struct.unpack("d", struct.pack("Q", bits))[0] for bits in (0xFFF8 << 48, (0x7FF8 << 48) + 5)
)


class Color(enum.IntEnum):
    """An integer that is none."""

    RED = 1


def run_scaled(_: Any, x: torch.Tensor, zero: float, pair: Any, table: Any, *, flag: Any = None) -> torch.Tensor:
    """A model whose constants are anywhere in its arguments."""
    (key,) = table
    return 1 / torch.where(x > 0, x, zero) + pair[0] + key * 0.5


EXPORTED: dict[str, Any] = {"zero": 0.0, "pair": [0.0, 1], "table": {0.0: True}, "flag": None}
OTHERS: list[dict[str, Any]] = [
    {"zero": -0.0},
    {"zero": 0},
    {"zero": False},
    {"zero": None},
    {"zero": "0.0"},
    {"zero": 0j},
    {"zero": math.nan},
    {"zero": np.float64(0.0)},
    {"zero": np.float32(0.0)},
    {"zero": torch.tensor(0.0)},
    {"pair": [-0.0, 1]},
    {"pair": [0.0, True]},
    {"pair": [0.0, 1.0]},
    {"pair": [0.0, Color.RED]},
    {"pair": [0.0, np.int64(1)]},
    {"table": {-0.0: True}},
    {"table": {0: True}},
    {"table": {False: True}},
    {"table": {0.0: 1}},
    {"table": {0.0: 1.0}},
    {"flag": False},
    {"flag": b""},
    {"flag": ""},
    {"flag": torch.float32},
    {"flag": torch.device("cpu")},
    {"flag": torch.strided},
]


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model with the constants that it was exported with."""
    out = tmp_path_factory.mktemp("constants") / "b.stagepack"
    return stagepack.load(stagepack.export(module_of(run_scaled), (X,), EXPORTED, out=out))


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_constant_of_another_type_or_other_bits_is_refused(other: dict[str, Any], pipe: Any) -> None:
    assert torch.equal(pipe(X, **EXPORTED), module_of(run_scaled)(X, **EXPORTED))
    with pytest.raises(InputError):
        pipe(X, **(EXPORTED | other))


@pytest.mark.parametrize("zero", [-0.0, math.nan, math.inf, -math.inf, 5e-324])
def test_a_special_constant_is_taken_as_it_was_exported(zero: float, tmp_path: Path) -> None:
    arguments = EXPORTED | {"zero": zero, "pair": (zero, "text"), "table": {-0.0: zero}}
    bundle = stagepack.export(module_of(run_scaled), (X,), arguments, out=tmp_path / "b.stagepack")
    pipe = stagepack.load(bundle)
    assert torch.equal(bits(pipe(X, **arguments)), bits(module_of(run_scaled)(X, **arguments)))
    for other in (0.0, -zero, NEGATIVE_NAN, MARKED_NAN):
        with pytest.raises(InputError, match="at export"):
            pipe(X, **(arguments | {"zero": other}))


@pytest.mark.parametrize("constant", [NEGATIVE_NAN, MARKED_NAN, 0j, Color.RED, 2**63])
def test_a_constant_that_no_bundle_can_hold_is_refused(constant: Any, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, stagepack.errors.CaptureError)):
        stagepack.export(module_of(run_scaled), (X,), EXPORTED | {"flag": constant}, out=tmp_path / "b.stagepack")


class Layer(torch.nn.Module):
    """A layer with a constant in its code."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, bias=False)
        self.constant = constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(self.linear(x), self.constant)


class Layers(torch.nn.Module):
    """Layers that are equal but for their constants."""

    def __init__(self, constants: list[float]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Layer, constants))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


CONSTANTS: list[Callable[[], list[float]]] = [
    lambda: [0.0, -0.0, 0.0, -0.0],
    lambda: [-0.0, 0.0, 0.0, -0.0],
    lambda: [math.nan, NEGATIVE_NAN, MARKED_NAN, math.nan],
    lambda: [1, 1.0, True, 1],
]


@pytest.mark.parametrize("constants", CONSTANTS)
@torch.no_grad()
def test_constants_of_equal_layers_stay_apart(constants: Callable[[], list[float]], tmp_path: Path) -> None:
    model = Layers(constants()).eval()
    bundle = stagepack.export(model, (X,), out=tmp_path / "two.stagepack", stages=2)
    whole = stagepack.recut(bundle, out=tmp_path / "one.stagepack", stages=1)
    again = stagepack.recut(whole, out=tmp_path / "again.stagepack", stages=2)
    expected = list(map(bits, model(X)))
    stage = stagepack.load_stage(whole, 0, modules=True)
    for answer in (stagepack.load(bundle)(X), stagepack.load(whole)(X), stagepack.load(again)(X), stage(X)):
        assert all(map(torch.equal, map(bits, answer), expected))
    differences = compare_bundles(bundle, again)
    assert (differences.graph, dict(differences.weights)) == ((), {})


@torch.no_grad()
def test_models_that_differ_in_the_sign_of_a_zero_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = (Layers([zero, 1.0]).eval() for zero in (0.0, -0.0))
    second.load_state_dict(first.state_dict())
    bundles = [
        stagepack.export(model, (X,), out=tmp_path / f"{index}.stagepack")
        for index, model in enumerate((first, second))
    ]
    assert compare_bundles(*bundles).graph
