"""The choice of one token by its logits; `test_generation.py` compares whole texts."""

from typing import Any

import numpy
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stagepack.errors import InputError, StageFailedError
from stagepack_text.sampling import TokenSampler
from stagepack_text.settings import GenerationSettings

LARGE_VOCABULARY = 152_000
DRAWS = 20


def choose_token(logits: list[float], **settings: Any) -> int:
    sampler = TokenSampler(GenerationSettings().override(settings), numpy.zeros((1, 1), bool))
    return int(sampler.choose(numpy.array([[0, 1]]), numpy.array([logits], numpy.float32))[0])


def drawn_by_transformers(tokens: Any, logits: Any, settings: GenerationSettings) -> list[list[int]]:
    """The tokens that transformers draws by the same logits again and again, [draws, batch]."""
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)]
    processors.append(TemperatureLogitsWarper(settings.temperature))
    processors += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
    processors.append(TopPLogitsWarper(settings.top_p))
    processors += [] if settings.min_p is None else [MinPLogitsWarper(settings.min_p)]
    all_processors: Any = LogitsProcessorList(processors)
    scores = all_processors(torch.from_numpy(tokens), torch.from_numpy(logits))
    generator = torch.Generator().manual_seed(settings.seed or 0)
    return [torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0].tolist() for _ in range(DRAWS)]


def some_logits(kind: str) -> Any:
    generator = numpy.random.default_rng(0)
    logits = generator.standard_normal((2, LARGE_VOCABULARY)).astype(numpy.float32)
    if kind == "bfloat16":
        return torch.from_numpy(2 * logits).bfloat16().float().numpy()
    if kind == "peaked":
        return logits + generator.standard_exponential(logits.shape).astype(numpy.float32) ** 2 / 6
    return {"flat": logits, "equal": numpy.zeros_like(logits), "few values": logits.round()}[kind]


OPTIONS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.7, "repetition_penalty": 1.2},
    {"top_p": 0.95, "top_k": 1000},
    {"top_p": 0.0},
    {"top_p": 0.999999},
    {"top_p": 0.8, "min_p": 0.05},
]
# All kinds with some options, and all options with some kind; the others with the slow tests.
DRAW_CASES = [
    pytest.param(kind, options, marks=() if kind == "bfloat16" or options is OPTIONS[0] else pytest.mark.slow)
    for kind in ("flat", "peaked", "bfloat16", "few values", "equal")
    for options in OPTIONS
]


@pytest.mark.parametrize(("kind", "options"), DRAW_CASES)
def test_draws_from_a_large_vocabulary_are_those_of_transformers(kind: str, options: dict[str, Any]) -> None:
    settings = GenerationSettings().override({"do_sample": True, "top_k": 0, "seed": 3} | options)
    tokens, logits = numpy.array([[5, 7, 5], [1, 2, LARGE_VOCABULARY - 1]]), some_logits(kind)
    sampler = TokenSampler(settings, numpy.zeros((2, 1), bool))
    drawn = [sampler.choose(tokens, logits).tolist() for _ in range(DRAWS)]
    assert drawn == drawn_by_transformers(tokens, logits, settings)


@pytest.mark.parametrize("kind", ["flat", "peaked", "bfloat16"])
def test_draws_without_a_seed_are_among_the_likeliest_tokens(kind: str) -> None:
    logits = some_logits(kind)[:1]
    settings = GenerationSettings().override({"do_sample": True, "top_k": 0, "top_p": 0.5})
    sampler = TokenSampler(settings, numpy.zeros((1, 1), bool))
    drawn = [int(sampler.choose(numpy.array([[0, 1]]), logits)[0]) for _ in range(200)]
    scores = TopPLogitsWarper(0.5)(torch.empty(1, 0), torch.from_numpy(logits))[0].numpy()
    assert logits[0, drawn].min() >= scores[numpy.isfinite(scores)].min()
    # Half of them are among those that have half of the probability that is left.
    probabilities = torch.from_numpy(scores).softmax(-1).numpy()
    order = (-probabilities).argsort()
    likely = set(order[: int((probabilities[order].cumsum(dtype=numpy.float64) < 0.5).sum()) + 1].tolist())
    assert 60 <= sum(token in likely for token in drawn) <= (200 if kind == "peaked" else 140)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_without_torch_a_seed_chooses_the_draws_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    logits = numpy.log([0.1, 0.0001, 0.6, 0.2999]).tolist()
    settings = {"do_sample": True, "top_p": 0.85}
    assert len({choose_token(logits, seed=seed, **settings) for _ in range(3)}) == 1
    assert {choose_token(logits, seed=other_seed, **settings) for other_seed in range(20)} == {2, 3}


def test_a_logits_processor_changes_the_scores() -> None:
    def forbid_the_likeliest(tokens: Any, scores: Any) -> Any:
        assert tokens.tolist() == [[0, 1]]
        return numpy.where(scores == scores.max(), -numpy.inf, scores)

    assert choose_token([1, 9, 8], logits_processor=forbid_the_likeliest) == 2


@pytest.mark.parametrize("token", [-1, 3])
def test_a_bias_of_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"logit_bias: expected tokens from 0 to 2, found {token}"):
        choose_token([1, 2, 3], logit_bias={token: 1.0})


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-3])
@pytest.mark.parametrize("logits", [[1, 2, 9, 3], [-1, -2, -0.5, -3], [-3e38, 0, 3e38, 1]])
def test_a_small_temperature_takes_the_likeliest_token(logits: list[float], temperature: float) -> None:
    assert choose_token(logits, do_sample=True, temperature=temperature, top_p=0.9, min_p=0.1) == 2


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("penalty", "token"), [(1e-320, 0), (1e-40, 0), (1e38, 2)])
def test_extreme_penalties_choose_a_token(penalty: float, token: int, do_sample: bool) -> None:
    assert choose_token([3, -1, 2.5, -100], repetition_penalty=penalty, do_sample=do_sample, top_k=1) == token


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("logits", "suppressed"),
    [([1, numpy.nan, 2], []), ([1, numpy.inf, 2], []), ([-numpy.inf] * 3, []), ([1, 2, 3], [0, 1, 2])],
)
def test_logits_without_a_likeliest_token_are_named(logits: Any, suppressed: list[int], do_sample: bool) -> None:
    with pytest.raises(StageFailedError, match="expected a finite largest value among the tokens"):
        choose_token(logits, do_sample=do_sample, suppress_tokens=suppressed)


@pytest.mark.parametrize("setting_name", ["suppress_tokens", "begin_suppress_tokens"])
def test_suppressed_tokens_outside_the_vocabulary_are_ignored(setting_name: str) -> None:
    sampler = TokenSampler(GenerationSettings().override({setting_name: [99, -2, 3, 2**62]}), numpy.zeros((1, 2), bool))
    assert sampler.choose(numpy.array([[0, 1]]), numpy.array([[1.0, 2.0, 9.0, 10.0]])) == [2]
