"""Which requests a model accepts under load, simulated: the share of its capacity that answers clients who still wait."""

import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest

from stagepack_serving.server.admission import Admission, Patience, Turns
from stagepack_serving.server.errors import RequestError, RequestStatus

RUN_SECONDS = 0.02
MOST_REQUESTS = 256


class Simulation:
    """Clients of a model that runs one request after another, on a clock of its own.

    Each client asks again at once when it has waited for long enough, and after a refusal when that says.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, client_seconds: float, tells_deadline: bool) -> None:
        self.now = 0.0
        monkeypatch.setattr("stagepack_serving.server.admission.time.monotonic", lambda: self.now)
        self.admission = Admission("m", MOST_REQUESTS, 2)
        self.answers: list[float] = []
        self.refusals = 0
        self._client_seconds = client_seconds
        self._deadline = client_seconds if tells_deadline else 60.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._places: dict[int, AbstractContextManager[None]] = {}
        self._queue: deque[int] = deque()
        self._running: int | None = None

    def ask_in(self, seconds: float) -> None:
        self._after(seconds, self._ask)

    def run(self, seconds: float) -> None:
        end_time = self.now + seconds
        while self._events and self._events[0][0] < end_time:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end_time

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _ask(self) -> None:
        place = self.admission.place(self._deadline, lambda: False)
        try:
            place.__enter__()
        except RequestError as error:
            self.refusals += 1
            self.ask_in(error.retry_seconds)
            return
        number = next(self._numbers)
        self._places[number] = place
        self._queue.append(number)
        self._after(self._client_seconds, partial(self._give_up, number))
        self._run_next()

    def _run_next(self) -> None:
        while self._running is None and self._queue:
            number = self._queue.popleft()
            if number in self._places:
                self._running = number
                self._after(RUN_SECONDS, partial(self._answer, number))

    def _answer(self, number: int) -> None:
        self._running = None
        if number in self._places:
            self._places.pop(number).__exit__(None, None, None)
            self.answers.append(self.now)
            self.ask_in(0)
        self._run_next()

    def _give_up(self, number: int) -> None:
        if number in self._places:
            error = RequestError(RequestStatus.HUNG_UP, "the client closed the connection")
            assert not self._places.pop(number).__exit__(RequestError, error, None)
            self.ask_in(0)


@pytest.mark.parametrize("tells_deadline", [False, True])
@pytest.mark.parametrize("load", [3, 5])
def test_most_answers_are_in_time_under_overload(
    monkeypatch: pytest.MonkeyPatch, load: int, tells_deadline: bool
) -> None:
    simulation = Simulation(monkeypatch, client_seconds=1, tells_deadline=tells_deadline)
    for number in range(round(load / RUN_SECONDS)):
        simulation.ask_in(number * RUN_SECONDS / load)
    simulation.run(60)
    assert len(simulation.answers) > 0.9 * 60 / RUN_SECONDS


def test_clients_who_have_all_given_up_are_not_all_admitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, error = [0.0], RequestError(RequestStatus.HUNG_UP, "the client closed the connection")
    monkeypatch.setattr("stagepack_serving.server.admission.time.monotonic", lambda: now[0])
    admission = Admission("m", MOST_REQUESTS, 2)

    def admitted_count() -> int:
        places = []
        for _ in range(MOST_REQUESTS):
            place = admission.place(60, lambda: False)
            with contextlib.suppress(RequestError):
                place.__enter__()
                places.append(place)
        now[0] += 1
        for place in places:
            place.__exit__(RequestError, error, None)
        return len(places)

    assert [admitted_count() for _ in range(3)] == [MOST_REQUESTS, 2, 2]


def test_refused_clients_come_back_at_the_rate_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(monkeypatch, client_seconds=1, tells_deadline=True)
    for number in range(round(8 / RUN_SECONDS)):
        simulation.ask_in(number * RUN_SECONDS / 8)
    simulation.run(20)
    simulation.answers, simulation.refusals = [], 0
    simulation.run(40)
    assert len(simulation.answers) > 0.9 * 40 / RUN_SECONDS
    assert simulation.refusals < 1.1 * len(simulation.answers)


def test_refusals_wait_for_turns_beyond_a_rate() -> None:
    turns = Turns(longest_wait=0.5)
    waits = [turns.take(0.01) for _ in range(200)]
    assert waits[0] < 0.01
    assert waits == sorted(waits)
    assert waits[30] == pytest.approx(0.3, abs=0.1)
    assert waits[-1] == pytest.approx(0.5)


def test_patient_clients_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(monkeypatch, client_seconds=30, tells_deadline=False)
    for _ in range(200):
        simulation.ask_in(0)
    simulation.run(60)
    assert not simulation.refusals
    assert len(simulation.answers) == 60 / RUN_SECONDS - 1


def test_the_patience_of_clients_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(monkeypatch, client_seconds=1, tells_deadline=False)
    for _ in range(150):
        simulation.ask_in(0)
    simulation.run(10)
    assert simulation.refusals
    simulation._client_seconds = 30
    simulation.run(120)
    simulation.refusals = 0
    simulation.run(10)
    assert not simulation.refusals


def test_a_client_that_hangs_up_without_a_queue_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(monkeypatch, client_seconds=0.001, tells_deadline=False)
    simulation.ask_in(0)
    simulation.run(10)
    simulation._client_seconds = 30
    for _ in range(200):
        simulation.ask_in(0)
    simulation.run(10)
    assert not simulation.refusals


def test_a_sender_that_gives_up_keeps_no_other_from_waiting() -> None:
    patience = Patience()
    for _ in range(100):
        patience.learn("impatient", 0.05, is_given_up=True)
    patience.learn("patient", 9.0)
    assert patience.seconds("impatient") == pytest.approx(0.05, rel=0.1)
    assert patience.seconds("patient") == patience.seconds("new") == math.inf


@pytest.mark.parametrize(("answered_seconds", "ends"), [(1.5, True), (3.0, False)])
def test_who_gives_up_as_before_ends_the_trial_of_a_longer_wait(
    monkeypatch: pytest.MonkeyPatch, answered_seconds: float, ends: bool
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    patience = Patience()
    for _ in range(4):
        patience.learn("a", 2.0, is_given_up=True)
    for _ in range(16):
        patience.learn("a", answered_seconds)
    now = 30.0
    assert patience.seconds("a") == 4
    patience.learn("a", 0.1, is_given_up=True)  # one that leaves earlier says nothing
    assert patience.seconds("a") == 4
    patience.learn("a", 1.99, is_given_up=True)
    assert patience.seconds("a") == (2 if ends else 4)


def test_what_most_senders_show_holds_for_all() -> None:
    patience = Patience()
    for sender in "abc":
        for _ in range(8):
            patience.learn(sender, 1.0, is_given_up=True)
    patience.learn("patient", 9.0)
    assert [patience.seconds(sender) for sender in ("new", "patient")] == pytest.approx([1, 1], rel=0.1)


def test_the_senders_that_are_known_are_bounded() -> None:
    patience = Patience()
    for number in range(10_000):
        patience.learn(str(number), 1.0, is_given_up=True)
    assert len(patience._senders) <= 64


def test_more_requests_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(monkeypatch, client_seconds=30, tells_deadline=False)
    for _ in range(MOST_REQUESTS + 1):
        simulation.ask_in(0)
    simulation.run(0.001)
    assert simulation.refusals == 1
    assert simulation.admission.pending_requests == MOST_REQUESTS
