"""What a server and its models have done: the times of requests, metrics for Prometheus, and Triton's statistics extension.

Metrics are named as https://prometheus.io/docs/practices/naming/ recommends, and their times are in seconds. Source of the statistics:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

import itertools
import time
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.metrics import MetricWrapperBase

_SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BY_VERSION = ("model", "version")
# The parts of a request in their order, but that the run of a batch is between its conversions.
REQUEST_PARTS: Final = ("receive", "decode", "queue", "convert", "run", "return", "generate", "encode", "send")
# The parts of a run in Triton's statistics: converting the inputs, running the stages, and converting the outputs.
_COMPUTE_PARTS: Final = ("compute_input", "compute_infer", "compute_output")
_STATISTICS_PARTS: Final = ("success", "fail", "queue", *_COMPUTE_PARTS, "cache_hit", "cache_miss")


@dataclass(slots=True)
class RunTimes:
    """When a run of a model came to each point, in seconds of `time.monotonic`.

    Attributes:
        start: when it began.
        inputs: when its inputs were converted.
        results: when its stages had run.
        end: when its outputs were converted.
    """

    start: float = 0.0
    inputs: float = 0.0
    results: float = 0.0
    end: float = 0.0


class Timeline:
    """How long a request takes: its parts, which together are all of its time, and the runs of its calls of the model.

    Attributes:
        seconds: the time of each part.
        queue_seconds: how long its calls waited for their runs, together.
        run_seconds: how long these took; None if it has made none.
    """

    def __init__(self) -> None:
        # All parts from the start: a thread that works for nobody any more may still add to them.
        self.seconds = dict.fromkeys(REQUEST_PARTS, 0.0)
        self.queue_seconds = 0.0
        self.run_seconds: float | None = None
        self._part, self._part_start = REQUEST_PARTS[0], time.monotonic()

    def enter(self, part: str, at_time: float | None = None) -> None:
        """End a part of the request, and begin another one, now or at a time of `time.monotonic`."""
        part_end = max(self._part_start, time.monotonic() if at_time is None else at_time)
        self.seconds[self._part] += part_end - self._part_start
        self._part, self._part_start = part, part_end

    def end(self) -> float:
        """End the last part; return the time of all of them."""
        self.enter(self._part)
        return sum(self.seconds.values())

    def move(self, part: str, other_part: str, seconds: float) -> None:
        """Count a time of one part to another one."""
        moved_seconds = min(seconds, self.seconds[part])
        self.seconds[part] -= moved_seconds
        self.seconds[other_part] += moved_seconds

    def begin_run(self, arrival: float, start_time: float) -> None:
        """Begin the run of a call, which is a part of the request by itself unless it is one of many that make a text."""
        if self._part != "generate":
            self.enter("queue", arrival)
            self.enter("run", start_time)

    def end_run(self, arrival: float, times: RunTimes) -> None:
        """End the run of a call, whose conversions of inputs and outputs count apart."""
        self.queue_seconds += times.start - arrival
        self.run_seconds = (self.run_seconds or 0.0) + times.end - times.start
        if self._part != "generate":
            self.enter("return", times.end)
            self.move("run", "convert", times.inputs - times.start + times.end - times.results)


class Metrics:
    """The metrics of one server. The label ``version`` is the version of the model; both are empty if no model was found."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answer_counts: Counts[str] = Counts()  # by status, such as OK or BAD_REQUEST
        self.token_count = 0  # of generated texts, of all models
        self.requests = Counter(
            "stagepack_requests",
            "Answered and refused requests; the model is empty if its name is unknown.",
            (*BY_VERSION, "protocol", "status"),
            registry=self.registry,
        )
        self.request_seconds = self._seconds(
            "request", "Time from the head of a request (in gRPC its message) to its answer.", (*BY_VERSION, "protocol")
        )
        self.part_seconds = Counter(
            "stagepack_request_part_seconds",
            "Time of a part of requests; the parts are together the time of the requests.",
            (*BY_VERSION, "part"),
            registry=self.registry,
        )
        self.queue_seconds = self._seconds("queue", "Time that a request waits before it runs.", BY_VERSION)
        self.stage_seconds = self._seconds("stage", "Time of one run of a stage.", (*BY_VERSION, "stage"))
        self.batch_sizes = Histogram(
            "stagepack_batch_rows",
            "Batch size of one run.",
            BY_VERSION,
            buckets=_BATCH_SIZE_BUCKETS,
            registry=self.registry,
        )
        self.received_bytes = Counter(
            "stagepack_received_bytes", "Bytes of input tensors.", BY_VERSION, registry=self.registry
        )
        self.sent_bytes = Counter(
            "stagepack_sent_bytes", "Bytes of output tensors.", BY_VERSION, registry=self.registry
        )
        self.generated_tokens = Counter(
            "stagepack_generated_tokens", "Tokens of generated texts.", BY_VERSION, registry=self.registry
        )
        self.refused_loads = Gauge(
            "stagepack_load_refused",
            "1 for a version that was refused when it was last loaded, 0 for one that was loaded.",
            BY_VERSION,
            registry=self.registry,
        )
        self.update_seconds = Gauge(
            "stagepack_update_seconds",
            "Time of each part of the last update of the weights of a version.",
            (*BY_VERSION, "part"),
            registry=self.registry,
        )
        self.first_token_seconds = self._seconds(
            "first_token", "Time from the prompt of a text to its first token.", BY_VERSION
        )
        self.token_seconds = self._seconds("token", "Time from a token of a text to the next one.", BY_VERSION)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def count_answer(
        self, model_name: str, version: str, protocol: str, status: str, seconds: float | None = None
    ) -> None:
        """Count a request that was answered or refused, after so many seconds; None if it was not read."""
        self.answer_counts[status] += 1
        self.requests.labels(model_name, version, protocol, status).inc()
        if seconds is not None:
            self.request_seconds.labels(model_name, version, protocol).observe(seconds)

    def count_token(self, model_name: str, version: str, seconds: float, *, is_first: bool) -> None:
        """Count a token of a text, so many seconds after the one before it, or after the prompt."""
        self.token_count += 1
        self.generated_tokens.labels(model_name, version).inc()
        (self.first_token_seconds if is_first else self.token_seconds).labels(model_name, version).observe(seconds)

    def count_parts(self, model_name: str, version: str, timeline: Timeline) -> None:
        """Count the time of the parts of a request."""
        for part, seconds in timeline.seconds.items():
            if seconds:
                self.part_seconds.labels(model_name, version, part).inc(seconds)

    def record_update(self, model_name: str, version: str, seconds: Mapping[str, float]) -> None:
        """Record the time of each part of an update of weights."""
        for part, part_seconds in seconds.items():
            self.update_seconds.labels(model_name, version, part).set(part_seconds)

    def remove_version(self, model_name: str, version: str) -> None:
        """Remove what was measured of a version that is closed, so that a server that loads many versions does not grow."""
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                metric.remove_by_labels({"model": model_name, "version": version})

    def _seconds(self, topic: str, help_text: str, label_names: tuple[str, ...]) -> Histogram:
        return Histogram(
            f"stagepack_{topic}_seconds", help_text, label_names, buckets=_SECONDS_BUCKETS, registry=self.registry
        )


