"""The choice of the next token by its logits, as transformers makes it.

The order of the steps is that of ``GenerationMixin._get_logits_processor``. With torch, seeded draws are those of torch's generator, and so
transformers' own; without it, they are numpy's.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy

from stagepack.errors import InputError, StageFailedError
from stagepack_loaders.elements import Array
from stagepack_loaders.generation.settings import GenerationSettings

_LARGEST_FLOAT: Final = float(numpy.finfo(numpy.float32).max)
_LEAST_FLOAT: Final = float(numpy.finfo(numpy.float32).tiny)


class TokenSampler:
    """Chooses tokens for a batch of texts."""

    def __init__(self, settings: GenerationSettings, is_padding: Array) -> None:
        self._settings = settings
        self._is_padding = is_padding
        self._draw = _drawing(settings.seed) if settings.do_sample else None
        biases = settings.logit_bias
        self._biases = numpy.array(list(biases), numpy.int64), numpy.array(list(biases.values()), numpy.float32)

    def choose(self, tokens: Array, logits: Array) -> Array:
        """Choose the next tokens.

        tokens: the tokens so far, [batch, length].
        logits: the logits of the next token, [batch, vocabulary].
        The result is the tokens, [batch].
        """
        settings = self._settings
        scores = logits.astype(numpy.float32)
        _suppress(scores, settings.suppress_tokens)
        if tokens.shape[1] == self._is_padding.shape[1]:
            _suppress(scores, settings.begin_suppress_tokens)
        _require_finite_largest(scores)
        # A small temperature or penalty leads to differences that are infinite; their tokens are not drawn.
        with numpy.errstate(over="ignore"):
            if settings.repetition_penalty != 1.0:
                scores = self._penalize_repetition(tokens, scores)
            if settings.presence_penalty or settings.frequency_penalty:
                scores -= self._penalties(tokens, scores)
            _add_biases(scores, *self._biases)
            if settings.logits_processor is not None:
                scores = settings.logits_processor(tokens, scores)
            if self._draw is None:
                likeliest: Array = scores.argmax(1)
                return likeliest
            return self._draw(_softmax(self._limit(scores)))

    def _penalize_repetition(self, tokens: Array, scores: Array) -> Array:
        """Make the tokens so far less likely, but for padding and those that have no logits."""
        vocabulary_size = scores.shape[1]
        columns = numpy.minimum(tokens, vocabulary_size)
        columns[:, : self._is_padding.shape[1]][self._is_padding] = vocabulary_size
        wider_scores = numpy.pad(scores, ((0, 0), (0, 1)))
        used = numpy.take_along_axis(wider_scores, columns, 1)
        penalty = numpy.float32(max(self._settings.repetition_penalty, _LEAST_FLOAT))
        penalized = numpy.where(used < 0, used * penalty, used / penalty).clip(-_LARGEST_FLOAT, _LARGEST_FLOAT)
        penalized = numpy.where(numpy.isfinite(used), penalized, used)
        numpy.put_along_axis(wider_scores, columns, penalized, 1)
        return wider_scores[:, :vocabulary_size]

    def _penalties(self, tokens: Array, scores: Array) -> Array:
        """What the tokens that were generated lose, [batch, vocabulary]."""
        counts = numpy.zeros(scores.shape, numpy.float32)
        for row, new_tokens in enumerate(tokens[:, self._is_padding.shape[1] :]):
            numpy.add.at(counts[row], new_tokens, 1)
        penalties: Array = self._settings.frequency_penalty * counts + self._settings.presence_penalty * (counts > 0)
        return penalties.astype(numpy.float32)

    def _limit(self, scores: Array) -> Array:
        """Leave out the tokens that must not be drawn."""
        settings = self._settings
        scores = _divide(scores, settings.temperature)
        if 0 < settings.top_k < scores.shape[1]:
            lowest = numpy.partition(scores, -settings.top_k, 1)[:, -settings.top_k, None]
            scores = numpy.where(scores < lowest, -numpy.inf, scores)
        if settings.top_p < 1.0:
            order = scores.argsort(1, kind="stable")
            ascending = numpy.take_along_axis(scores, order, 1)
            is_removed = _softmax(ascending).cumsum(1) <= 1 - settings.top_p
            is_removed[:, -1] = False
            numpy.put_along_axis(scores, order, numpy.where(is_removed, -numpy.inf, ascending), 1)
        if settings.min_p is not None:
            probabilities = _softmax(scores)
            scores = numpy.where(
                probabilities < settings.min_p * probabilities.max(1, keepdims=True), -numpy.inf, scores
            )
        return scores


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, as the natural logarithm of its probability by the logits, before settings change them.

    Attributes:
        logprob: that of the token.
        likeliest: the likeliest tokens, and theirs; the likeliest one first.
    """

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Array, token: int, count: int) -> TokenLogprobs:
    """Return how likely a token was, and so many of the likeliest ones, by its logits, [vocabulary]."""
    scores = logits.astype(numpy.float32)
    differences = scores - scores.max()
    logprobs = differences - numpy.log(numpy.exp(differences).sum())
    count = min(count, len(logprobs))
    likeliest = numpy.argpartition(-logprobs, count - 1)[:count] if count else numpy.empty(0, numpy.int64)
    likeliest = likeliest[numpy.argsort(-logprobs[likeliest], kind="stable")]
    pairs = zip(likeliest.tolist(), logprobs[likeliest].tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token]), tuple(pairs))


