"""Texts are admitted by the tokens that are left of those before."""

import contextvars
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stagepack_serving.server.access_log import begin_record
from stagepack_serving.server.admission import Admission
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.generation.text_admission import TextAdmission

ROWS, TOKENS, STEP_SECONDS = 6, 24, 0.05
DEADLINE = 6.0


class Requests:
    """Requests of eight texts each, whose texts run in six rows, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        fields: dict[str, Any] = {"name": "m", "admission": Admission("m", 256, ROWS + 1)}
        decoder: Any = SimpleNamespace
        self.decoder = decoder(**fields)
        self.admission = TextAdmission(self.decoder, ROWS)
        self.texts: dict[Any, int] = {}
        self.refusal: RequestError | None = None

    def ask(self, new_tokens: int = TOKENS, count: int = 8) -> bool:
        """Whether a request is admitted."""
        return contextvars.copy_context().run(self._ask, new_tokens, count)

    def _ask(self, new_tokens: int, count: int) -> bool:
        begin_record(None, "client:1", "POST /", "openai")
        texts: list[Any] = [object() for _ in range(count)]
        place = self.decoder.admission.place(DEADLINE, lambda: False)
        place.__enter__()
        try:
            for text in texts:
                self.admission.add(text, new_tokens)
        except RequestError as error:
            self.refusal = error
            for text in texts:
                self.admission.remove(text)
            return False
        self.texts |= dict.fromkeys(texts, new_tokens)
        return True

    def step(self, ends: Callable[[int], bool] = lambda left: left == 0) -> None:
        """A token for the texts in the rows."""
        self.now += STEP_SECONDS
        ended = {}
        for text in list(self.texts)[:ROWS]:
            self.texts[text] -= 1
            ended[text] = ends(self.texts[text])
        self.admission.count_call(ended)
        for text, has_ended in ended.items():
            if has_ended:
                del self.texts[text]
                self.admission.remove(text)


def test_the_rate_is_known_before_a_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    assert requests.ask()
    for _ in range(12):  # no text has ended
        requests.step()
    # 120 tokens in a second: 576 in 0.8 of the deadline.
    admitted = sum(requests.ask() for _ in range(20))
    assert 1 <= admitted <= 3
    while requests.texts:
        requests.step()
    assert requests.now < DEADLINE + 12 * STEP_SECONDS


def test_a_request_is_admitted_alone_however_many_texts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    assert requests.ask()
    while requests.texts:
        requests.step()
    assert requests.ask(count=100)
    assert not requests.ask(count=1)
    assert requests.refusal is not None
    assert requests.refusal.status is RequestStatus.BUSY
    assert "tokens are generated in a second" in str(requests.refusal)


def test_texts_that_end_early_are_counted_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ask for 1,000 tokens and get 10."""
    requests = Requests(monkeypatch)
    admitted = 0
    for _ in range(60):
        admitted += requests.ask(1000)
        requests.step(lambda left: left <= 990)
    assert admitted > 5


def test_requests_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    assert requests.admission.is_first()
    assert requests.ask()
    assert requests.admission.is_first()
