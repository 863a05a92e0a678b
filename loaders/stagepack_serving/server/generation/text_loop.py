"""Runs the texts that a decoder generates as batches: each step, all texts under way in one call. Clients whose texts wait take turns."""

import asyncio
import contextvars
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagepack.errors import StageFailedError
from stagepack_loaders.elements import Array
from stagepack_loaders.generation.decoders import DecoderFacts
from stagepack_loaders.generation.text_batch import BatchCall, BatchedText, TextBatch
from stagepack_loaders.generation.token_loop import TokenLoop
from stagepack_serving.server.access_log import current_sender
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.generation.text_admission import TextAdmission
from stagepack_serving.server.served_model import ServedModel


class ClientQueue:
    """Texts that wait. Their senders (see `RequestRecord`) take turns; the texts of one are served first come, first served.

    So a client that sends a hundred requests at once lets others wait for one of its texts, and not for all of them.
    """

    def __init__(self) -> None:
        # By client; the one whose turn is next comes first.
        self._texts: dict[str, deque[BatchedText]] = {}

    def __len__(self) -> int:
        """The number of texts."""
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[BatchedText]:
        """The texts, by client."""
        return (batched_text for texts in self._texts.values() for batched_text in texts)

    def append(self, batched_text: BatchedText) -> None:
        """Add a text of the client whose request is answered."""
        self._texts.setdefault(current_sender(), deque()).append(batched_text)

    def popleft(self) -> BatchedText:
        """Take out the text that is next."""
        client = next(iter(self._texts))
        texts = self._texts.pop(client)
        batched_text = texts.popleft()
        if texts:
            self._texts[client] = texts
        return batched_text

    def remove(self, batched_text: BatchedText) -> None:
        """Take out a text, if it waits."""
        for client, texts in list(self._texts.items()):
            if batched_text in texts:
                texts.remove(batched_text)
                if not texts:
                    del self._texts[client]


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

    def __init__(
        self,
        decoder: ServedModel,
        batch: TextBatch,
        texts: dict[BatchedText, _Text],
        waiting: ClientQueue,
        admission: TextAdmission,
    ) -> None:
        self.batch = batch
        self._admission = admission
        self._decoder = decoder
        self._texts = texts
        self._waiting = waiting
        self._task: asyncio.Task[None] | None = None
        [self._logits_output] = decoder.interface.outputs

    def start(self) -> None:
        """Make calls, if none are made."""
        if self._task is None:
            # Its calls are for all texts, and not for the request that makes it start.
            self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        """Make calls while there are texts."""
        try:
            while len(self.batch) or self._waiting:
                async with self._decoder.reserve_sequence() as sequence:
                    while (call := self._next_call()) is not None:
                        take = functools.partial(self._take, call)
                        try:
                            self._hand_out(await self._decoder.call(call.inputs, sequence, take))
                        except RequestError as error:
                            self._begin_again(error)
                            break
        except Exception as error:  # noqa: BLE001 - the requests get any error
            while (batched := self.batch.take_any()) is not None:
                self._end(batched, error)
            while self._waiting:
                self._end(self._waiting.popleft(), error)
        finally:
            self._task = None

    def _next_call(self) -> BatchCall | None:
        if self._waiting and len(self.batch) < self.batch.most_texts:
            for batched, error in self._admission.late_texts(self._waiting).items():
                self._waiting.remove(batched)
                self._end(batched, error)
        return self.batch.next_call()

    def _begin_again(self, error: RequestError) -> None:
        """After a call that failed, find the text that it fails for. The texts are read again in a new sequence."""
        if error.status is RequestStatus.STAGE_LOST:
            raise error
        failed = self.batch.begin_again()
        if failed is not None:
            self._end(failed, error)

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
        now = time.monotonic()
        self._admission.count_call(
            {text.batched: part.finish_reason is not None for text, part in parts if not isinstance(part, Exception)}
        )
        for running_text, part in parts:
            if isinstance(part, Exception):
                self._end(running_text.batched, part)
                continue
            seconds, is_first = now - running_text.last_time, not running_text.has_begun
            self._decoder.metrics.count_token(self._decoder.name, self._decoder.version, seconds, is_first=is_first)
            running_text.last_time, running_text.has_begun = now, True
            if part.finish_reason is not None:
                self._end(running_text.batched, part)
            else:
                running_text.parts.put_nowait(part)

    def _end(self, batched: BatchedText, part: Any) -> None:
        self.batch.remove(batched)
        if batched in self._texts:  # else nobody waits for it
            self._texts.pop(batched).parts.put_nowait(part)


