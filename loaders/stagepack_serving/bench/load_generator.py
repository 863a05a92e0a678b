"""Closed and open loops of clients, and what they show: rates, latencies, goodput, the times of texts, and a client that was too slow.

An open loop is that of wrk2: requests have times at which they are to be sent, which do not depend on answers, and latencies count from
these times, so that a server that stalls delays no request that would have shown it (coordinated omission). Source:
https://github.com/giltene/wrk2.
"""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy

from stagepack_serving.bench.http_client import NO_CONNECTION, HttpClient, NoAnswerError
from stagepack_serving.bench.request_source import RequestSource, TextTimes

TIMED_OUT: Final = "timed out"
NOT_WHOLE: Final = "not whole"
# So many requests were under way that it had no place before the end.
NOT_SENT: Final = "not sent"
# Of Linux: nanoseconds that this thread has run, and that it has waited for a processor.
_SCHEDULER_FILE: Final = Path("/proc/thread-self/schedstat")
# How long a client waits before it connects again to a server that accepts no connections.
_CONNECTION_SECONDS: Final = 0.1
# A server that has too much to do answers with them.
_BUSY: Final = (429, 503)
_PERCENTILES: Final = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}
# Beyond it, what is measured may be the client: it has one thread for all that Python does.
_BUSY_SHARE: Final = 0.8
# Of the median latency, that the client may wait for a processor for each request.
_WAITING_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What clients do; times are in seconds.

    Attributes:
        clients: the number of clients of a closed loop; the largest number of requests under way of an open one.
        rate: the requests a second of an open loop; None for a closed one.
        is_poisson: whether the requests of an open loop are independent of each other, or come at equal intervals.
        seconds: how long is measured.
        warmup: how long requests are sent before that.
        deadline: the time after which an answer is too late to be good; None for no such time.
        timeout: the time after sending a request at which a client gives it up, and closes its connection.
        retries: how often a client asks again, if it has given up or the server is too busy.
        seed: that of the random numbers.
    """

    clients: int = 1
    rate: float | None = None
    is_poisson: bool = True
    seconds: float = 10.0
    warmup: float = 1.0
    deadline: float | None = None
    timeout: float = 60.0
    retries: int = 0
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request and what became of it; times are those of `time.perf_counter`.

    Attributes:
        start: when it was to be sent.
        sent: when it was sent for the first time.
        outcome: the status of its last answer, or why it has none.
        attempt_start: when it was sent, or to be sent, for the last time.
        attempts: how often it was sent.
    """

    start: float
    sent: float
    attempt_start: float
    end: float = 0.0
    outcome: str = ""
    attempts: int = 0
    text: TextTimes | None = None

    @property
    def is_answered(self) -> bool:
        """Whether it has one whole answer without an error."""
        return self.outcome == "200"

    def is_good(self, deadline: float | None) -> bool:
        """Whether it was answered before the deadline, which each attempt has anew."""
        return self.is_answered and (deadline is None or self.end - self.attempt_start <= deadline)


@dataclass(slots=True, kw_only=True)
class LoadRecord:
    """What happened in a run.

    Attributes:
        window: when the measurement began and ended.
        cpu_seconds: the processor time of this process in the window.
        waiting_seconds: how long the event loop had work in the window, and no processor; None if the operating system does not say it.
    """

    window: tuple[float, float]
    exchanges: list[Exchange] = field(default_factory=list)
    cpu_seconds: float = 0.0
    waiting_seconds: float | None = None


async def run_load(client: HttpClient, source: RequestSource, options: LoadOptions) -> LoadRecord:
    """Send requests, and wait for the answers to those that were sent in time."""
    begin = time.perf_counter() + options.warmup
    run = _Run(client, source, options, LoadRecord(window=(begin, begin + options.seconds)))
    client_task = asyncio.create_task(run.measure_client())
    await (run.closed_loop() if options.rate is None else run.open_loop(options.rate))
    await client_task
    return run.record


