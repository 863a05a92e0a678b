"""Which texts a decoder accepts under load: those that it ends while clients wait, by the tokens that are left of the texts before."""

import functools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stagepack_loaders.generation.text_batch import BatchedText
from stagepack_serving.server.admission import DEADLINE_SHARE, PATIENCE_SHARE, Place
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.served_model import ServedModel

# Calls that the rate of tokens is measured with; fewer than the least number say nothing.
_CALL_COUNT: Final = 256
_FEWEST_CALLS: Final = 8


@dataclass(slots=True)
class _Work:
    """A text that has not ended: the tokens that are left of it, and the place of its request."""

    tokens_left: int
    place: Place | None


class TextAdmission:
    """Admits texts to the rows of a decoder, and to the queue before them.

    `Admission` learns from requests that are answered. A request may have many texts, of any length, so that none says in time how long
    the next one takes: texts are counted by their tokens, and each call teaches the rate. A text that ends before its largest number of
    tokens counts as if it had them, in what is left and in the rate.

    A request that was admitted before more was known is refused when rows are free and it would end too late, unless it has a token.
    """

    def __init__(self, decoder: ServedModel, row_count: int) -> None:
        self._decoder = decoder
        self._row_count = row_count
        self._work: dict[BatchedText, _Work] = {}
        # When each call ended while all rows were in use, and the tokens that all calls until then have added.
        self._calls: deque[tuple[float, int]] = deque(maxlen=_CALL_COUNT)
        self._token_count = 0
        self._rate = 0.0

    def is_first(self) -> bool:
        """Whether the request that the task works on has no text here."""
        place = self._decoder.admission.current_place()
        return place is None or all(work.place is not place for work in self._work.values())

    def add(self, text: BatchedText, new_tokens: int) -> None:
        """Admit a text with so many new tokens at most, or refuse it with `RequestStatus.BUSY`."""
        place = self._decoder.admission.current_place()
        if len(self._work) >= self._row_count and place is not None:
            place.waits = True
            if any(work.place is not place for work in self._work.values()):
                tokens = sum(work.tokens_left for work in self._work.values()) + self._tokens_beside(new_tokens)
                patience = PATIENCE_SHARE * self._decoder.admission.patience_seconds(place.sender)
                if error := self._lateness(tokens, place.answer_seconds(patience)):
                    raise error
        self._work[text] = _Work(new_tokens, place)

    def late_texts(self, waiting: Iterable[BatchedText]) -> dict[BatchedText, RequestError]:
        """Return the texts of requests without a token that would end too late if they got the next rows, and why they are refused."""
        by_place: dict[Place, list[BatchedText]] = {}
        for text in waiting:
            place = self._work[text].place
            if place is not None and not place.has_begun:
                by_place.setdefault(place, []).append(text)
        late: dict[BatchedText, RequestError] = {}
        # Kept, as each is found by what all senders have shown: 256 requests took 10 ms.
        patience_of = functools.cache(self._decoder.admission.patience_seconds)
        for place, texts in by_place.items():
            *others, last = (self._work[text].tokens_left for text in texts)
            tokens = sum(others) + self._tokens_beside(last)
            if error := self._lateness(tokens, place.answer_seconds(DEADLINE_SHARE * patience_of(place.sender))):
                late |= dict.fromkeys(texts, error)
        return late

    def count_call(self, tokens: dict[BatchedText, bool]) -> None:
        """Count the tokens of a call, by whether a text ends with it."""
        for text, has_ended in tokens.items():
            if (work := self._work.get(text)) is not None:
                added = work.tokens_left if has_ended else 1
                self._token_count += added
                work.tokens_left -= added
                if work.place is not None:
                    work.place.has_begun = True
        if len(self._work) >= self._row_count:
            self._calls.append((time.monotonic(), self._token_count))
            if len(self._calls) > _FEWEST_CALLS:
                (start, before), (end, after) = self._calls[0], self._calls[-1]
                self._rate = (after - before) / max(end - start, 1e-9)
        else:
            self._calls.clear()  # the rate of fewer texts is another one

    def remove(self, text: BatchedText) -> None:
        """Forget a text, which has ended."""
        self._work.pop(text, None)

    def _tokens_beside(self, new_tokens: int) -> float:
        """The tokens that are generated until a text has ended: rows are shared, and a half of the others ends before it."""
        return new_tokens * (self._row_count + 1) / 2

    def _lateness(self, tokens: float, seconds: float) -> RequestError | None:
        """The error of a text that may take so many seconds, if so many tokens take longer."""
        if not self._rate or tokens <= self._rate * seconds:
            return None
        found = f"{len(self._work)} texts are under way or wait, and {self._rate:.3g} tokens are generated in a second"
        expected = f"this text would end after {tokens / self._rate:.3g} s"
        error = RequestError(RequestStatus.BUSY, f"{self._decoder.name}: {found}: {expected}: try again later")
        mean_tokens = sum(work.tokens_left for work in self._work.values()) / len(self._work)
        error.retry_seconds = self._decoder.admission.retry_seconds(mean_tokens / self._rate)
        return error
