"""Random numbers of ONNX Runtime: of the distributions of torch, or the stage stays in torch."""

import itertools
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.nn import functional

import stagepack
from stagepack.roads.onnx.draws import Draw, call_count, compare_draws
from tests.modules import module_of
from tests.onnx.converted import in_onnxruntime


def test_no_number_is_chosen_twice_without_replacement(tmp_path: Any) -> None:
    choose = module_of(lambda self, chances: torch.multinomial(chances, 3))
    example = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).repeat(4, 1)
    rows = Dim("rows", min=0, max=5000)
    pipe = in_onnxruntime(choose, (example,), tmp_path, dynamic_shapes=({0: rows},))
    chosen = pipe(example[:1].repeat(5000, 1))
    assert bool((chosen.sort(1).values.diff(dim=1) > 0).all())
    # The first number has its own chance.
    assert abs(float((chosen[:, 0] == 3).double().mean()) - 0.4) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_chances_that_they_are_given(dtype: torch.dtype, tmp_path: Any) -> None:
    def draw(_: Any, chances: torch.Tensor) -> Any:
        drawn = torch.bernoulli(chances)
        fixed = torch.empty_like(chances).bernoulli_(0.2)
        each = torch.zeros_like(chances).bernoulli_(chances)
        kept = functional.dropout(torch.ones_like(chances), 0.25, training=True)
        return drawn, fixed, each, kept, torch.rand_like(chances), torch.randn_like(chances) + chances

    model, example = module_of(draw), torch.linspace(0, 1, 200, dtype=dtype)
    rows = Dim("rows", min=0, max=200_000)
    bundle = stagepack.export(model, (example,), out=tmp_path / "m.stagepack", dynamic_shapes=({0: rows},))
    added = stagepack.add_onnx(bundle)
    assert added.torch_only == {}
    assert added.checked[0].reason == "draws random numbers"
    pipe = stagepack.load(added.bundle, runtime="onnxruntime")
    for chance in (0.0, 0.1, 0.9, 1.0):
        answers = pipe(torch.full((100_000,), chance, dtype=dtype))
        # At least 5 standard errors: those of normal numbers are the largest.
        for answer, mean in zip(answers, (chance, 0.2, chance, 1.0, 0.5, chance), strict=True):
            assert answer.dtype == dtype
            assert abs(float(answer.mean()) - mean) < (0.03 if answer is answers[5] else 0.01)
        assert chance in (0.1, 0.9) or bool((answers[0] == chance).all())
    assert [tuple(answer.shape) for answer in pipe(torch.empty(0, dtype=dtype))] == [(0,)] * 6


def draws(make: Any, seed: int) -> list[Draw]:
    generator = torch.Generator().manual_seed(seed)
    first = make(generator)
    return [Draw.of(first), *(Draw.of(make(generator)) for _ in range(1, call_count(first.numel())))]


CHANCES = torch.linspace(0, 1, 50)
DISTRIBUTIONS: dict[str, Any] = {
    "uniform": lambda generator: torch.rand(50, generator=generator),
    "uniform from -1": lambda generator: torch.rand(50, generator=generator) * 2 - 1,
    "normal": lambda generator: torch.randn(50, generator=generator),
    "normal of another spread": lambda generator: torch.randn(50, generator=generator) * 2,
    "chances": lambda generator: torch.bernoulli(CHANCES, generator=generator),
    "inverted chances": lambda generator: torch.bernoulli(1 - CHANCES, generator=generator),
    "three of four": lambda generator: torch.randperm(4, generator=generator)[:3],
    "three times one of four": lambda generator: torch.randint(0, 4, (3,), generator=generator),
    "fixed": lambda generator: CHANCES.clone(),
    "not finite": lambda generator: torch.rand(50, generator=generator).reciprocal().log().log(),
    "whole numbers": lambda generator: torch.randint(0, 9, (50,), generator=generator),
    "of another size": lambda generator: torch.rand(51, generator=generator),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(DISTRIBUTIONS, repeat=2)))
def test_distributions_are_told_apart(first: str, second: str) -> None:
    difference = compare_draws(draws(DISTRIBUTIONS[first], 1), draws(DISTRIBUTIONS[second], 2), None)
    assert (difference == "") == (first == second)


LARGE: dict[str, Any] = {
    "uniform": lambda generator: torch.rand(300, 1000, generator=generator),
    "of another mean": lambda generator: torch.rand(300, 1000, generator=generator) + 0.01,
    "one for each row": lambda generator: torch.rand(300, 1, generator=generator).expand(300, 1000),
    "constant at the end": lambda generator: torch.cat(
        [torch.rand(299, 1000, generator=generator), torch.ones(1, 1000)]
    ),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LARGE, repeat=2)))
def test_distributions_of_large_answers_are_told_apart_by_few_of_their_elements(first: str, second: str) -> None:
    calls = draws(LARGE[first], 1)
    assert sum(call.elements.numel() for call in calls) <= 2**20
    assert (compare_draws(calls, draws(LARGE[second], 2), None) == "") == (first == second)


def test_a_mean_of_many_draws_is_not_drawn_often() -> None:
    assert call_count(1, call_bytes=2**26) * 2**26 <= 2**30
