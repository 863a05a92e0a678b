"""Which texts a decoder accepts under load: those that it ends while clients wait, by the tokens that are left of the texts before."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from stagepack_loaders.generation.text_batch import BatchedText
from stagepack_serving.server.access_log import current_record
from stagepack_serving.server.admission import DEADLINE_SHARE, PATIENCE_SHARE
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.served_model import ServedModel

# Calls that the rate of tokens is measured with; fewer than the least number say nothing.
_CALL_COUNT: Final = 256
_FEWEST_CALLS: Final = 8


@dataclass(slots=True)
class _Work:
    """A text that has not ended: the tokens that are left of it, and the record of its request."""

    tokens_left: int
    record: Any = field(default_factory=current_record.get)


class TextAdmission:
    """Admits texts to the rows of a decoder, and to the queue before them.

    `Admission` learns from requests that are answered. A request may have many texts, of any length, so that none says in time how long
    the next one takes: texts are counted by their tokens, and each call teaches the rate. A text that ends before its largest number of
    tokens counts as if it had them, in what is left and in the rate.
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
        record = current_record.get()
        return record is None or all(work.record is not record for work in self._work.values())

    def add(self, text: BatchedText, new_tokens: int) -> None:
        """Admit a text with so many new tokens at most, or refuse it with `RequestStatus.BUSY`."""
        place, record = self._decoder.admission.current_place(), current_record.get()
        if len(self._work) >= self._row_count and place is not None:
            place.waits = True
            if any(work.record is not record for work in self._work.values()):
                # Rows are shared: the text itself takes as long as a half of the other rows, and its own one.
                tokens = sum(work.tokens_left for work in self._work.values()) + new_tokens * (self._row_count + 1) / 2
                self._check(tokens, place.seconds_left())
        self._work[text] = _Work(new_tokens)

    def count_call(self, tokens: dict[BatchedText, bool]) -> None:
        """Count the tokens of a call, by whether a text ends with it."""
        for text, has_ended in tokens.items():
            if (work := self._work.get(text)) is not None:
                added = work.tokens_left if has_ended else 1
                self._token_count += added
                work.tokens_left -= added
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

    def _check(self, tokens: float, seconds_left: float) -> None:
        admission = self._decoder.admission
        seconds = min(DEADLINE_SHARE * seconds_left, PATIENCE_SHARE * admission.patience_seconds())
        if self._rate and tokens > self._rate * seconds:
            found = (
                f"{len(self._work)} texts are under way or wait, and {self._rate:.3g} tokens are generated in a second"
            )
            expected = f"this text would end after {tokens / self._rate:.3g} s"
            error = RequestError(RequestStatus.BUSY, f"{self._decoder.name}: {found}: {expected}: try again later")
            mean_tokens = sum(work.tokens_left for work in self._work.values()) / len(self._work)
            error.retry_seconds = admission.retry_seconds(mean_tokens / self._rate)
            raise error