class _Durations:
    """How often each part was done, and how many seconds it took together."""

    def __init__(self) -> None:
        self._counts: Counts[str] = Counts()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, part: str, seconds: float, count: int = 1) -> None:
        self._counts[part] += count
        self._seconds[part] += seconds * count

    def add_run(self, times: RunTimes, count: int) -> None:
        spans = itertools.pairwise((times.start, times.inputs, times.results, times.end))
        for part, (start, end) in zip(_COMPUTE_PARTS, spans, strict=True):
            self.add(part, end - start, count)

    def fields(self, parts: tuple[str, ...]) -> dict[str, dict[str, int]]:
        """The fields of a ``StatisticDuration`` for each part."""
        return {part: {"count": self._counts[part], "ns": round(self._seconds[part] * 1e9)} for part in parts}


class VersionStatistics:
    """What one version of a model has done. The event loop counts answers; the last lane of the model counts batches."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._last_inference = 0.0
        self._inference_count = 0
        self._execution_count = 0
        self._durations = _Durations()
        self._durations_by_batch_size: defaultdict[int, _Durations] = defaultdict(_Durations)

    def count_answer(self, seconds: float, *, is_success: bool) -> None:
        """Count a request that was answered or refused so many seconds after its head."""
        self._durations.add("success" if is_success else "fail", seconds)

    def count_batch(self, times: RunTimes, arrivals: Sequence[float], batch_size: int) -> None:
        """Count a batch that has run, of calls that arrived at these times."""
        self._last_inference = time.time()
        self._inference_count += batch_size
        self._execution_count += 1
        for arrival in arrivals:
            self._durations.add("queue", times.start - arrival)
        self._durations.add_run(times, len(arrivals))
        if batch_size <= self._max_batch_size:
            self._durations_by_batch_size[batch_size].add_run(times, 1)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a ``ModelStatistics``, but for the name and the version."""
        return {
            "last_inference": round(self._last_inference * 1e3),
            "inference_count": self._inference_count,
            "execution_count": self._execution_count,
            "inference_stats": self._durations.fields(_STATISTICS_PARTS),
            "batch_stats": [
                {"batch_size": batch_size, **durations.fields(_COMPUTE_PARTS)}
                for batch_size, durations in sorted(self._durations_by_batch_size.copy().items())
            ],
        }
