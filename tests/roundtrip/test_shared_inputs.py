"""Inputs that share memory, one of which the model writes: answered as in the model, or refused."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import InputError


class WritesFirst(torch.nn.Module):
    """Writes an input before it reads the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return self.first(x) + self.second(y)


def load(tmp_path: Path, stages: int) -> tuple[WritesFirst, Any]:
    torch.manual_seed(0)
    model = WritesFirst().eval().requires_grad_(False)
    example = (torch.ones(2, 4), torch.ones(2, 4))
    return model, stagepack.load(stagepack.export(model, example, stages=stages, out=tmp_path / "m.stagepack"))


@pytest.mark.parametrize("stages", [2, 3])
def test_inputs_on_one_memory_are_refused_by_several_stages(stages: int, tmp_path: Path) -> None:
    _, pipe = load(tmp_path, stages)
    memory = torch.rand(4, 4)
    for x, y in [(memory[:2], memory[:2]), (memory[:2], memory[1:3]), (memory[:2].numpy(), memory[1:3].numpy())]:
        with pytest.raises(InputError, match="x and y share memory, and the model writes x: give copies"):
            pipe(x, y)


@pytest.mark.parametrize("stages", [1, 3])
def test_parts_of_one_memory_are_answered(stages: int, tmp_path: Path) -> None:
    model, pipe = load(tmp_path, stages)
    memory = torch.rand(4, 4)
    copy = memory.clone()
    assert torch.equal(pipe(memory[:2], memory[2:]), model(copy[:2], copy[2:]))
    assert torch.equal(memory, copy)
    reversed_rows = numpy.ascontiguousarray(memory.numpy())[::-1]
    found = pipe(reversed_rows[:2].copy(), reversed_rows[2:])
    expected = model(torch.tensor(reversed_rows[:2].copy()), torch.tensor(reversed_rows[2:].copy()))
    assert numpy.array_equal(found, expected.numpy())


def test_inputs_on_one_memory_are_answered_by_one_stage(tmp_path: Path) -> None:
    model, pipe = load(tmp_path, 1)
    value = torch.rand(2, 4)
    copy = value.clone()
    assert torch.equal(pipe(value, value), model(copy, copy))


@pytest.mark.parametrize("form", ["positions", "names", "a list"])
def test_one_tensor_given_twice_is_two_inputs(form: str, tmp_path: Path) -> None:
    class Weighted(torch.nn.Module):
        def forward(self, x: Any, y: Any = None) -> torch.Tensor:
            x, y = (x, y) if y is not None else x
            return x * 2 + y * 3

    def arguments(x: torch.Tensor, y: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return {"positions": ((x, y), {}), "names": ((), {"x": x, "y": y}), "a list": (([x, y],), {})}[form]

    example = torch.ones(2, 4)
    args, kwargs = arguments(example, example)
    pipe = stagepack.load(stagepack.export(Weighted(), args, kwargs, out=tmp_path / "m.stagepack"))
    args, kwargs = arguments(torch.rand(2, 4), torch.rand(2, 4))
    assert torch.equal(pipe(*args, **kwargs), Weighted()(*args, **kwargs))
