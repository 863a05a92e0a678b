"""Texts are admitted by the tokens that are left of those before."""

import asyncio
import contextlib
import contextvars
import selectors
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from stagepack_loaders.decoders import DecoderFacts
from stagepack_serving.server.access_log import begin_record
from stagepack_serving.server.admission import Admission
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_text.server.served_text import ServedText
from stagepack_text.server.text_admission import TextAdmission
from stagepack_text.server.text_loop import TextLoop
from stagepack_text.settings import GenerationSettings
from tests.text.generating_model import served_text

ROWS, TOKENS, STEP_SECONDS = 6, 24, 0.05
CHOICES, DEADLINE = 8, 6.0
LARGE = DecoderFacts(max_positions=2000, logits=None, takes_encoder=False, encoder_positions=None)  # type: ignore[arg-type]


class Requests:
    """Requests of eight texts each, whose texts run in six rows, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        fields: dict[str, Any] = {"name": "m", "admission": Admission("m", 256, ROWS + 1)}
        decoder: Any = SimpleNamespace
        self.decoder = decoder(**fields)
        self.admission = TextAdmission(self.decoder, ROWS)
        self.texts: dict[ServedText, int] = {}
        self.refusal: RequestError | None = None
        self.are_first: list[bool] = []

    def ask(self, new_tokens: int = TOKENS, count: int = 8) -> bool:
        """Whether a request is admitted."""
        return contextvars.copy_context().run(self._ask, new_tokens, count)

    def _ask(self, new_tokens: int, count: int) -> bool:
        begin_record(None, "client:1", "POST /", "openai")
        settings = GenerationSettings(max_new_tokens=new_tokens)
        texts = [served_text(LARGE, settings) for _ in range(count)]
        place = self.decoder.admission.place(DEADLINE, lambda: False)
        place.__enter__()
        try:
            self.are_first = [self.admission.add(text) for text in texts]
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
    for _ in range(2):
        assert requests.ask()
        assert requests.are_first == [True] + [False] * 7


def test_a_request_that_waits_is_refused_once_the_next_rows_are_too_late_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = Requests(monkeypatch)
    admitted = sum(requests.ask() for _ in range(4))  # nothing is known yet
    assert admitted == 4
    late_counts = []
    for _ in range(72):  # a request takes 2.1 s after it has got its rows, of 0.8 of what is left of its deadline
        requests.step()
        late_counts.append(len(requests.admission.late_texts(list(requests.texts)[ROWS:])))
    assert late_counts[:60] == [0] * 60
    assert late_counts[-1] == 8  # the third one has begun


class JumpingSelector(selectors.SelectSelector):
    """Lets no time pass: what a loop would wait for comes at once, on a clock of its own."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        self.now += 0 if ready else timeout or 0
        return ready


class SteadyDecoder:
    """A decoder whose calls all take as long."""

    name, version, lane_count = "steady", "1", 1
    interface = SimpleNamespace(outputs=["logits"])

    def __init__(self) -> None:
        self.limits, self.metrics = ServerLimits(max_batch_size=ROWS), Metrics()
        self.weights = SimpleNamespace(adapters=SimpleNamespace(names=()))
        self.admission = Admission(self.name, 256, ROWS + 1)

    def weights_with(self, _: object) -> tuple[object, object]:
        return self.weights, self.weights

    @contextlib.asynccontextmanager
    async def reserve_sequence(self, weights: object) -> AsyncIterator[None]:
        yield

    async def call(self, inputs: Mapping[str, Any], sequence: None, finish: Any, *, adapter: Any, weights: Any) -> Any:
        await asyncio.sleep(STEP_SECONDS)
        return finish({"logits": numpy.zeros((len(inputs["input_ids"]), 2), numpy.float32)})


class Clients:
    """Clients who wait for some seconds for requests of several texts, with three times the load that the decoder can serve."""

    def __init__(self, client_seconds: float, *, tell_deadline: bool) -> None:
        self.generated_count = self.answered_count = 0
        self._client_seconds = client_seconds
        self._tell_deadline = tell_deadline
        self._decoder: Any = SteadyDecoder()
        self._facts: Any = SimpleNamespace(
            max_positions=96,
            max_batch=ROWS,
            has_rows=True,
            moves_rows=True,
            encoder_positions=None,
            zero_slot=97,
            logits=SimpleNamespace(dtype="float32"),
            takes_encoder=False,
        )
        make_loop: Any = TextLoop  # of fakes
        self._text_loop = make_loop(self._decoder, self._facts)

    async def run(self, seconds: float) -> None:
        capacity = ROWS / STEP_SECONDS / (CHOICES * TOKENS)
        async with asyncio.TaskGroup() as group:
            for _ in range(round(3 * capacity * self._client_seconds)):
                group.create_task(self._ask_until(seconds))

    async def _ask_until(self, seconds: float) -> None:
        while (now := asyncio.get_running_loop().time()) < seconds:
            begin_record(None, "client:1", "POST /", "openai")
            try:
                await self._ask(now + self._client_seconds)
            except RequestError as error:
                if error.status is RequestStatus.BUSY:
                    await asyncio.sleep(error.retry_seconds)
            else:
                self.answered_count += CHOICES * TOKENS

    async def _ask(self, end_time: float) -> None:
        deadline = self._client_seconds if self._tell_deadline else self._decoder.limits.deadline
        late = RequestStatus.TOO_LATE if self._tell_deadline else RequestStatus.HUNG_UP
        with self._decoder.admission.place(deadline, lambda: self._tell_deadline):
            try:
                async with asyncio.timeout_at(end_time), asyncio.TaskGroup() as group:
                    for _ in range(CHOICES):
                        group.create_task(self._generate())
            except TimeoutError:
                raise RequestError(late, "nobody waits any more") from None
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _generate(self) -> None:
        text = served_text(self._facts, GenerationSettings(max_new_tokens=TOKENS))
        try:
            self._text_loop.begin(text)
            while not text.has_ended:
                part = await text.parts.get()
                if isinstance(part, Exception):
                    raise part
        finally:
            self.generated_count += text.loop.tokens.shape[1] - text.loop.prompt_length
            self._text_loop.end(text)


@pytest.mark.parametrize("client_seconds", [6, 10, 20])
@pytest.mark.parametrize("tell_deadline", [True, False])
def test_most_tokens_that_are_generated_under_overload_are_in_answers(
    monkeypatch: pytest.MonkeyPatch, client_seconds: float, tell_deadline: bool
) -> None:
    """In the whole run, of which clients who do not tell how long they wait teach it in the first part."""
    selector = JumpingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        monkeypatch.setattr("time.monotonic", lambda: selector.now)
        clients = Clients(client_seconds, tell_deadline=tell_deadline)
        runner.run(clients.run(60))
        monkeypatch.undo()
    assert clients.generated_count > 0.9 * 60 * ROWS / STEP_SECONDS
    assert clients.answered_count > 0.9 * clients.generated_count, clients.answered_count / clients.generated_count
