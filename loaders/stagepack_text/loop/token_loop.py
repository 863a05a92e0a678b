"""One generation: the inputs of each call of a decoder, and what its logits make of them.

It does no calls itself, so that a caller in one thread, many threads and an event loop can drive it.
"""

from collections.abc import Sequence
from typing import Final, Literal

import numpy

from stagepack.errors import InputError
from stagepack_loaders.decoders import DecoderFacts
from stagepack_loaders.elements import Array
from stagepack_text.sampling import TokenSampler
from stagepack_text.settings import GenerationSettings
from stagepack_text.token_texts import StopStringMatcher

# Why a text ends: a token or a string that ends it, or the largest number of tokens.
FinishReason = Literal["stop", "length"]
# Without a setting, as in transformers.
_DEFAULT_NEW_TOKENS: Final = 20


class TokenLoop:
    """Continues the texts of a batch.

    Attributes:
        tokens: the tokens so far, [batch, length]: those that the decoder began with, and the new ones. A text that ends before others is
            followed by the padding token.
        prompt_length: the number of tokens that the decoder began with.
        finish_reasons: why each text ends; None for one that goes on.
    """

    def __init__(
        self,
        facts: DecoderFacts,
        settings: GenerationSettings,
        tokens: Array,
        attention_mask: Array | None = None,
        stop_strings: StopStringMatcher | None = None,
    ) -> None:
        batch, length = tokens.shape
        last_length = _last_length(facts, settings, length)
        self.tokens = tokens.astype(numpy.int64)
        self.prompt_length = length
        self.finish_reasons: list[FinishReason | None] = [None] * batch
        self._settings = settings
        self._stop_strings = stop_strings
        self._last_length = last_length
        end_tokens = settings.eos_token_id or (0,)
        self._padding_token = end_tokens[0] if settings.pad_token_id is None else settings.pad_token_id
        self._read_length = 0
        self._facts = facts
        self._mask = numpy.zeros((batch, facts.max_positions), numpy.int64)
        self._mask[:, :length] = 1 if attention_mask is None else attention_mask
        self._sampler = TokenSampler(settings, self._mask[:, :length] == 0)
        self._encoder_rows: Array | None = None
        self._encoder_mask: Array | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all texts have ended."""
        return None not in self.finish_reasons

    @property
    def new_tokens_left(self) -> int:
        """The largest number of tokens that a text still gets."""
        return self._last_length - int(self.tokens.shape[1])

    def read_encoded(self, rows: Array, mask: Array | None = None) -> None:
        """Begin with what an encoder returns, [batch, length, size], and its mask, [batch, length]; None if there is no padding."""
        self._encoder_rows = rows
        if self._facts.encoder_positions is not None:
            self._encoder_mask = numpy.zeros((len(rows), self._facts.encoder_positions), numpy.int64)
            self._encoder_mask[:, : rows.shape[1]] = 1 if mask is None else mask

    def next_inputs(self) -> dict[str, Array]:
        """Return the inputs of the next call."""
        start, end = self._read_length, self.tokens.shape[1]
        self._read_length = end
        if start:
            self._mask[:, start:end] = 1
        if self._facts.has_rows:
            is_token = self._mask[:, :end] != 0
            new_tokens = [row[is_new] for row, is_new in zip(self.tokens[:, start:], is_token[:, start:], strict=True)]
            return row_inputs(self._facts, new_tokens, is_token[:, :start].sum(1).tolist())
        seen_slots = end if self._facts.attends_to_filled else self._facts.max_positions
        inputs = {
            "input_ids": self.tokens[:, start:end],
            "cache_position": numpy.arange(start, end),
            "attention_mask": self._mask[:, :seen_slots].copy(),
        }
        if self._encoder_rows is not None:
            inputs["encoder_hidden_states"] = self._encoder_rows
            # The decoder has kept all rows: one of them is written again, with what it holds.
            self._encoder_rows = self._encoder_rows[:, :1]
        if self._encoder_mask is not None:
            inputs["encoder_attention_mask"] = self._encoder_mask
        return inputs

    def take(self, logits: Array) -> Array:
        """Choose the next token of each text.

        logits: what the call has returned, [batch, vocabulary].
        The result is the tokens, [batch]; the padding token for a text that has ended.
        """
        has_ended = numpy.array([reason is not None for reason in self.finish_reasons])
        chosen = self._sampler.choose(self.tokens, logits)
        chosen = numpy.where(has_ended, self._padding_token, chosen).astype(numpy.int64)
        self.tokens = numpy.concatenate([self.tokens, chosen[:, None]], 1)
        is_last = self.tokens.shape[1] >= self._last_length
        for row, token in enumerate(chosen.tolist()):
            if self.finish_reasons[row] is None:
                if token in self._settings.eos_token_id or self._is_stopped(row):
                    self.finish_reasons[row] = "stop"
                elif is_last:
                    self.finish_reasons[row] = "length"
        return chosen

    def _is_stopped(self, row: int) -> bool:
        return self._stop_strings is not None and self._stop_strings.is_at_end(self.tokens[row])


def row_inputs(
    facts: DecoderFacts, new_tokens: Sequence[Array], lengths: Sequence[int], moves: Sequence[Array] = ()
) -> dict[str, Array]:
    """Return the inputs of a call of a decoder whose texts have rows of their own.

    new_tokens: the tokens that each row reads, [length]; none for a row that only keeps its place.
    lengths: the number of tokens that each row holds.
    moves: the tokens that move to another place: the row and the slot where each is, and where it goes, [moves, 4].
    """
    length = max(len(tokens) for tokens in new_tokens)
    input_ids = numpy.zeros((len(new_tokens), length), numpy.int64)
    positions = numpy.full((len(new_tokens), length), facts.max_positions)
    for row, (tokens, start) in enumerate(zip(new_tokens, lengths, strict=True)):
        if len(tokens):
            input_ids[row, length - len(tokens) :] = tokens
            positions[row, length - len(tokens) :] = numpy.arange(start, start + len(tokens))
    ends = numpy.array([start + len(tokens) for tokens, start in zip(new_tokens, lengths, strict=True)])
    slots = numpy.arange(max(1, ends.max()))
    inputs = {
        "input_ids": input_ids,
        "cache_position": positions,
        "attention_mask": (slots < ends[:, None]).astype(numpy.int64),
    }
    if facts.moves_rows:
        inputs["cache_moves"] = numpy.concatenate([numpy.empty((0, 4), numpy.int64), *moves])
    return inputs


def _last_length(facts: DecoderFacts, settings: GenerationSettings, length: int) -> int:
    """The number of tokens at which a generation ends at the latest."""
    if settings.max_new_tokens is not None:
        last_length = length + settings.max_new_tokens
    elif settings.max_length is not None:
        last_length = settings.max_length
        if 0 < last_length <= length:
            raise InputError(
                f"max_length: expected more than the {length} tokens to begin with, found {last_length}: pass max_new_tokens"
            )
    else:
        last_length = max(length + 1, min(length + _DEFAULT_NEW_TOKENS, facts.max_positions))
    # The last token takes no position: it is not read.
    if not 0 < length < last_length <= facts.max_positions + 1:
        raise InputError(
            f"expected at least 1 new token, and up to {facts.max_positions + 1} tokens in all (the cache has {facts.max_positions} "
            f"positions), found {length} tokens to begin with and a length of {last_length} at most: generate fewer, or "
            f"export with a larger cache (--generate {last_length - 1}; in Python generate={last_length - 1})"
        )
    return last_length
