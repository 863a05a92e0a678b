"""Metrics for Prometheus, named as https://prometheus.io/docs/practices/naming/ recommends. Times are in seconds."""

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

if TYPE_CHECKING:
    from stagepack_serving.server.served_model import ServedModel

_SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BY_VERSION = ("model", "version")


class Metrics:
    """The metrics of one server. The label ``version`` is the version of the model; both are empty if no model was found."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answer_counts: Counts[str] = Counts()  # by status, such as OK or BAD_REQUEST
        self.requests = Counter(
            "stagepack_requests",
            "Answered and refused requests; the model is empty if its name is unknown.",
            (*_BY_VERSION, "protocol", "status"),
            registry=self.registry,
        )
        self.request_seconds = self._seconds(
            "request",
            "Time from the head of a request (in gRPC its message) to its answer.",
            (*_BY_VERSION, "protocol"),
        )
        self.queue_seconds = self._seconds("queue", "Time that a request waits before it runs.", _BY_VERSION)
        self.stage_seconds = self._seconds("stage", "Time of one run of a stage.", (*_BY_VERSION, "stage"))
        self.batch_sizes = Histogram(
            "stagepack_batch_rows",
            "Batch size of one run.",
            _BY_VERSION,
            buckets=_BATCH_SIZE_BUCKETS,
            registry=self.registry,
        )
        self.received_bytes = Counter(
            "stagepack_received_bytes", "Bytes of input tensors.", _BY_VERSION, registry=self.registry
        )
        self.sent_bytes = Counter(
            "stagepack_sent_bytes", "Bytes of output tensors.", _BY_VERSION, registry=self.registry
        )
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

    def remove_version(self, model_name: str, version: str) -> None:
        """Remove what was measured of a version that is closed, so that a server that loads many versions does not grow."""
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                metric.remove_by_labels({"model": model_name, "version": version})

    def _seconds(self, topic: str, help_text: str, label_names: tuple[str, ...]) -> Histogram:
        return Histogram(
            f"stagepack_{topic}_seconds", help_text, label_names, buckets=_SECONDS_BUCKETS, registry=self.registry
        )


def version_metrics(models: Iterable["ServedModel"]) -> Iterator[Metric]:
    """What loaded versions are and hold, and what the processes of their stages report with their heartbeats.

    While a version is replaced by another one of the same number, both are counted together.
    """
    pending, sequences, weights, runs, busy, sent, queue = (Counts[tuple[str, ...]]() for _ in range(7))
    digests: dict[tuple[str, ...], int] = {}
    for model in models:
        labels = (model.name, model.version)
        pending[labels] += model.pending_requests
        sequences[labels] += model.sequence_count
        weights[labels] += model.weight_bytes
        digests[(*labels, model.bundle.digest)] = 1
        for rank, status in model.process_statuses().items():
            sent[(*labels, str(rank))] += status.sent_bytes
            queue[(*labels, str(rank))] += status.pending_requests
            for stage in status.stages:
                runs[(*labels, str(stage.stage))] += stage.runs
                busy[(*labels, str(stage.stage))] += stage.busy_seconds
    yield _fill(GaugeMetricFamily, "pending_requests", "Requests that are not answered yet.", "", pending)
    yield _fill(GaugeMetricFamily, "sequences", "Sequences whose state is kept.", "", sequences)
    yield _fill(GaugeMetricFamily, "weight_bytes", "Bytes of the weights of a loaded version.", "", weights)
    yield _fill(
        GaugeMetricFamily, "model_info", "1 for the digest of the bundle of a loaded version.", "digest", digests
    )
    yield _fill(CounterMetricFamily, "stage_runs", "Runs of a stage.", "stage", runs)
    yield _fill(CounterMetricFamily, "stage_busy_seconds", "Time that a stage has run.", "stage", busy)
    yield _fill(CounterMetricFamily, "process_sent_bytes", "Bytes sent to other processes.", "process", sent)
    yield _fill(GaugeMetricFamily, "process_queue", "Requests that wait for a process.", "process", queue)


def _fill(
    family_type: type[GaugeMetricFamily] | type[CounterMetricFamily],
    topic: str,
    help_text: str,
    further_label: str,
    values: Mapping[tuple[str, ...], float],
) -> Metric:
    """A metric by version, and by one further label if it has a name."""
    label_names = (*_BY_VERSION, further_label) if further_label else _BY_VERSION
    family = family_type(f"stagepack_{topic}", help_text, labels=label_names)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