class TextLoop:
    """Generates texts with a decoder whose texts have rows of their own.

    While a lane of the decoder, a device or a process, runs a call of one batch, the other lanes run those of other batches. What a text
    says depends on the texts beside it as far as the rounding of sums depends on the size of a batch.

    Attributes:
        row_count: the number of texts that are under way at most.
    """

    def __init__(self, decoder: ServedModel, facts: DecoderFacts) -> None:
        limits = decoder.limits
        rows = min(limits.max_batch_size, facts.max_batch or limits.max_batch_size) if facts.moves_rows else 1
        # Texts that share no call take turns.
        lane_count = limits.max_sequences if rows == 1 else min(decoder.lane_count, rows, limits.max_sequences)
        self._decoder = decoder
        self._texts: dict[BatchedText, _Text] = {}
        self._waiting = ClientQueue()
        batches = [TextBatch(facts, rows, self._waiting, is_alone=lane_count == 1) for _ in range(lane_count)]
        self.row_count = rows * lane_count
        self._admission = TextAdmission(decoder, self.row_count)
        self._lanes = [_Lane(decoder, batch, self._texts, self._waiting, self._admission) for batch in batches]

    @property
    def text_count(self) -> int:
        """The number of texts that are under way, or wait for a row of the cache."""
        return len(self._texts)

    @property
    def held_tokens(self) -> int:
        """The number of tokens that the caches hold."""
        return sum(lane.batch.held_tokens for lane in self._lanes)

    async def generate(self, loop: TokenLoop, take: TakeLogits) -> AsyncGenerator[Any, None]:
        """Generate a text in the lane with the fewest ones; yield what `take` returns.

        It is refused with too many prompts that wait, and if it would end too late. The texts of a request are asked for at once, so that
        they come before those of later requests of its client.
        """
        running_text = _Text(BatchedText(loop), take, time.monotonic())
        batched = running_text.batched
        lane = min(self._lanes, key=lambda lane: len(lane.batch))
        is_first = self._admission.is_first()
        self._admission.add(batched, loop.new_tokens_left)
        if len(lane.batch) < lane.batch.most_texts and not self._waiting:  # first come, first served
            lane.batch.add(batched)
        else:
            try:
                self._check_waiting(loop.tokens.shape[1], is_first=is_first)
            except RequestError:
                self._admission.remove(batched)
                raise
            self._waiting.append(batched)
        self._texts[batched] = running_text
        lane.start()
        try:
            while True:
                part = await running_text.parts.get()
                if isinstance(part, Exception):
                    raise part
                yield part
                if part.finish_reason is not None:
                    return
        finally:
            self._admission.remove(batched)
            self._texts.pop(batched, None)
            for lane in self._lanes:
                lane.batch.remove(batched)
            self._waiting.remove(batched)

    def _check_waiting(self, prompt_length: int, *, is_first: bool) -> None:
        """Refuse a request by its first text, and not by its own texts."""
        waiting_count = sum(len(batched.unread_tokens) for batched in self._waiting)
        most_waiting = self._decoder.limits.max_waiting_tokens
        if is_first and waiting_count and waiting_count + prompt_length > most_waiting:
            found = f"prompts of {waiting_count} tokens wait already, and at most {most_waiting} may"
            raise RequestError(RequestStatus.BUSY, f"{self._decoder.name}: {found}: try again later")
