"""A condition that is left out of a bundle holds for all sizes in the ranges of its symbols."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.format.shapes import Dim as Size
from stagepack.format.shapes import Expr, Guard, Symbol, evaluate_dim, format_guard, guard_holds
from stagepack.graph.implied_guards import is_implied
from stagepack_loaders.batching import batch_limit
from tests.modules import module_of

CASES, SEEDS = 4_000, 4
LARGE = 10**6


def expr(op: str, *args: Size) -> Expr:
    return Expr(op=op, args=args)


def at_least(**smallest: int) -> list[Symbol]:
    return [Symbol(name=name, min=size) for name, size in smallest.items()]


SUM = expr("add", expr("mul", "n", "m"), "m", -1)  # n*m + m - 1
CEILING = expr("floordiv", SUM, "m")
ODD = expr("add", expr("mul", 2, "n"), 1)
# What torch states for models whose batch and sequence have no upper end.
IMPLIED = [
    (Guard(left=2, relation="le", right="n"), at_least(n=2)),
    (Guard(left=expr("mul", 4, "n"), relation="ne", right=0), at_least(n=1)),
    (Guard(left=expr("mul", 64, "n"), relation="lt", right=2**62), [Symbol(name="n", min=2, max=512)]),
    (Guard(left=expr("floordiv", "n", 2), relation="le", right="n"), at_least(n=0)),
    (
        Guard(left=expr("mul", 2, expr("floordiv", expr("add", "n", -1), 2)), relation="lt", right="n"),
        at_least(n=2),
    ),
    (Guard(left=2, relation="le", right=expr("mul", CEILING, 4)), at_least(n=2, m=1)),
    (Guard(left=CEILING, relation="eq", right="n"), at_least(n=0, m=1)),
    (
        Guard(left=expr("min", expr("mul", 8, "n"), expr("mul", 16, "n")), relation="eq", right=expr("mul", 8, "n")),
        at_least(n=0),
    ),
    (Guard(left=expr("mod", ODD, 2), relation="ne", right=0), at_least(n=0)),
    (Guard(left=expr("mod", "n", 5), relation="lt", right=5), at_least(n=0)),
    (Guard(left=expr("max", 1, expr("add", "n", -2)), relation="eq", right=expr("add", "n", -2)), at_least(n=3)),
    (Guard(left=expr("pow", "n", 2), relation="le", right=expr("mul", "n", "n")), at_least(n=0)),
]


@pytest.mark.parametrize(
    ("guard", "symbols"), IMPLIED, ids=lambda value: "" if isinstance(value, list) else format_guard(value)
)
def test_what_ranges_imply_is_found(guard: Guard, symbols: list[Symbol]) -> None:
    assert is_implied(guard, symbols)


@pytest.mark.parametrize(
    ("guard", "symbols"),
    [
        (Guard(left=2, relation="le", right="n"), at_least(n=1)),
        (Guard(left=2, relation="le", right="n"), []),
        (Guard(left=expr("mul", 4, "n"), relation="ne", right=0), at_least(n=0)),
        (Guard(left=2, relation="le", right=CEILING), at_least(n=2, m=0)),  # no value where m is 0
        (Guard(left=expr("mod", "n", 2), relation="eq", right=0), at_least(n=0)),
        (Guard(left=expr("pow", 2, "n"), relation="le", right=2**40), [Symbol(name="n", min=0, max=LARGE)]),
        (Guard(left="m", relation="le", right="n"), at_least(n=0, m=0)),
    ],
)  # fmt: skip
def test_what_may_fail_is_kept(guard: Guard, symbols: list[Symbol]) -> None:
    assert not is_implied(guard, symbols)


class Drawn:
    """Conditions and ranges that are drawn."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)  # noqa: S311 - draws conditions

    def size(self, depth: int) -> Size:
        draw = self._generator
        if depth == 0 or draw.random() < 0.2:
            leaves: list[Size] = ["n", "m", draw.randint(-4, 6)]
            return draw.choice(leaves)
        op = draw.choice(["add", "add", "mul", "mul", "floordiv", "mod", "max", "min"])
        args = (self.size(depth - 1), self.size(depth - 1))
        divides = op in ("floordiv", "mod") and draw.random() < 0.8
        return expr(op, args[0], draw.randint(1, 5) if divides else args[1])

    def guard(self) -> Guard:
        relation = self._generator.choice(["eq", "ne", "lt", "le"])
        return Guard(left=self.size(3), relation=relation, right=self.size(self._generator.randint(0, 2)))

    def symbols(self) -> list[Symbol]:
        smallest = [self._generator.choice([None, -3, 0, 1, 2, 5]) for _ in range(2)]
        widths = [self._generator.choice([None, 0, 1, 7]) for _ in range(2)]
        return [
            Symbol(name=name, min=low, max=None if low is None or width is None else low + width)
            for name, low, width in zip(("n", "m"), smallest, widths, strict=True)
        ]


def sizes_of(symbol: Symbol) -> list[int]:
    """All sizes of a small range; of another one those near its ends, and large ones."""
    low = -LARGE if symbol.min is None else symbol.min
    near = range(low, low + 14 if symbol.max is None else symbol.max + 1)
    further = [*range(-8, 9), LARGE, LARGE + 1] if symbol.max is None else []
    return sorted({size for size in (*near, *further) if symbol.min is None or size >= symbol.min})


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_drawn_condition_that_is_left_out_fails(seed: int) -> None:
    drawn = Drawn(seed)
    implied = 0
    for _ in range(CASES // SEEDS):
        guard, symbols = drawn.guard(), drawn.symbols()
        if not is_implied(guard, symbols):
            continue
        implied += 1
        for values in itertools.product(*map(sizes_of, symbols)):
            sizes = dict(zip(("n", "m"), values, strict=True))
            assert guard_holds(guard, sizes), (format_guard(guard), symbols, sizes)
            assert isinstance(evaluate_dim(guard.left, sizes), int)
    assert implied > CASES // SEEDS // 10, implied


def test_conditions_that_ranges_imply_do_not_stop_batches(tmp_path: Path) -> None:
    model = module_of(lambda self, x: x * 2 if 2 * ((x.shape[0] + 1) // 2) >= x.shape[0] else x)
    bundle = stagepack.export(model, (torch.ones(3, 4),), dynamic_shapes=({0: Dim.AUTO},), out=tmp_path / "m.stagepack")
    assert bundle.entry_point.guards == ()
    pipe = stagepack.load(bundle)
    assert batch_limit(bundle, bundle.edges, 8, pipe).max_batch_size == 8
    assert torch.equal(pipe(torch.ones(9, 4)), torch.full((9, 4), 2.0))
