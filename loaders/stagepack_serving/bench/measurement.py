"""What a run shows: rates, latencies, goodput, the times of texts, and whether the client was fast enough."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy

from stagepack_serving.bench.answers import TextTimes
from stagepack_serving.bench.load_generator import Exchange, LoadOptions, LoadRecord
from stagepack_serving.bench.request_source import RequestSource

_PERCENTILES: Final = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}
# Beyond it, what is measured may be the client: it has one thread for all that Python does.
_BUSY_SHARE: Final = 0.8
# Of the median latency, that the client may wait for a processor for each request.
_WAITING_SHARE: Final = 0.1


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
