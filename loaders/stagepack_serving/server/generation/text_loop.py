"""Runs the texts that a decoder generates as batches: each step, all texts under way in one call."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagepack.errors import StageFailedError
from stagepack_loaders.elements import Array
from stagepack_loaders.generation.decoders import DecoderFacts
from stagepack_loaders.generation.text_batch import BatchCall, BatchedText, TextBatch
from stagepack_loaders.generation.token_loop import TokenLoop
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.served_model import ServedModel

# Makes a part of a text of the logits of its next token, [1, vocabulary]; the part says why the text ends, if it does.
TakeLogits = Callable[[Array], Any]


@dataclass(slots=True, eq=False)
class _Text:
    """A text of a request, whose parts wait for it."""

    batched: BatchedText
    take: TakeLogits
    last_time: float
    has_begun: bool = False
    parts: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class _Lane:
    """One batch, and its sequence of calls while it has texts."""

    def __init__(self, decoder: ServedModel, facts: DecoderFacts, most_texts: int) -> None:
        self.batch = TextBatch(facts, most_texts)
        self._decoder = decoder
        self._texts: dict[BatchedText, _Text] = {}
        self._task: asyncio.Task[None] | None = None
        [self._logits_output] = decoder.interface.outputs

    def add(self, loop: TokenLoop, take: TakeLogits) -> _Text:
        """Begin a text."""
        running_text = _Text(self.batch.add(loop), take, time.monotonic())
        self._texts[running_text.batched] = running_text
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return running_text

    def remove(self, running_text: _Text) -> None:
        """End a text, if it has not ended."""
        self._texts.pop(running_text.batched, None)
        self.batch.remove(running_text.batched)

    async def _run(self) -> None:
        """Make calls while there are texts. An error of a call ends them all: the cache may be half written."""
        try:
            while len(self.batch):
                async with self._decoder.reserve_sequence() as sequence:
                    while (call := self.batch.next_call()) is not None:
                        take = functools.partial(self._take, call)
                        self._hand_out(await self._decoder.call(call.inputs, sequence, take))
        except Exception as error:  # noqa: BLE001 - the requests get any error
            for running_text in list(self._texts.values()):
                self._end(running_text, error)
        finally:
            self._task = None

    def _take(self, call: BatchCall, outputs: Mapping[str, Array]) -> list[tuple[_Text, Any]]:
        """The parts that a call adds to texts, or why one gets no part. Runs in another thread, while requests may end."""
        logits, parts = outputs[self._logits_output], list[tuple[_Text, Any]]()
        texts = dict(self._texts)
        for position, batched in call.texts.items():
            if batched in texts:
                running_text = texts[batched]
                try:
                    parts.append((running_text, running_text.take(logits[position : position + 1])))
                except StageFailedError as error:
                    message = f"{self._decoder.name}: {error}"
                    parts.append((running_text, RequestError(RequestStatus.MODEL_FAILED, message)))
                except Exception as error:  # noqa: BLE001 - of one text: the others go on
                    parts.append((running_text, error))
        return parts

    def _hand_out(self, parts: Sequence[tuple[_Text, Any]]) -> None:
        metrics, labels = self._decoder.metrics, (self._decoder.name, self._decoder.version)
        now = time.monotonic()
        metrics.generated_tokens.labels(*labels).inc(len(parts))
        for running_text, part in parts:
            seconds = metrics.token_seconds if running_text.has_begun else metrics.first_token_seconds
            seconds.labels(*labels).observe(now - running_text.last_time)
            running_text.last_time, running_text.has_begun = now, True
            if isinstance(part, Exception) or part.finish_reason is not None:
                self._end(running_text, part)
            else:
                running_text.parts.put_nowait(part)

    def _end(self, running_text: _Text, part: Any) -> None:
        self.remove(running_text)
        running_text.parts.put_nowait(part)


class TextLoop:
    """Generates texts with a decoder whose texts have rows of their own.

    While a lane of the decoder, a device or a process, runs a call of one batch, the other lanes run those of other batches. What a text
    says depends on the texts beside it as far as the rounding of sums depends on the size of a batch.
    """

    def __init__(self, decoder: ServedModel, facts: DecoderFacts) -> None:
        most_texts = min(decoder.limits.max_batch_size, facts.max_batch or decoder.limits.max_batch_size)
        # Several texts alone, if they must not share a call.
        lane_count = decoder.lane_count if decoder.limits.max_batch_size == 1 else min(decoder.lane_count, most_texts)
        rows = 1 if not facts.moves_rows else most_texts
        self._decoder = decoder
        self._lanes = [_Lane(decoder, facts, rows) for _ in range(lane_count)]

    @property
    def text_count(self) -> int:
        """The number of texts that are under way, or wait for a row of the cache."""
        return sum(len(lane.batch) for lane in self._lanes)

    @property
    def held_tokens(self) -> int:
        """The number of tokens that the caches hold."""
        return sum(lane.batch.held_tokens for lane in self._lanes)

    async def generate(self, loop: TokenLoop, take: TakeLogits) -> AsyncGenerator[Any, None]:
        """Generate a text in the lane with the fewest ones; yield what `take` returns. With too many prompts that wait, it is refused."""
        lane = min(self._lanes, key=lambda lane: len(lane.batch))
        waiting_count, prompt_length = sum(lane.batch.waiting_tokens for lane in self._lanes), loop.tokens.shape[1]
        most_waiting = self._decoder.limits.max_waiting_tokens
        if waiting_count and waiting_count + prompt_length > most_waiting:
            found = f"prompts of {waiting_count} tokens wait already, and at most {most_waiting} may"
            raise RequestError(RequestStatus.BUSY, f"{self._decoder.name}: {found}: try again later")
        running_text = lane.add(loop, take)
        try:
            while True:
                part = await running_text.parts.get()
                if isinstance(part, Exception):
                    raise part
                yield part
                if part.finish_reason is not None:
                    return
        finally:
            lane.remove(running_text)
