"""Constants, parameters and buffers in the branches and loop bodies of higher-order operators."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import stagepack
from stagepack.errors import UnsupportedError

X = torch.tensor([[1.0, 2.0], [-0.5, 0.25], [3.0, 1.0]])


class Branches(torch.nn.Module):
    """A model of a function, with a parameter, buffers and a constant that is an attribute."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = torch.nn.Linear(2, 2)
        self.plain = torch.tensor([1.0, 2.0])
        self.register_buffer("kept", torch.tensor([3.0, 4.0]))
        self.register_buffer("hidden", torch.tensor([5.0, 6.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def one_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda y: y * torch.tensor([1.0, 2.0]), lambda y: y - 1, (x,))
    return result


def both_branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    def first(y: torch.Tensor) -> torch.Tensor:
        return m.linear(y) * torch.tensor([1.0, 2.0]) + m.plain + torch.tensor(7)

    def second(y: torch.Tensor) -> torch.Tensor:
        return y - torch.tensor([[5.0, 6.0]]) + m.kept * m.hidden - m.plain.new_tensor([1.0, 0.5])

    result: torch.Tensor = torch.cond(x.sum() > 0, first, second, (x,))
    return result


def shared_constant(m: Any, x: torch.Tensor) -> torch.Tensor:
    constant = torch.tensor([1.0, 2.0])
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda y: y * constant, lambda y: y - constant, (x,))
    return result


def nested_branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(
            y.sum() > 1, lambda z: z * torch.tensor([1.0, 2.0]) + m.plain, lambda z: z - torch.tensor([5.0, 6.0]), (y,)
        )
        return result * torch.tensor(0.5)

    result: torch.Tensor = torch.cond(x.sum() > 0, inner, lambda y: y - m.kept, (x,))
    return result


def loop_in_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda y: turns(m, y), lambda y: y * torch.tensor(2.0), (x,))
    return result


def turns(m: Any, x: torch.Tensor) -> torch.Tensor:
    def turn(count: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return count + 1, y * torch.tensor([1.0, 0.5]) + m.plain

    result: torch.Tensor = while_loop(lambda count, y: count < torch.tensor(3), turn, (torch.tensor(0), x))[1]
    return result


def mapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = map_slices(lambda y, *_: y * torch.tensor([1.0, 2.0]) + m.plain, x)
    return result


def summed(m: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = associative_scan(lambda a, b: a + b * torch.tensor([1.0, 2.0]), x, 0, combine_mode="generic")
    return result


def vectorized(m: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.vmap(lambda y: y * torch.tensor([1.0, 2.0]) + m.plain)(x)
    return result


def other_modes(m: Any, x: torch.Tensor) -> torch.Tensor:
    def in_mode(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return y * torch.tensor([1.0, 2.0])

    with torch.autocast("cpu"):
        cast = m.linear(x) * torch.tensor([3.0, 4.0])
    result: torch.Tensor = torch.cond(x.sum() > 0, in_mode, lambda y: y + torch.tensor(1.0), (x,))
    return result + cast.float()


def two_calls(m: Any, x: torch.Tensor) -> torch.Tensor:
    for constant in (1.0, 2.0):
        x = torch.cond(
            x.sum() > 0,
            lambda y, constant=constant: m.linear(y) * torch.tensor([constant, 2.0]),
            lambda y: y - torch.tensor([1.0, 3.0]),
            (x,),
        )
    return x


FUNCTIONS = [
    one_branch, both_branches, shared_constant, nested_branches, loop_in_branch, turns, mapped, summed, vectorized,
    other_modes, two_calls,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@torch.no_grad()
def test_branches_may_hold_constants(function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branches(function).eval().requires_grad_(False)
    bundle = stagepack.export(model, (X,), out=tmp_path / "b.stagepack")
    bundle.verify()
    assert not any(stage.state for stage in bundle.stages)
    pipe = stagepack.load(bundle)
    for x in (X, -X, X * 0.1, X * 5):
        assert torch.equal(pipe(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_a_captured_program_may_hold_constants_in_branches(strict: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branches(nested_branches).eval().requires_grad_(False)
    program = torch.export.export(model, (X,), strict=strict)
    held_before = set(program.constants)
    pipe = stagepack.load(stagepack.export(program, out=tmp_path / "b.stagepack"))
    for x in (X, -X, X * 0.1):
        assert torch.equal(pipe(x), model(x))
    assert set(program.constants) == held_before


@torch.no_grad()
def test_stages_are_cut_between_branches_with_constants(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branches(two_calls).eval().requires_grad_(False)
    bundle = stagepack.export(model, (X,), out=tmp_path / "two.stagepack", stages=2)
    whole = stagepack.recut(bundle, out=tmp_path / "one.stagepack", stages=1)
    again = stagepack.recut(whole, out=tmp_path / "again.stagepack", stages=2)
    for pipe in map(stagepack.load, (bundle, whole, again)):
        for x in (X, -X, X * 0.1):
            assert torch.equal(pipe(x), model(x))
    assert (again.path / "manifest.json").read_bytes() == (bundle.path / "manifest.json").read_bytes()


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_a_constant_that_torch_cannot_take_along_is_refused(tmp_path: Path) -> None:
    def attention(m: Any, q: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda score, *_: score * torch.tensor(2.0))

    with pytest.raises(UnsupportedError, match="buffers of the module"):
        stagepack.export(Branches(attention), (torch.ones(1, 2, 16, 8),), out=tmp_path / "b.stagepack")