class Drawing(Protocol):
    """Draws a token of each text by probabilities, [batch, vocabulary]."""

    def __call__(self, probabilities: Array) -> Array:
        """Draw the tokens, [batch]."""


def _drawing(seed: int | None) -> Drawing:
    if importlib.util.find_spec("torch") is None:
        generator = numpy.random.default_rng(seed)

        def draw(probabilities: Array) -> Array:
            limits = probabilities.cumsum(1)
            drawn: Array = (limits < generator.random((len(limits), 1)) * limits[:, -1:]).sum(1)
            return drawn

        return draw
    # By name: servers with another runtime work without it.
    torch: Any = importlib.import_module("torch")
    torch_generator = torch.Generator()
    if seed is None:
        torch_generator.seed()
    else:
        torch_generator.manual_seed(seed)

    def draw_in_torch(probabilities: Array) -> Array:
        drawn: Array = torch.multinomial(torch.from_numpy(probabilities), 1, generator=torch_generator).numpy()
        return drawn[:, 0]

    return draw_in_torch


def _suppress(scores: Array, tokens: Sequence[int]) -> None:
    """Rule out tokens, in place. As in transformers, numbers outside the vocabulary are ignored."""
    scores[:, [token for token in tokens if 0 <= token < scores.shape[1]]] = -numpy.inf


def _add_biases(scores: Array, tokens: Array, biases: Array) -> None:
    outside = tokens[(tokens < 0) | (tokens >= scores.shape[1])]
    if len(outside):
        raise InputError(f"logit_bias: expected tokens from 0 to {scores.shape[1] - 1}, found {outside[0]}")
    scores[:, tokens] += biases


def _require_finite_largest(scores: Array) -> None:
    """Check that each text has a likeliest token."""
    largest_scores = scores.max(1)
    if (is_invalid := ~numpy.isfinite(largest_scores)).any():
        row = int(is_invalid.argmax())
        raise StageFailedError(
            f"the logits of the next token of text {row}: expected a finite largest value among the tokens that are not suppressed, found"
            f" {largest_scores[row]}. Check the weights of the model, its dtype, and its generation_config.json"
        )


def _divide(scores: Array, temperature: float) -> Array:
    """Divide scores by a temperature. Only their differences matter, so quotients that overflow are those of the differences."""
    divisor = numpy.float32(max(temperature, _LEAST_FLOAT))
    quotients: Array = scores / divisor
    if not numpy.isfinite(quotients.max(1)).all():
        quotients = (scores - scores.max(1, keepdims=True)) / divisor
    return quotients


def _softmax(scores: Array) -> Array:
    exponentials: Array = numpy.exp(scores - scores.max(1, keepdims=True))
    exponentials /= exponentials.sum(1, keepdims=True)
    return exponentials