class _Run:
    def __init__(self, client: HttpClient, source: RequestSource, options: LoadOptions, record: LoadRecord) -> None:
        self._client = client
        self._source = source
        self._options = options
        self._requests = itertools.cycle(source.requests)
        self.record = record

    async def measure_client(self) -> None:
        """Measure in the window how busy this process is, and how long it waits for a processor."""
        begin, end = self.record.window
        await asyncio.sleep(begin - time.perf_counter())
        cpu_start, waiting_start = time.process_time(), _waiting_seconds()
        await asyncio.sleep(end - time.perf_counter())
        self.record.cpu_seconds = time.process_time() - cpu_start
        waiting_end = _waiting_seconds()
        if waiting_start is not None and waiting_end is not None:
            self.record.waiting_seconds = waiting_end - waiting_start

    async def closed_loop(self) -> None:
        """Let each client send a request when it has the answer to the one before."""

        async def ask_on() -> None:
            while (now := time.perf_counter()) < self.record.window[1]:
                retry_after = await self._exchange(now)
                await asyncio.sleep(min(retry_after, self.record.window[1] - time.perf_counter()))

        await asyncio.gather(*(ask_on() for _ in range(self._options.clients)))

    async def open_loop(self, rate: float) -> None:
        """Send requests at their times, whatever became of those before."""
        places = asyncio.Semaphore(self._options.clients)
        under_way: set[asyncio.Task[None]] = set()

        async def ask(start: float) -> None:
            async with places:
                await self._exchange(start)

        def begin(start: float) -> None:
            task = asyncio.create_task(ask(start))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        begin_time, end_time = time.perf_counter(), self.record.window[1]
        count = int((end_time - begin_time) * rate * 2 + 100)
        random = numpy.random.default_rng(self._options.seed)
        gaps = random.exponential(1 / rate, count) if self._options.is_poisson else numpy.full(count, 1 / rate)
        times = begin_time + numpy.cumsum(gaps)
        await _call_at(times[times < end_time].tolist(), begin)
        while under_way:
            await asyncio.wait(under_way)

    async def _exchange(self, start: float) -> float:
        """Send a request until it is answered, or the client asks no more; return for how long the client is to ask for nothing."""
        options, request, retry_after = self._options, next(self._requests), 0.0
        now = time.perf_counter()
        exchange = Exchange(start=start, sent=now, attempt_start=start, end=now, outcome=NOT_SENT)
        self.record.exchanges.append(exchange)
        asks_again = options.rate is None or now < self.record.window[1]
        while asks_again:
            exchange.attempts += 1
            reader, retry_after = self._source.answer_reader(), 0.0
            try:
                async with asyncio.timeout(options.timeout):
                    answer = await self._client.ask(request, reader.read)
                exchange.outcome = str(answer.status)
                if answer.status == 200 and not reader.is_whole:
                    exchange.outcome = NOT_WHOLE
                asks_again = answer.status in _BUSY
                retry_after = answer.retry_after or 0.0 if options.retries else 0.0
            except TimeoutError:
                exchange.outcome, asks_again = TIMED_OUT, True
            except NoAnswerError as error:
                exchange.outcome, asks_again = error.outcome, True
                retry_after = _CONNECTION_SECONDS if error.outcome == NO_CONNECTION else 0.0
            exchange.end, exchange.text = time.perf_counter(), reader.times
            is_over = exchange.end + retry_after >= self.record.window[1]
            asks_again = asks_again and not is_over and exchange.attempts <= options.retries
            if asks_again:
                await asyncio.sleep(retry_after)
                exchange.attempt_start = time.perf_counter()
        return retry_after


def _waiting_seconds() -> float | None:
    """How long this thread has waited for a processor so far."""
    try:
        return int(_SCHEDULER_FILE.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


async def _call_at(times: list[float], function: Callable[[float], None]) -> None:
    """Call a function in the event loop at these times, in order, with the time.

    A thread waits for each: the timers of event loops are late by up to a millisecond, which is as long as an answer takes.
    """
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        for next_time in times:
            if (seconds := next_time - time.perf_counter()) > 0:
                time.sleep(seconds)
            loop.call_soon_threadsafe(function, next_time)
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=wait, name="pacer", daemon=True).start()
    await is_over.wait()


