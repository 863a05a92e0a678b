"""Which requests a model accepts under load: those that it answers while their clients wait.

A queue that is longer than clients wait makes every answer too late: each request that runs has waited for so long that its client is
about to give up. By Little's law, a request that comes to L requests under way is answered after L / λ seconds, λ being the rate of
answers. Sources: J. D. C. Little, "A Proof for the Queuing Formula: L = λW", 1961; on goodput under overload, "Handling Overload" in
"Site Reliability Engineering", https://sre.google/sre-book/handling-overload/.
"""

import asyncio
import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from stagepack_serving.server.access_log import current_record, current_sender
from stagepack_serving.server.errors import RequestError, RequestStatus

# The share of its deadline in which a request is expected to be answered: runs vary. One that will be late is dropped before it runs.
DEADLINE_SHARE: Final = 0.8
# The share of the time that its client waits, which is only an estimate: a batch runs to its end if one of its clients still waits.
PATIENCE_SHARE: Final = 0.5
# Over gRPC, a client whose deadline passes cancels its call at about that time, which may be a little earlier.
_EXPIRED_SHARE: Final = 0.95
# The answers that the rate is measured with: batches of 32 end at once.
_ANSWER_COUNT: Final = 256
_ANSWER_SECONDS: Final = 10.0
# Answers that are fewer say nothing about the rate.
_FEWEST_ANSWERS: Final = 8
# The answers of which the fastest says how long a request takes.
_FASTEST_OF: Final = 64
# The requests of a sender that waited, of which some were given up; fewer of these are no overload.
_WAITED_COUNT: Final = 16
_FEWEST_GIVEN_UP: Final = 4
_GIVEN_UP_SHARE: Final = 1 / 4
# The senders whose requests have waited last.
_SENDER_COUNT: Final = 64
# Clients that are refused are asked to come back in turn, after a second at the earliest, and after so many at the latest.
_LONGEST_RETRY: Final = 10.0
# Clients are taken to wait twice as long after so many seconds in which few give up: it is tried out whether they do.
_PATIENCE_DOUBLES_SECONDS: Final = 30.0
_MOST_DOUBLINGS: Final = 64  # more is no number


@dataclass(slots=True, eq=False)
class Place:
    """The place of a request that was admitted: when its deadline is, who sent it and when, and whether it had to wait."""

    seconds_left: Callable[[], float]
    waits: bool
    sender: str
    start_time: float
    has_begun: bool = False  # whether one of its texts has a token

    def answer_seconds(self, patience: float) -> float:
        """Return how long from now the answer may take, to a client who waits for so many seconds in all."""
        return min(DEADLINE_SHARE * self.seconds_left(), patience - (time.monotonic() - self.start_time))


class Admission:
    """Admits requests to one model. Its methods are called in the thread of the event loop.

    Most clients do not say how long they wait. It is learned from those that give up before their answer begins.

    Attributes:
        pending_requests: the number of requests that were admitted and are not answered yet.
        busy_count: how many requests at a time keep the model at work. So many are always admitted.
    """

    def __init__(self, model_name: str, most_requests: int, busy_count: int) -> None:
        self.pending_requests = 0
        self.busy_count = busy_count
        self._model_name = model_name
        self._most_requests = most_requests
        # While the model was at work without a pause, beginning with when that began.
        self._answer_times: deque[float] = deque(maxlen=_ANSWER_COUNT)
        self._earlier_rate = 0.0
        # Places of the requests under way, by the identity of the record of the request.
        self._places: dict[int, Place] = {}
        self._answer_seconds: deque[float] = deque(maxlen=_FASTEST_OF)
        self._patience = Patience()
        self._retry_turns = Turns(_LONGEST_RETRY)

    def check(self, seconds_left: float) -> None:
        """Refuse a request that is expected to be answered too late, with `RequestStatus.BUSY`."""
        if reason := self.refusal_reason(seconds_left):
            raise self._refusal(reason)

    def refusal_reason(self, seconds_left: float) -> str:
        """Return why a request is refused now that has to be answered in so many seconds; empty if it is not."""
        count = self.pending_requests + 1
        if count <= min(self.busy_count, self._most_requests):
            return ""
        if count > self._most_requests:
            return "at most so many are accepted"
        rate = self._answer_rate()
        expected = f"{rate:.3g} are answered in a second"
        if len(self._answer_times) > _FEWEST_ANSWERS and count > DEADLINE_SHARE * rate * seconds_left:
            return f"{expected}, and this one has to be in {seconds_left:.3g} s"
        patience = self._patience.seconds(current_sender())
        if rate and count > PATIENCE_SHARE * rate * patience:
            return f"{expected}, and clients hang up after {patience:.3g} s"
        return ""

    def current_place(self) -> Place | None:
        """Return the place of the request that the task works on; None if it has none."""
        return self._places.get(id(current_record.get()))

    def patience_seconds(self, sender: str) -> float:
        """Return how long the clients of a sender will wait."""
        return self._patience.seconds(sender)

    def retry_seconds(self, seconds: float) -> int:
        """Return when a client that is refused comes back: so long after the one before, but not much later."""
        return max(1, math.ceil(self._retry_turns.take(seconds)))

    @contextlib.contextmanager
    def place(
        self, seconds_left: float, is_settled: Callable[[], bool], time_left: Callable[[], float] | None = None
    ) -> Iterator[None]:
        """Count a request for the duration of the context, or refuse it; see `check`.

        seconds_left: the time until its deadline.
        is_settled: whether a part of its answer was sent, or its deadline has passed: its end says nothing about its client.
        time_left: the time until its deadline, which may be moved while it is read.
        """
        self.check(seconds_left)
        start_time = time.monotonic()
        end_time = start_time + seconds_left
        waits = self.pending_requests >= self.busy_count
        place = Place(time_left or (lambda: end_time - time.monotonic()), waits, current_sender(), start_time)
        record = current_record.get()  # which lives as long as this call, so that no other one has its identity
        self._places[id(record)] = place
        self.pending_requests += 1
        if self.pending_requests >= self.busy_count and not self._answer_times:
            self._answer_times.append(start_time)
        try:
            yield
        except BaseException as error:
            seconds = time.monotonic() - start_time
            # A deadline is known, and teaches nothing; neither does who would have given up without any load.
            is_late = min(self._answer_seconds, default=0.0) <= seconds < _EXPIRED_SHARE * seconds_left
            if place.waits and is_late and _is_given_up(error) and not is_settled():
                self._patience.learn(current_sender(), seconds, is_given_up=True)
            raise
        else:
            seconds = time.monotonic() - start_time
            self._answer_seconds.append(seconds)
            if place.waits:
                self._patience.learn(current_sender(), seconds)
            if self._answer_times:
                self._answer_times.append(time.monotonic())
        finally:
            self._places.pop(id(record), None)
            self.pending_requests -= 1
            if 2 * self.pending_requests < self.busy_count and self._answer_times:
                self._earlier_rate = self._answer_rate() or 1 / max(time.monotonic() - self._answer_times[0], 1e-9)
                self._answer_times.clear()

    def _refusal(self, reason: str) -> RequestError:
        """A refusal, which asks its client to come back when those that were refused before have come back and are answered."""
        message = (
            f"{self._model_name}: {self.pending_requests} requests are waiting already, and {reason}: try again later"
        )
        error = RequestError(RequestStatus.BUSY, message)
        if len(self._answer_times) > _FEWEST_ANSWERS:
            error.retry_seconds = self.retry_seconds(1 / self._answer_rate())
        return error

    def _answer_rate(self) -> float:
        """How many requests are answered in a second while the model is at work; 0 if this is not known.

        Until enough are, some answers at the rate of the time before count too. If that were forgotten, clients who have all given up
        would all be admitted again, and again none would be answered in time.
        """
        times = self._answer_times
        if not times:
            return self._earlier_rate
        now = time.monotonic()
        while len(times) > _FEWEST_ANSWERS + 1 and now - times[0] > _ANSWER_SECONDS:
            times.popleft()
        answer_count, seconds = len(times) - 1, max(now - times[0], 1e-9)
        if answer_count >= _FEWEST_ANSWERS or not self._earlier_rate:
            return answer_count / seconds
        return (answer_count + _FEWEST_ANSWERS) / (seconds + _FEWEST_ANSWERS / self._earlier_rate)


