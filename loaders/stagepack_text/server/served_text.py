"""A text of a request: what is asked, the text while it is generated, and its parts."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagepack_loaders.decoders import DecoderFacts
from stagepack_loaders.elements import Array
from stagepack_loaders.versions import StageVersion
from stagepack_serving.server.admission import Place
from stagepack_serving.server.errors import FieldError
from stagepack_text.loop.text_batch import BatchedText
from stagepack_text.loop.token_loop import FinishReason, TokenLoop
from stagepack_text.sampling import TokenLogprobs, token_logprobs
from stagepack_text.server.text_stream import StopStrings, TextFormat
from stagepack_text.settings import GenerationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for a text after a prompt that `Generator.read_prompt` returned; settings that are absent are as the bundle has them.

    Attributes:
        logprob_count: how many of the likeliest tokens each part has beside its own; None for parts without `GeneratedPart.logprobs`.
        shown_tokens: special tokens that are part of the text.
        adapter: the name of the adapter that it is generated with; None for none.
    """

    prompt: Array
    settings: Mapping[str, Any]
    stop_strings: Sequence[str] = ()
    logprob_count: int | None = None
    shown_tokens: frozenset[int] = frozenset()
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedPart:
    """What one token adds to a text.

    Attributes:
        index: the position of the text among those that are generated together.
        text: the text that is complete with it; often empty, since a character or a stop string may take several tokens.
        finish_reason: why the text ends with it; None if it goes on.
        logprobs: how likely it was, if the request asks for it.
        weights: the version of the weights that the text is generated with.
    """

    token: int
    text: str
    index: int = 0
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    weights: StageVersion | None = None


class ServedText(BatchedText):
    """A text under way: its tokens, its place in a cache, what its tokens are decoded to, and its place in the queue.

    defaults: the settings of the bundle, which those of the request override.

    Attributes:
        request: what is asked.
        parts: takes each part, or the error that ends the text.
        reader: what has read its prompt, and decodes its tokens.
        place: that of its request, and `tokens_left` the tokens that are left of it: both as `TextAdmission` counts them.
        last_time: when the text was asked for, or has got its last token.
        has_begun: whether it has a token.
        weights: the version of the weights that it is generated with; None before its first call.
        has_ended: whether nobody waits for another part.
    """

    def __init__(
        self,
        facts: DecoderFacts,
        defaults: GenerationSettings,
        request: GenerationRequest,
        text_format: TextFormat | None,
        parts: asyncio.Queue[GeneratedPart | Exception],
        index: int = 0,
        reader: object = None,
    ) -> None:
        if request.stop_strings and text_format is None:
            raise FieldError("stop", "the bundle has no tokenizer.json, so there is no text")
        settings = defaults.override(request.settings)
        super().__init__(
            TokenLoop(facts, settings, settings.first_tokens(1) if facts.takes_encoder else request.prompt),
            adapter=request.adapter,
        )
        self.request = request
        self.parts = parts
        self.reader = reader
        self.place: Place | None = None
        self.tokens_left = 0
        self.last_time = time.monotonic()
        self.has_begun = self.has_ended = False
        self.weights: StageVersion | None = None
        self._index = index
        self._stream = None if text_format is None else text_format.start_text(request.shown_tokens)
        self._stop_strings = StopStrings(request.stop_strings)

    def take(self, logits: Array) -> GeneratedPart:
        """Choose the next token by its logits, [1, vocabulary], and decode it."""
        token, count = int(self.loop.take(logits)[0]), self.request.logprob_count
        content, finish_reason = "", self.loop.finish_reasons[0]
        if self._stream is not None:
            new_text = self._stream.add(token) + (self._stream.finish() if finish_reason is not None else "")
            content = self._stop_strings.add(new_text)
            if self._stop_strings.is_found:
                finish_reason = "stop"
            elif finish_reason is not None:
                content += self._stop_strings.finish()
        logprobs = None if count is None else token_logprobs(logits[0], token, count)
        return GeneratedPart(
            token=token,
            text=content,
            index=self._index,
            finish_reason=finish_reason,
            logprobs=logprobs,
            weights=self.weights,
        )
