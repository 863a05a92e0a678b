"""Texts that are JSON of a schema: in each step, the tokens that would violate it are ruled out, by llguidance.

Source: https://github.com/guidance-ai/llguidance. It bounds the time and the memory of grammars, which strangers choose.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy

from stagepack.errors import MissingPackageError, StageFailedError
from stagepack.extras import explain_missing_packages
from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import BadRequestError, RequestError
from stagepack_text.server.text_stream import TextFormat

# Between the parts of the JSON. Without a bound, a model may write whitespace until its text is full.
_WHITESPACE: Final = r"[ \n\t]{0,32}"
# What may be a token in the frame of an answer.
_MARKERS: Final = re.compile("(<[^<>]*>)")
# Changes the scores of the next token; see `GenerationSettings.logits_processor`.
LogitsProcessor = Callable[[Array, Array], Array]


class _TokenizerFacts:
    """What llguidance asks of a tokenizer, which is an object with these attributes that converts bytes to tokens."""

    bos_token_id = None

    def __init__(self, text_format: TextFormat, vocabulary_size: int, end_token: int) -> None:
        self._text_format = text_format
        self.eos_token_id = end_token
        self.tokens = [text_format.token_bytes(token) for token in range(vocabulary_size)]
        self.special_token_ids = [token for token in range(vocabulary_size) if text_format.is_special(token)]

    def __call__(self, content: bytes | str) -> list[int]:
        text = content.decode(errors="replace") if isinstance(content, bytes) else content
        return self._text_format.encode(text, adds_special_tokens=False)


class GrammarTokens:
    """The tokens of a model, by which grammars are followed. They are read once, which takes a second for 100,000 of them."""

    def __init__(self, text_format: TextFormat, vocabulary_size: int, end_tokens: Sequence[int]) -> None:
        with explain_missing_packages():
            import llguidance  # noqa: PLC0415 - optional
        self._library: Any = llguidance
        self._text_format = text_format
        facts = _TokenizerFacts(text_format, vocabulary_size, end_tokens[0])
        wrapper = llguidance.TokenizerWrapper(facts)
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=vocabulary_size, eos_token=list(end_tokens))

    def compile(self, schema: Mapping[str, Any] | bool, frame: tuple[str, str] = ("", "")) -> "JsonGrammar":
        """Compile a schema of the JSON that is between two texts."""
        matcher_type = self._library.LLMatcher
        options = {"whitespace_pattern": _WHITESPACE, "whitespace_flexible": True, "lenient": False}
        fields = {**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema
        before, after = map(self._frame_rule, frame)
        grammar = f"start: {before} answer {after}\nanswer: %json {json.dumps(fields)}"
        matcher = matcher_type(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            raise _refused(matcher.get_error() or "no JSON satisfies it")
        return JsonGrammar(matcher)

    def _frame_rule(self, text: str) -> str:
        """The rule of a text of a frame. A special token is no text to llguidance, but a number."""
        parts = [part for part in _MARKERS.split(text) if part] or [""]
        token_ids = [self._text_format.special_ids([part]) for part in parts]
        return " ".join(
            f"<[{next(iter(ids))}]>" if ids else json.dumps(part) for part, ids in zip(parts, token_ids, strict=True)
        )


class JsonGrammar:
    """A schema that is compiled."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start_text(self) -> LogitsProcessor:
        """Start a text that satisfies the schema."""
        matcher = self._matcher.deep_copy()
        read_length: int | None = None

        def process(tokens: Array, scores: Array) -> Array:
            nonlocal read_length
            new_tokens = [] if read_length is None else tokens[0, read_length:].tolist()
            read_length = tokens.shape[1]
            matcher.consume_tokens(new_tokens)
            bits = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
            is_allowed = numpy.unpackbits(bits, count=scores.shape[1], bitorder="little").astype(bool)
            allowed_scores: Array = numpy.where(is_allowed, scores, -numpy.inf)
            if matcher.is_error() or not numpy.isfinite(allowed_scores).any():
                reason = matcher.get_error().partition("\n")[0] or "all tokens that it allows are suppressed"
                raise StageFailedError(f"no token follows that satisfies the schema of the answer: {reason}")
            return allowed_scores

        return process


def _refused(reason: str) -> RequestError:
    message = (
        f"the schema of the answer: expected a JSON schema that llguidance supports: {reason.partition(chr(10))[0]}"
    )
    return BadRequestError(message)


def read_grammar_tokens(
    text_format: TextFormat | None, vocabulary_size: object, end_tokens: Sequence[int]
) -> GrammarTokens:
    """Read the tokens of a model; refuse a request for JSON where that is not possible."""
    obstacle = ""
    if text_format is None:
        obstacle = "the bundle has no tokenizer.json"
    elif not end_tokens:
        obstacle = "the bundle names no token that ends a text: eos_token_id in generation_config.json"
    elif not isinstance(vocabulary_size, int):
        obstacle = "the size of the vocabulary varies"
    else:
        try:
            return GrammarTokens(text_format, vocabulary_size, end_tokens)
        except MissingPackageError as error:
            obstacle = str(error)
    raise BadRequestError(f"this server cannot answer with JSON of a schema: {obstacle}")