def measurement_facts(record: LoadRecord, source: RequestSource, options: LoadOptions) -> dict[str, Any]:
    """Return what a run shows as plain data; times are in seconds.

    Counts and latencies are of the requests that were to be sent in the window, also if their answers came after it. Rates count what
    ended in the window.
    """
    begin, end = record.window
    started = [exchange for exchange in record.exchanges if begin <= exchange.start < end]
    ended = [exchange for exchange in record.exchanges if begin <= exchange.end < end]
    answered = [exchange for exchange in started if exchange.is_answered]
    good_count = sum(exchange.is_good(options.deadline) for exchange in started)
    facts: dict[str, Any] = {
        "model": source.model,
        "api": source.api,
        "loop": "closed" if options.rate is None else "open",
        **asdict(options),
        "requests": len(started),
        "attempts": sum(exchange.attempts for exchange in started),
        "outcomes": dict(Counter(exchange.outcome for exchange in started).most_common()),
        "good": good_count,
        "throughput": sum(exchange.is_answered for exchange in ended) / options.seconds,
        "goodput": sum(exchange.is_good(options.deadline) for exchange in ended) / options.seconds,
        "latency": _summary(exchange.end - exchange.start for exchange in answered),
        "text": _text_facts(answered, ended, options.seconds) if source.is_stream else None,
        "client": _client_facts(started, record, options),
    }
    return facts


def _summary(values: Iterable[float]) -> dict[str, float] | None:
    """The mean and the percentiles of values; None without one."""
    array = numpy.fromiter(values, dtype=float)
    if not array.size:
        return None
    percentiles = numpy.percentile(array, list(_PERCENTILES.values())).tolist()
    return {
        "mean": float(array.mean()),
        **dict(zip(_PERCENTILES, percentiles, strict=True)),
        "max": float(array.max()),
    }


def _text_facts(answered: Sequence[Exchange], ended: Sequence[Exchange], seconds: float) -> dict[str, Any]:
    """Tokens a second of the texts that ended in the window, and the times of those that began in it."""
    texts = [(exchange, exchange.text) for exchange in answered if exchange.text is not None]
    ended_texts = [exchange.text for exchange in ended if exchange.text is not None and exchange.is_answered]
    return {
        "output_tokens_per_second": sum(text.output_tokens for text in ended_texts) / seconds,
        "prompt_tokens_per_second": sum(text.prompt_tokens for text in ended_texts) / seconds,
        "output_tokens": sum(text.output_tokens for _, text in texts),
        "prompt_tokens": sum(text.prompt_tokens for _, text in texts),
        "ttft": _summary(text.arrivals[0] - exchange.start for exchange, text in texts),
        "tpot": _summary(
            (text.arrivals[-1] - text.arrivals[0]) / (text.output_tokens - 1)
            for exchange, text in texts
            if text.output_tokens > 1
        ),
        "itl": _summary(gap for _, text in texts for gap in _gaps(text)),
    }


def _gaps(text: TextTimes) -> list[float]:
    return numpy.diff(text.arrivals).tolist()


def _client_facts(started: Sequence[Exchange], record: LoadRecord, options: LoadOptions) -> dict[str, Any]:
    """How busy the client was, and how long it waited for a processor, as shares of the time; and how late requests were sent."""
    busy_share = record.cpu_seconds / options.seconds
    waiting_seconds = record.waiting_seconds or 0.0
    latencies = [exchange.end - exchange.start for exchange in started]
    share_of_latency = waiting_seconds / (len(latencies) * float(numpy.median(latencies))) if latencies else 0.0
    waiting_share = None if record.waiting_seconds is None else waiting_seconds / options.seconds
    return {
        "busy": busy_share,
        "waiting": waiting_share,
        "is_bottleneck": busy_share + (waiting_share or 0.0) > _BUSY_SHARE or share_of_latency > _WAITING_SHARE,
        "late": None if options.rate is None else _summary(exchange.sent - exchange.start for exchange in started),
    }
