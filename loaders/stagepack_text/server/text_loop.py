"""Makes the calls of a decoder that generate texts. Clients whose texts wait take turns."""

import asyncio
import contextvars
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from stagepack.errors import InputError, StageFailedError
from stagepack_loaders.decoders import DecoderFacts
from stagepack_loaders.elements import Array
from stagepack_loaders.versions import StageVersion
from stagepack_serving.server.access_log import current_sender
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.loop.text_batch import BatchCall, TextBatch, TextSequence
from stagepack_text.sampling import logits_as_floats
from stagepack_text.server.served_text import GeneratedPart, ServedText
from stagepack_text.server.text_admission import TextAdmission

# The calls of some texts, one after the other.
_Lane = TextBatch[ServedText] | TextSequence[ServedText]
# What a text has got of a call.
_Result = tuple[ServedText, GeneratedPart | Exception]


class ClientQueue:
    """Texts that wait. Their senders (see `RequestRecord`) take turns; the texts of one are served first come, first served.

    So a client that sends a hundred requests at once lets others wait for one of its texts, and not for all of them.
    """

    def __init__(self) -> None:
        # By client; the one whose turn is next comes first.
        self._texts: dict[str, deque[ServedText]] = {}

    def __len__(self) -> int:
        """The number of texts."""
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[ServedText]:
        """The texts, by client."""
        return (text for texts in self._texts.values() for text in texts)

    def append(self, text: ServedText) -> None:
        """Add a text of the client whose request is answered."""
        self._texts.setdefault(current_sender(), deque()).append(text)

    def popleft(self) -> ServedText:
        """Take out the text that is next."""
        client = next(iter(self._texts))
        texts = self._texts.pop(client)
        text = texts.popleft()
        if texts:
            self._texts[client] = texts
        return text

    def remove(self, text: ServedText) -> None:
        """Take out a text, if it waits."""
        for client, texts in list(self._texts.items()):
            if text in texts:
                texts.remove(text)
                if not texts:
                    del self._texts[client]


