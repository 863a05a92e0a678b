"""What a stage asserts of its values, which ONNX cannot: the stage stays in torch, unless the assertion cannot fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.errors import InputError
from tests.modules import module_of

EXAMPLE: dict[str, Any] = {"args": (torch.ones(4), torch.tensor(3)), "dynamic_shapes": ({0: Dim.AUTO}, None)}


def first_rows(self: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    rows: Any = count.item()
    torch._check(rows >= 0)
    torch._check(rows <= x.shape[0])
    return x[:rows] * 2


def few_marked_rows(self: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    rows = x.nonzero()
    torch._check(rows.shape[0] < 5)
    return rows * 2


def positive(self: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x > 0).all(), "expected positive values")
    return x * 2


@pytest.mark.parametrize(
    ("function", "may_fail"),
    [
        (first_rows, True),
        (few_marked_rows, True),
        (positive, True),
        (lambda self, x, count: x[x > 0.5], False),
        (lambda self, x, count: x.repeat_interleave(2), False),
    ],
)
def test_stage_whose_assertion_may_fail_stays_in_torch(
    tmp_path: Path, function: Callable[..., torch.Tensor], may_fail: bool
) -> None:
    added = stagepack.add_onnx(stagepack.export(module_of(function), **EXAMPLE, out=tmp_path / "x", stages=1))
    assert ["no ONNX form of aten._assert" in text for text in added.torch_only.values()] == [True] * may_fail


def test_asserted_condition_on_sizes_is_a_guard_in_every_runtime(tmp_path: Path) -> None:
    model = module_of(lambda self, x, count: x * 2 if x.shape[0] % 3 == 1 else x)
    program = torch.export.export(model, **EXAMPLE, prefer_deferred_runtime_asserts_over_guards=True)
    added = stagepack.add_onnx(stagepack.export(program, out=tmp_path / "x", stages=1))
    assert not added.torch_only
    for runtime in ("torch", "onnxruntime"):
        pipeline = stagepack.load(added.bundle, runtime=runtime)
        assert torch.equal(torch.as_tensor(pipeline(torch.ones(7), torch.tensor(1))), torch.full((7,), 2.0))
        with pytest.raises(InputError, match="expected s0 % 3 == 1, for which the model was captured"):
            pipeline(torch.ones(6), torch.tensor(1))