@dataclass(slots=True)
class _SenderPatience:
    """How long requests of a sender waited until they were given up, None for an answer; what was learned, and when.

    is_longer: whether an answer has come later than what was learned since then.
    """

    waited: deque[float | None] = field(default_factory=lambda: deque(maxlen=_WAITED_COUNT))
    learned_seconds: float = math.inf
    learned_time: float = 0.0
    is_longer: bool = False

    def seconds(self) -> float:
        doublings = (time.monotonic() - self.learned_time) / _PATIENCE_DOUBLES_SECONDS
        return self.learned_seconds * 2 ** min(doublings, _MOST_DOUBLINGS)


class Patience:
    """How long clients wait, learned from those that give up: for each sender by itself, and for all what most senders have shown.

    So a sender that gives up on purpose keeps no other one from waiting.
    """

    def __init__(self) -> None:
        self._senders: dict[str, _SenderPatience] = {}

    def learn(self, sender: str, seconds: float, *, is_given_up: bool = False) -> None:
        """Learn from a request that had to wait, and was answered or given up after so many seconds."""
        known = self._senders[sender] = self._senders.pop(sender, _SenderPatience())
        if len(self._senders) > _SENDER_COUNT:
            del self._senders[next(iter(self._senders))]
        known.waited.append(seconds if is_given_up else None)
        if not is_given_up:
            known.is_longer |= seconds > known.learned_seconds
            return
        times = [waited for waited in known.waited if waited is not None]
        if len(times) >= max(_FEWEST_GIVEN_UP, _GIVEN_UP_SHARE * len(known.waited)):
            known.learned_seconds = statistics.median(times)
        elif known.is_longer or seconds < _EXPIRED_SHARE * known.learned_seconds:
            return
        # The first one that does not wait longer after all ends the trial: each more one that is tried is a lost answer.
        known.learned_time, known.is_longer = time.monotonic(), False

    def seconds(self, sender: str) -> float:
        """Return how long a request of a sender will wait."""
        if not self._senders:
            return math.inf
        seconds = {name: known.seconds() for name, known in self._senders.items()}
        return min(seconds.get(sender, math.inf), statistics.median_high(seconds.values()))


class Turns:
    """Spreads events over time, each one a while after the one before, as long as none waits for longer than a bound."""

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._next_time = 0.0

    def take(self, seconds: float) -> float:
        """Return how long an event waits, which is so many seconds after the one before or later."""
        now = time.monotonic()
        self._next_time = min(max(now, self._next_time + seconds), now + self._longest_wait)
        return self._next_time - now


def _is_given_up(error: BaseException) -> bool:
    """Whether a request ended since its client hung up."""
    return isinstance(error, asyncio.CancelledError) or (
        isinstance(error, RequestError) and error.status is RequestStatus.HUNG_UP
    )
