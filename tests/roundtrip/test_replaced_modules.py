"""Modules in the place of those of a stage: what fits goes through as in the model, what does not is told."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stagepack
from stagepack.errors import InputError
from tests.modules import module_of
from tests.zoo.called import is_equal


class Leaky(nn.Module):
    """Its modules use and give more than their arguments and results tell."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()
        self.user = User(self)
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.keeper(x)
        return self.user(y) + self.keeper.kept, *self.pair(x, x)


class Keeper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 3
        return x + 1


class User(nn.Module):
    def __init__(self, outer: Leaky) -> None:
        super().__init__()
        self.outer = [outer]

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.outer[0].keeper.kept


class Pair(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a * b, a - b]


@torch.no_grad()
def test_what_goes_around_the_arguments_is_told(tmp_path: Path) -> None:
    model, x = Leaky(), torch.randn(4)
    stage: Any = stagepack.load_stage(stagepack.export(model, (x,), out=tmp_path / "m.stagepack"), 0, modules=True)
    assert is_equal(stage(x), model(x))
    assert torch.equal(stage.keeper(x), x + 1)
    with pytest.raises(InputError, match=r"user uses mul_0, which its arguments do not determine"):
        stage.user(x)
    with pytest.raises(InputError, match=r"b was the same as a at export"):
        stage.pair(x, x + 1)
    with pytest.raises(InputError, match=r"expected a list, found Tensor"):
        replaced(stage, "pair", lambda a, b: a * b)(x)
    with pytest.raises(InputError, match=r"result of pair\[1\]: dimension 0: expected 4 .*, found 2"):
        replaced(stage, "pair", lambda a, b: [a, b[:2]])(x)
    with pytest.raises(InputError, match=r"keeper cannot be replaced: later nodes use mul_0, which it computes"):
        replaced(stage, "keeper", lambda x: x + 1)(x)


def replaced(stage: nn.Module, name: str, run: Any) -> nn.Module:
    """A copy of a stage with another module in the place of one."""

    class Own(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

    other = copy.deepcopy(stage)
    setattr(other, name, Own())
    return other


class Mean(nn.Module):
    """Takes a size besides a tensor, and reads one off it; a mask goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = module_of(run_mean_of)
        self.masked = module_of(run_masked)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y, mask, times = self.masked(self.mean(x, x.shape[0], x.shape[0]), mask)
        result: torch.Tensor = y * mask * times
        return result


def run_mean_of(_: Any, x: torch.Tensor, rows: int, same: int) -> torch.Tensor:
    return x.sum(1, keepdim=True) / rows + x / x.shape[0] + same


def run_masked(_: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    return x * mask, mask, 1.5


@pytest.fixture
def mean(tmp_path: Path) -> tuple[Mean, nn.Module, tuple[torch.Tensor, ...]]:
    rows = torch.export.Dim("rows", min=1, max=5000)
    model, given = Mean(), (torch.randn(6, 3), torch.randn(6, 1))
    bundle = stagepack.export(model, given, out=tmp_path / "m.stagepack", dynamic_shapes=({0: rows}, {0: rows}))
    return model, stagepack.load_stage(bundle, 0, modules=True), given


@torch.no_grad()
def test_a_wrapper_may_call_with_other_sizes(mean: tuple[Any, Any, tuple[torch.Tensor, ...]]) -> None:
    class Chunks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, rows: int, same: int) -> torch.Tensor:
            return torch.cat([self.inner(part, rows // 2, same // 2) for part in x.chunk(2)])

    model, stage, given = mean
    model.mean, stage.mean = Chunks(model.mean), Chunks(stage.mean)
    assert torch.equal(stage(*given)[0], model(*given))


@torch.no_grad()
def test_numbers_are_the_same_when_they_are_equal(mean: tuple[Any, Any, tuple[torch.Tensor, ...]]) -> None:
    model, stage, _ = mean
    x = torch.randn(3000, 3)
    assert torch.equal(stage.mean(x, int("3000"), int("3000")), model.mean(x, 3000, 3000))
    with pytest.raises(InputError, match="same was the same as rows at export"):
        stage.mean(x, 3000, 2999)


@torch.no_grad()
def test_what_a_module_only_passes_on_must_stay(mean: tuple[Any, Any, tuple[torch.Tensor, ...]]) -> None:
    _, stage, given = mean
    with pytest.raises(InputError, match=r"result of masked\[1\]: expected the same object that was passed"):
        replaced(stage, "masked", lambda x, mask: (x * mask, mask * 2, 1.5))(*given)
    with pytest.raises(InputError, match=r"result of masked\[2\] was fixed to 1.5 at export, found 2.5"):
        replaced(stage, "masked", lambda x, mask: (x * mask, mask, 2.5))(*given)
    assert torch.equal(replaced(stage, "masked", lambda x, mask: (x * mask, mask, 1.5))(*given)[0], stage(*given)[0])


def run_odd(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Modules in another order than their calls, one in a branch, one that does nothing, one called `graph`, one of two sizes."""
    for block in reversed(self.blocks):
        x = block(x)
    x = self.nothing(self.branch(x))
    result: torch.Tensor = self.graph(x) + self.graph(x[:1]) + self.table()
    return result


def run_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: x * 2, (x,))
    return result


def run_table(self: Any) -> torch.Tensor:
    self.doubled = self.weight * 2
    return self.weight


@torch.no_grad()
def test_modules_stand_as_in_the_model_and_only_called_ones_are_replaced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = module_of(
        run_odd,
        blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(11)),
        branch=module_of(run_branch, one=nn.Linear(4, 4)),
        nothing=nn.Identity(),
        graph=nn.Linear(4, 4),
        table=module_of(run_table, weight=nn.Parameter(torch.randn(4))),
    )
    x = torch.randn(3, 4)
    stage: Any = stagepack.load_stage(stagepack.export(model, (x,), out=tmp_path / "m.stagepack"), 0, modules=True)
    assert torch.equal(stage(x)[0], model(x))
    assert [name for name, _ in stage.blocks.named_children()] == list(map(str, range(11)))
    y = z = x
    for ours, theirs in zip(stage.blocks, model.blocks, strict=True):
        y, z = ours(y), theirs(z)
    assert torch.equal(y, z)
    assert torch.equal(stage["graph"](x[:1]), model.graph(x[:1]))  # called with both sizes
    assert torch.equal(stage["graph"](x), model.graph(x))
    assert torch.equal(stage.table(), model.table.weight)
    with pytest.raises(InputError, match=r"result of table: expected the same object that was passed"):
        replaced(stage, "table", lambda: torch.zeros(4))(x)
    for owner, name in ((stage, "nothing"), (stage.branch, "one"), (stage.branch, "two"), (stage, "blocks")):
        with pytest.raises(InputError, match=f"the stage would not call a module at '{name}'"):
            setattr(owner, name, nn.Linear(4, 4))
    with pytest.raises(KeyError, match=r"there is no module .*11.*: there are 0, 1, 2"):
        stage.blocks[11]
    stage.graph = model.graph = nn.Linear(4, 4)
    assert torch.equal(stage(x)[0], model(x))


@torch.no_grad()
def test_a_replacement_must_fit_what_it_was_given(mean: tuple[Any, Any, tuple[torch.Tensor, ...]]) -> None:
    _, stage, given = mean
    with pytest.raises(InputError, match="result of mean: dimension 0: expected 6, the size of 'rows'"):
        replaced(stage, "mean", lambda x, rows, same: x.mean(0, keepdim=True))(*given)
