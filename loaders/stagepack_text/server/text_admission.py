"""Which texts a decoder accepts under load: those that it ends while clients wait, by the tokens that are left of the texts before."""

import functools
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from stagepack_serving.server.admission import DEADLINE_SHARE, PATIENCE_SHARE, Place
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.server.served_text import ServedText

# Calls that the rate of tokens is measured with; fewer than the least number say nothing.
_CALL_COUNT: Final = 256
_FEWEST_CALLS: Final = 8


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
        self._texts = set[ServedText]()  # that have not ended
        # When each call ended while all rows were in use, and the tokens that all calls until then have added.
        self._calls: deque[tuple[float, int]] = deque(maxlen=_CALL_COUNT)
        self._token_count = 0
        self._rate = 0.0

    def add(self, text: ServedText) -> bool:
        """Admit a text, or refuse it with `RequestStatus.BUSY`; return whether its request has no other text here."""
        place, new_tokens = self._decoder.admission.current_place(), text.loop.new_tokens_left
        is_first = place is None or all(other.place is not place for other in self._texts)
        if len(self._texts) >= self._row_count and place is not None:
            place.waits = True
            if any(other.place is not place for other in self._texts):
                tokens = sum(other.tokens_left for other in self._texts) + self._tokens_beside(new_tokens)
                patience = PATIENCE_SHARE * self._decoder.admission.patience_seconds(place.sender)
                if error := self._lateness(tokens, place.answer_seconds(patience)):
                    raise error
        text.place, text.tokens_left = place, new_tokens
        self._texts.add(text)
        return is_first

    def late_texts(self, waiting: Iterable[ServedText]) -> dict[ServedText, RequestError]:
        """Return the texts of requests without a token that would end too late if they got the next rows, and why they are refused."""
        by_place: dict[Place, list[ServedText]] = {}
        for text in waiting:
            if text.place is not None and not text.place.has_begun:
                by_place.setdefault(text.place, []).append(text)
        late: dict[ServedText, RequestError] = {}
        # Kept, as each is found by what all senders have shown: 256 requests took 10 ms.
        patience_of = functools.cache(self._decoder.admission.patience_seconds)
        for place, texts in by_place.items():
            *others, last = (text.tokens_left for text in texts)
            tokens = sum(others) + self._tokens_beside(last)
            if error := self._lateness(tokens, place.answer_seconds(DEADLINE_SHARE * patience_of(place.sender))):
                late |= dict.fromkeys(texts, error)
        return late

    def count_call(self, tokens: dict[ServedText, bool]) -> None:
        """Count the tokens of a call, by whether a text ends with it."""
        for text, has_ended in tokens.items():
            if text in self._texts:
                added = text.tokens_left if has_ended else 1
                self._token_count += added
                text.tokens_left -= added
                if text.place is not None:
                    text.place.has_begun = True
        if len(self._texts) >= self._row_count:
            self._calls.append((time.monotonic(), self._token_count))
            if len(self._calls) > _FEWEST_CALLS:
                (start, before), (end, after) = self._calls[0], self._calls[-1]
                self._rate = (after - before) / max(end - start, 1e-9)
        else:
            self._calls.clear()  # the rate of fewer texts is another one

    def remove(self, text: ServedText) -> None:
        """Forget a text, which has ended."""
        self._texts.discard(text)

    def _tokens_beside(self, new_tokens: int) -> float:
        """The tokens that are generated until a text has ended: rows are shared, and a half of the others ends before it."""
        return new_tokens * (self._row_count + 1) / 2

    def _lateness(self, tokens: float, seconds: float) -> RequestError | None:
        """The error of a text that may take so many seconds, if so many tokens take longer."""
        if not self._rate or tokens <= self._rate * seconds:
            return None
        found = f"{len(self._texts)} texts are under way or wait, and {self._rate:.3g} tokens are generated in a second"
        expected = f"this text would end after {tokens / self._rate:.3g} s"
        error = RequestError(RequestStatus.BUSY, f"{self._decoder.name}: {found}: {expected}: try again later")
        mean_tokens = sum(text.tokens_left for text in self._texts) / len(self._texts)
        error.retry_seconds = self._decoder.admission.retry_seconds(mean_tokens / self._rate)
        return error
