"""Metrics for Prometheus, named as https://prometheus.io/docs/practices/naming/ recommends. Times are in seconds."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server.

    Attributes:
        registry: the registry that holds them.
        requests: requests by model, protocol and status.
        request_seconds: time from a request to its answer, by model and protocol.
        queue_seconds: time from the arrival of a request to the start of its batch, by model.
        stage_seconds: time of one run of a stage, by model and stage number.
        pending_requests: requests that are not answered yet, by model.
        sequences: sequences whose state is kept, by model.
        batch_sizes: batch size of each run, by model.
        received_bytes: size of input tensors, by model.
        sent_bytes: size of output tensors, by model.
    """

    def __init__(self) -> None:
        """Create the metrics, all at zero."""
        self.registry = CollectorRegistry()
        by_model = ("model",)
        self.requests = Counter(
            "stagepack_requests",
            "Answered and refused requests; the model is empty if its name is unknown.",
            ("model", "protocol", "status"),
            registry=self.registry,
        )
        self.request_seconds = self._seconds(
            "request", "Time from the head of a request (in gRPC its message) to its answer.", ("model", "protocol")
        )
        self.queue_seconds = self._seconds("queue", "Time that a request waits before it runs.", by_model)
        self.stage_seconds = self._seconds("stage", "Time of one run of a stage.", ("model", "stage"))
        self.pending_requests = Gauge(
            "stagepack_pending_requests", "Requests that are not answered yet.", by_model, registry=self.registry
        )
        self.sequences = Gauge(
            "stagepack_sequences", "Sequences whose state is kept.", by_model, registry=self.registry
        )
        self.batch_sizes = Histogram(
            "stagepack_batch_rows",
            "Batch size of one run.",
            by_model,
            buckets=_BATCH_SIZE_BUCKETS,
            registry=self.registry,
        )
        self.received_bytes = Counter(
            "stagepack_received_bytes", "Bytes of input tensors.", by_model, registry=self.registry
        )
        self.sent_bytes = Counter("stagepack_sent_bytes", "Bytes of output tensors.", by_model, registry=self.registry)

    def requests_by_status(self) -> dict[str, int]:
        """Count the requests of all models.

        Returns:
            The number of requests by status, such as ``OK`` or ``BAD_REQUEST``.
        """
        counts: dict[str, int] = {}
        for family in self.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    status = sample.labels["status"]
                    counts[status] = counts.get(status, 0) + int(sample.value)
        return counts

    def _seconds(self, topic: str, help_text: str, label_names: tuple[str, ...]) -> Histogram:
        return Histogram(
            f"stagepack_{topic}_seconds", help_text, label_names, buckets=_SECONDS_BUCKETS, registry=self.registry
        )