class TextLoop:
    """Generates texts with a decoder.

    Texts that have rows of their own share the calls of a lane: each step, all texts under way are in one call. While a lane, a device or a
    process, runs a call of one batch, the other lanes run those of other batches. What a text says depends on the texts beside it as far as
    the rounding of sums depends on the size of a batch. Other texts have a lane each, so that texts at the same time fill the stages.

    encode: gives a text what an encoder returns for its prompt, with a version of its weights; None for a decoder without one.
    encoder: the encoder.
    reader_of: what reads the prompts of texts of a version: one whose prompt was read by another one is refused.

    Attributes:
        row_count: the number of texts that are under way at most.
    """

    def __init__(
        self,
        decoder: ServedModel,
        facts: DecoderFacts,
        encode: Callable[[ServedText, StageVersion], Awaitable[None]] | None = None,
        encoder: ServedModel | None = None,
        *,
        reader_of: Callable[[StageVersion], object] = lambda _: None,
    ) -> None:
        limits = decoder.limits
        rows = min(limits.max_batch_size, facts.max_batch or limits.max_batch_size) if facts.moves_rows else 1
        # Texts that share no call take turns.
        lane_count = limits.max_sequences if rows == 1 else min(decoder.lane_count, rows, limits.max_sequences)
        self._decoder = decoder
        self._facts = facts
        self._encode = encode
        self._reader_of = reader_of
        self._encoder = encoder or decoder
        self._waiting = ClientQueue()
        self._new_batch = functools.partial(TextBatch[ServedText], facts, rows, self._waiting, is_alone=lane_count == 1)
        # Lanes that texts begin in; others only finish theirs, with the weights before an update.
        self._batches = [self._new_batch() for _ in range(lane_count if facts.has_rows else 0)]
        self._sequences: dict[ServedText, TextSequence[ServedText]] = {}
        # Lanes that have texts, each with the task that makes its calls.
        self._tasks: dict[_Lane, asyncio.Task[None]] = {}
        self._weights: dict[_Lane, StageVersion] = {}
        self._encoder_weights: dict[_Lane, StageVersion] = {}
        self.row_count = rows * lane_count
        self._admission = TextAdmission(decoder, self.row_count)
        [self._logits_output] = decoder.interface.outputs

    @property
    def text_count(self) -> int:
        """The number of texts that are under way, or wait for a row of the cache."""
        return sum(map(len, self._tasks)) + len(self._waiting)

    @property
    def held_tokens(self) -> int:
        """The number of tokens that the caches of batches hold."""
        return sum(lane.held_tokens for lane in self._tasks)

    def begin(self, text: ServedText) -> None:
        """Generate a text: alone, or in the lane with the fewest ones.

        It is refused with too many prompts that wait, and if it would end too late. The texts of a request are asked for at once, so that
        they come before those of later requests of its client.
        """
        lane: _Lane
        self.follow_weights()
        if self._facts.has_rows:
            lane = min(self._batches, key=len)
            is_first = self._admission.add(text)
            if len(lane) < lane.most_texts and not self._waiting:  # first come, first served
                lane.add(text)
            else:
                self._check_waiting(text, is_first=is_first)
                self._waiting.append(text)
        else:
            lane = self._sequences[text] = TextSequence(text)
        self._start(lane)

    def follow_weights(self) -> None:
        """Let texts that have not begun begin in batches with the newest weights. Those that have begun finish with theirs."""
        for index, batch in enumerate(self._batches):
            if self._weights.get(batch, self._decoder.weights) is not self._decoder.weights:
                batch.retire()
                self._batches[index] = self._new_batch()
        if self._waiting:
            for batch in self._batches:
                self._start(batch)

    def _start(self, lane: _Lane) -> None:
        """Make the calls of a lane in a task, unless one does."""
        if lane not in self._tasks:
            self._take_newest(lane)
            # The calls of a batch are for all its texts, and not for the request that makes it start.
            context = contextvars.Context() if self._facts.has_rows else None
            self._tasks[lane] = asyncio.create_task(self._run(lane), context=context)

    def end(self, text: ServedText) -> None:
        """Forget a text, which has ended or nobody waits for."""
        text.has_ended = True
        self._admission.remove(text)
        self._waiting.remove(text)
        for lane in (*self._batches, *self._tasks):
            if isinstance(lane, TextBatch):
                lane.remove(text)
        sequence = self._sequences.pop(text, None)
        if sequence is not None and (task := self._tasks.pop(sequence, None)) is not None:
            task.cancel()

    def _check_waiting(self, text: ServedText, *, is_first: bool) -> None:
        """Refuse a request by its first text, and not by its own texts."""
        waiting_count = sum(len(waiting.unread_tokens) for waiting in self._waiting)
        most_waiting = self._decoder.limits.max_waiting_tokens
        if is_first and waiting_count and waiting_count + len(text.unread_tokens) > most_waiting:
            found = f"prompts of {waiting_count} tokens wait already, and at most {most_waiting} may"
            raise RequestError(RequestStatus.BUSY, f"{self._decoder.name}: {found}: try again later")

    async def _run(self, lane: _Lane) -> None:
        """Make calls while there are texts, and hand out what they add to these."""
        try:
            while len(lane) or (self._waiting and lane in self._batches):
                if not len(lane):
                    self._take_newest(lane)
                async with self._decoder.reserve_sequence(self._weights[lane]) as sequence:
                    self._end_refused_texts(lane)
                    if self._encode is not None and isinstance(lane, TextSequence) and lane.text is not None:
                        await self._encode(lane.text, self._encoder_weights[lane])
                    while (call := lane.next_call()) is not None:
                        for text in call.texts.values():
                            text.weights = self._weights[lane]
                        take = functools.partial(self._take, call)
                        try:
                            results: list[_Result] = await self._decoder.call(
                                call.inputs, sequence, take, adapter=call.adapters, weights=self._weights[lane]
                            )
                        except RequestError as error:
                            self._begin_again(lane, error)
                            break
                        self._count(results)
                        for text, part in results:
                            if isinstance(part, Exception) or part.finish_reason is not None:
                                self._end(lane, text, part)
                            else:
                                text.parts.put_nowait(part)
                        self._end_refused_texts(lane)
        except Exception as error:  # noqa: BLE001 - the requests get any error
            while (ended := lane.take_any()) is not None:
                self._end(lane, ended, error)
            while self._waiting:
                self._end(lane, self._waiting.popleft(), error)
        finally:
            self._tasks.pop(lane, None)
            self._weights.pop(lane, None)
            self._encoder_weights.pop(lane, None)

    def _take_newest(self, lane: _Lane) -> None:
        """Let the texts of a lane have the newest weights: encoder and decoder those of one version."""
        self._weights[lane], self._encoder_weights[lane] = self._decoder.weights_with(self._encoder)

    def _end_refused_texts(self, lane: _Lane) -> None:
        """End the texts that cannot begin in the next call: the model has changed since they were asked for, or it is too late."""
        self.follow_weights()
        takes_waiting = len(lane) < lane.most_texts and lane in self._batches
        for text in (*lane.beginning, *(self._waiting if takes_waiting else ())):
            if (refusal := self._refusal(text, self._weights[lane])) is not None:
                self._waiting.remove(text)
                self._end(lane, text, refusal)
        if self._waiting and len(lane) < lane.most_texts:
            for text, error in self._admission.late_texts(self._waiting).items():
                self._waiting.remove(text)
                self._end(lane, text, error)

    def _refusal(self, text: ServedText, weights: StageVersion) -> RequestError | None:
        """Why a text cannot begin with a version; None if it can."""
        if text.reader is not self._reader_of(weights):
            changed = (
                "the tokenizer, the chat template or the settings of generation were updated before the text began"
            )
            return RequestError(RequestStatus.STAGE_LOST, f"{self._decoder.name}: {changed}: try again")
        if text.adapter is not None and text.adapter not in weights.adapters.names:
            message = f"{self._decoder.name}: adapter: {text.adapter!r} was unloaded before the text began"
            return BadRequestError(message)
        return None

    def _begin_again(self, lane: _Lane, error: RequestError) -> None:
        """After a call that failed, find the text that it fails for. The texts are read again in a new sequence."""
        if error.status is RequestStatus.STAGE_LOST:
            raise error
        failed = lane.begin_again()
        if failed is not None:
            self._end(lane, failed, error)

    def _take(self, call: BatchCall[ServedText], outputs: Mapping[str, Array]) -> list[_Result]:
        """The parts that a call adds to texts, or why one gets no part. Runs in another thread, while requests may end."""
        logits, results = outputs[self._logits_output], list[_Result]()
        for position, text in call.texts.items():
            if text.has_ended:
                continue
            try:
                part = text.take(logits_as_floats(logits[position : position + 1], self._facts.logits))
                results.append((text, part))
            except StageFailedError as error:
                message = f"{self._decoder.name}: {error}"
                results.append((text, RequestError(RequestStatus.MODEL_FAILED, message)))
            except InputError as error:
                results.append((text, BadRequestError(f"{self._decoder.name}: {error}")))
            except Exception as error:  # noqa: BLE001 - of one text: the others go on
                results.append((text, error))
        return results

    def _count(self, results: Sequence[_Result]) -> None:
        """Count the tokens of a call."""
        now, metrics = time.monotonic(), self._decoder.metrics
        tokens = {text: part.finish_reason is not None for text, part in results if not isinstance(part, Exception)}
        self._admission.count_call(tokens)
        for text in tokens:
            seconds, is_first = now - text.last_time, not text.has_begun
            metrics.count_token(self._decoder.name, self._decoder.version, seconds, is_first=is_first)
            text.last_time, text.has_begun = now, True

    def _end(self, lane: _Lane, text: ServedText, part: GeneratedPart | Exception) -> None:
        lane.remove(text)
        if not text.has_ended:
            text.has_ended = True
            text.parts.put_nowait(part)
