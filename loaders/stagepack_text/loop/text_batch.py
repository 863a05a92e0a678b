"""The calls of a decoder that generate texts: as one batch, whose texts begin and end by themselves, or in a sequence of their own.

A plan does no calls itself: a caller in one thread, an event loop and many lanes make those that it says, and each text takes its logits.
"""

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Protocol, TypeVar

import numpy

from stagepack_loaders.decoders import DecoderFacts
from stagepack_loaders.elements import Array
from stagepack_text.loop.token_loop import TokenLoop, row_inputs

# Tokens of prompts that a call reads while other texts wait for their next token, and while none does.
_CHUNK_TOKENS: Final = 256
_ALONE_TOKENS: Final = 2048
# While none does, if other stages run calls of other batches: with few calls of each, stages wait at their begin and end. Eight prompts of
# 512 in two processes take 0.71 of the time of one process, and 0.77 with 2,048.
_OVERLAPPED_TOKENS: Final = 512


@dataclass(slots=True, eq=False)
class BatchedText:
    """A text under way.

    Attributes:
        loop: its tokens. In a `TextBatch`, its only prompt has no padding; in a `TextSequence`, it may be several texts, in step.
        read_count: the number of its tokens that the cache holds.
        row: its row of the cache; None before its first call.
        adapter: the name of the adapter that it is generated with; None for none.
    """

    loop: TokenLoop
    read_count: int = 0
    row: int | None = None
    adapter: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether logits after its tokens were finite; `TokenLoop.take` refuses others."""
        return self.read_count > 0 and self.loop.tokens.shape[1] > self.loop.prompt_length

    @property
    def unread_tokens(self) -> Array:
        """The tokens that the decoder has not read, [length]."""
        unread: Array = self.loop.tokens[0, self.read_count :]
        return unread


Text = TypeVar("Text", bound=BatchedText)
Text_co = TypeVar("Text_co", bound=BatchedText, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCall(Generic[Text]):
    """A call of the decoder.

    Attributes:
        inputs: its inputs by name.
        texts: the texts whose next token its logits choose, by their position in the batch of the call.
        adapters: the adapter of each row.
    """

    inputs: dict[str, Array]
    texts: dict[int, Text]
    adapters: list[str | None]


class TextQueue(Protocol[Text_co]):
    """Texts that wait."""

    def __len__(self) -> int:
        """The number of texts."""

    def popleft(self) -> Text_co:
        """Take out the text that is next."""


class TextBatch(Generic[Text]):
    """Plans the calls of a decoder whose texts have rows of their own (`DecoderFacts.has_rows`).

    The rows in use are the first ones of the cache. Prompts are read in the rows before those of the other texts, so that a call can leave
    the others out; long ones in parts, between which the others go on.

    A call sees as many slots of each row as its longest text has. What a text has left in a row is replaced by zeros when another one takes
    it, since a mask that is added hides nothing that is not finite: 0 times infinity is NaN. A cache without zeros (see
    `DecoderFacts.zero_slot`) has the first token of a sound text put there, after a text that was not seen to end well.

    is_alone: no other stage runs calls of another batch meanwhile.

    Attributes:
        most_texts: the number of rows.
    """

    def __init__(
        self, facts: DecoderFacts, most_texts: int, waiting: TextQueue[Text] | None = None, *, is_alone: bool = True
    ) -> None:
        self.most_texts = most_texts
        self._facts = facts
        self._texts: list[Text] = []
        self._beginning: deque[Text] = deque()
        # Waiting texts, which several batches take from when they have a free row.
        self._waiting: TextQueue[Text] = deque() if waiting is None else waiting
        self._limit = most_texts
        self._others_wait = False
        # The number of slots of each row that a call may have written, and the rows of texts that have not ended well.
        self._written = [0] * most_texts
        self._doubtful_rows = set[int]()
        self._prompt_tokens = _ALONE_TOKENS if is_alone else _OVERLAPPED_TOKENS

    def __len__(self) -> int:
        """The number of texts that have a row, or get one in the next call."""
        return len(self._texts) + len(self._beginning)

    @property
    def beginning(self) -> list[Text]:
        """The texts that get a row in the next call, or as soon as one is free."""
        return list(self._beginning)

    @property
    def held_tokens(self) -> int:
        """The number of tokens that the cache holds."""
        return sum(batched_text.read_count for batched_text in self._texts)

    def add(self, batched_text: Text) -> None:
        """Let a text begin as soon as a row is free; first come, first served."""
        self._beginning.append(batched_text)

    def remove(self, batched_text: Text) -> None:
        """End a text before its last token, if it has not ended yet."""
        for texts in (self._texts, self._beginning):
            if batched_text in texts:
                texts.remove(batched_text)
                self._doubt(batched_text)

    def retire(self) -> None:
        """Take no waiting texts any more."""
        self._waiting = deque()

    def take_any(self) -> Text | None:
        """Take out a text that has a row, or gets one in the next call; None if there is none."""
        texts = self._texts or self._beginning
        return texts.pop() if texts else None

    def begin_again(self) -> Text | None:
        """After a call that failed, read all texts again, half as many at once; return the text that fails alone, which ends.

        The next call begins another sequence: the cache may be half written.
        """
        failed_texts = [batched_text for batched_text in self._texts if not batched_text.loop.is_finished]
        self._texts = []
        if len(failed_texts) <= 1:
            self._limit = self.most_texts
            self._begin_anew([])
            return failed_texts[0] if failed_texts else None
        self._limit = max(1, len(failed_texts) // 2)
        self._begin_anew(failed_texts)
        return None

    def next_call(self) -> BatchCall[Text] | None:
        """Plan the next call, which has to be made. The loops get its logits before the call after it.

        None ends the sequence of calls: there are no texts, or those that there are begin again in another sequence, whose cache is new.
        """
        going_on = [batched_text for batched_text in self._texts if not batched_text.loop.is_finished]
        if len(going_on) < len(self._texts):
            self._limit = min(self.most_texts, self._limit + 1)
        self._texts = going_on
        queues: tuple[TextQueue[Text], ...] = (self._beginning, self._waiting)
        for queue in queues:
            while len(queue) and len(self._texts) < self._limit:
                self._texts.append(queue.popleft())
        if not self._texts:
            return None
        prompt_texts = [batched_text for batched_text in self._texts if len(batched_text.unread_tokens) > 1]
        decoding_texts = [batched_text for batched_text in self._texts if len(batched_text.unread_tokens) == 1]
        clean_slot = self._clean_slot()
        moves = self._arrange(prompt_texts, decoding_texts)
        if clean_slot is None and any(batched_text.row in self._doubtful_rows for batched_text in self._texts):
            self._begin_anew(self._texts)
            return None
        reads_prompts = bool(prompt_texts) and not (decoding_texts and self._others_wait)
        self._others_wait = reads_prompts and bool(decoding_texts)
        if reads_prompts:
            in_call = prompt_texts
            limit = max(1, (_CHUNK_TOKENS if decoding_texts else self._prompt_tokens) // len(prompt_texts))
        else:
            in_call, limit = prompt_texts + decoding_texts, 1
        in_call = sorted(in_call, key=_row_of)
        # Texts with more of their prompt to read only keep their place while the others go on.
        new_tokens = [
            batched_text.unread_tokens[: limit if reads_prompts or len(batched_text.unread_tokens) == 1 else 0]
            for batched_text in in_call
        ]
        lengths = [batched_text.read_count for batched_text in in_call]
        for batched_text, tokens in zip(in_call, new_tokens, strict=True):
            batched_text.read_count += len(tokens)
        inputs = row_inputs(self._facts, new_tokens, lengths, moves + self._clean(clean_slot))
        texts = {
            position: batched_text
            for position, batched_text in enumerate(in_call)
            if not len(batched_text.unread_tokens)
        }
        return BatchCall(inputs=inputs, texts=texts, adapters=[batched_text.adapter for batched_text in in_call])

    def _arrange(self, prompt_texts: list[Text], decoding_texts: list[Text]) -> list[Array]:
        """Give texts their rows, those of prompts first; return the moves of their tokens, [moves, 4] for each text."""
        moves = []
        for texts, rows in (
            (prompt_texts, range(len(prompt_texts))),
            (decoding_texts, range(len(prompt_texts), len(self._texts))),
        ):
            moving = [batched_text for batched_text in texts if batched_text.row not in rows]
            free_rows = sorted(set(rows) - {batched_text.row for batched_text in texts})
            for batched_text, row in zip(moving, free_rows, strict=True):
                if batched_text.row is not None:
                    if not batched_text.is_sound:
                        self._doubt(batched_text)
                    slots = numpy.arange(batched_text.read_count)
                    ends = numpy.full_like(slots, batched_text.row), slots, numpy.full_like(slots, row), slots
                    moves.append(numpy.stack(ends, 1))
                batched_text.row = row
        return moves

    def _doubt(self, batched_text: Text) -> None:
        if batched_text.row is not None and self.most_texts > 1:
            self._doubtful_rows.add(batched_text.row)

    def _clean_slot(self) -> tuple[int, int] | None:
        """The row and the slot of what replaces the tokens of texts that have ended; None if there is nothing that is finite for sure."""
        if self.most_texts == 1:  # a single text sees its own slots only
            return None
        if self._facts.zero_slot is not None:
            return 0, self._facts.zero_slot
        return next(((_row_of(batched_text), 0) for batched_text in self._texts if batched_text.is_sound), None)

    def _clean(self, clean_slot: tuple[int, int] | None) -> list[Array]:
        """Replace what is in the rows of texts beyond their tokens; return the moves, [moves, 4] for each row."""
        moves = []
        for batched_text in self._texts:
            row, length = _row_of(batched_text), batched_text.read_count
            is_cleaned = clean_slot is not None and (self._facts.zero_slot is not None or row in self._doubtful_rows)
            if clean_slot is not None and is_cleaned:
                slots = numpy.arange(length, self._written[row])
                source_row, source_slot = (numpy.full_like(slots, place) for place in clean_slot)
                moves.append(numpy.stack((source_row, source_slot, numpy.full_like(slots, row), slots), 1))
                self._doubtful_rows.discard(row)
                self._written[row] = length
            self._written[row] = max(self._written[row], length)
        return moves

    def _begin_anew(self, texts: list[Text]) -> None:
        """Let texts begin again in another sequence, before the others."""
        for batched_text in texts:
            batched_text.read_count, batched_text.row = 0, None
        self._beginning.extendleft(reversed(texts))
        self._texts, self._written = [], [0] * self.most_texts
        self._doubtful_rows.clear()


@dataclass(slots=True, eq=False)
class TextSequence(Generic[Text]):
    """Plans the calls of a text, or of texts in step, whose sequence of calls has a state of its own.

    It generates with decoders whose texts have no rows of their own, and for a caller who gets the tokens of all texts at once.

    Attributes:
        text: the text; None after its end.
        most_texts: 1.
        held_tokens: 0: the tokens in the caches of batches are counted.
    """

    most_texts: ClassVar[int] = 1
    held_tokens: ClassVar[int] = 0

    text: Text | None

    def __len__(self) -> int:
        """The number of texts."""
        return int(self.text is not None)

    @property
    def beginning(self) -> list[Text]:
        """The text."""
        return [] if self.text is None else [self.text]

    def remove(self, text: Text) -> None:
        """End the text before its last token, if it has not ended yet."""
        if self.text is text:
            self.text = None

    def take_any(self) -> Text | None:
        """Take out the text; None if it has ended. After a call that failed, it ends: no other one was in the call."""
        text, self.text = self.text, None
        return text

    begin_again = take_any

    def next_call(self) -> BatchCall[Text] | None:
        """Plan the next call, whose logits the text takes before the call after it; None after the last one."""
        if self.text is None or self.text.loop.is_finished:
            return None
        adapters = [self.text.adapter] * len(self.text.loop.tokens)
        return BatchCall(inputs=self.text.loop.next_inputs(), texts={0: self.text}, adapters=adapters)


def _row_of(batched_text: BatchedText) -> int:
    assert batched_text.row is not None
    return batched_text.row
