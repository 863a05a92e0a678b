"""Composite operators of libraries are written as the operators that they call; operators with kernels stay as they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.capture.programs import strict_captures
from stagepack.format.operators import needed_permissions
from stagepack.torch_internals import composites_of_libraries_decomposed, is_composite_of_library
from tests.modules import module_of


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.ops.composites.shifted(x.clamp(min=0) * factor)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x + x.shape[0]


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    defined = torch.library.Library("composites", "FRAGMENT")
    for operator in ("scaled", "scaled_with_backward", "scaled_by_a_kernel"):
        defined.define(f"{operator}(Tensor x, float factor) -> Tensor")
    defined.define("shifted(Tensor x) -> Tensor")
    defined.impl("shifted", _shifted, "CompositeImplicitAutograd")
    defined.impl("scaled", _scaled, "CompositeImplicitAutograd")
    defined.impl("scaled_with_backward", _scaled, "CompositeImplicitAutograd")
    defined.impl("scaled_with_backward", _scaled, "Autograd")
    defined.impl("scaled_by_a_kernel", _scaled, "CompositeExplicitAutograd")
    yield torch.ops.composites
    defined._destroy()


@pytest.mark.parametrize("strict", [False, True])
def test_composite_operator_is_written_as_what_it_calls(library: Any, strict: bool, tmp_path: Path) -> None:
    model = module_of(lambda _, x: library.scaled(x, 2.0) - 1)
    shapes = {"x": {0: Dim("rows", min=2, max=9)}}
    with strict_captures(strict):
        bundle = stagepack.export(model, (torch.randn(3, 4),), dynamic_shapes=shapes, out=tmp_path / "m.stagepack")
    assert needed_permissions([bundle.graph(0)]) == set()
    pipe = stagepack.load(bundle)
    for rows in (2, 3, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(pipe(x), model(x))


@pytest.mark.parametrize("operator", ["scaled_with_backward", "scaled_by_a_kernel"])
def test_operator_with_a_kernel_is_left_as_it_is(library: Any, operator: str) -> None:
    called = getattr(library, operator)
    assert not is_composite_of_library(called.default)
    assert is_composite_of_library(library.scaled.default)
    assert not is_composite_of_library(torch.ops.aten.linear.default)


def test_what_is_traced_decomposes_composites_of_libraries_alone(library: Any) -> None:
    model, args = module_of(lambda _, x: torch.nn.functional.linear(library.scaled(x, 2.0), x)), (torch.ones(3, 3),)
    with composites_of_libraries_decomposed():
        inside = torch.export.export(model, args)
    outside = torch.export.export(model, args)
    targets = [{str(node.target) for node in program.graph.nodes} for program in (inside, outside)]
    assert "aten.linear.default" in targets[0] & targets[1]
    assert "aten.clamp.default" in targets[0] - targets[1]
    assert "composites.scaled.default" in targets[1] - targets[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    ["Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig"],
)
def test_model_of_torchao_is_loaded_without_torchao(config: str, dtype: torch.dtype, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to(dtype).eval()
    quantization.quantize_(model, getattr(quantization, config)())
    shapes = {"input": {0: Dim("rows", min=2, max=64)}}
    bundle = stagepack.export(
        model, (torch.randn(4, 64, dtype=dtype),), dynamic_shapes=shapes, out=tmp_path / "m.stagepack"
    )
    assert needed_permissions([bundle.graph(0)]) == set()
    pipe = stagepack.load(bundle)
    for rows in (4, 9, 2):
        x = torch.randn(rows, 64, dtype=dtype) * rows
        assert torch.equal(pipe(x), model(x))
