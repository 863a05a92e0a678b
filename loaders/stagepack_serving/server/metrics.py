"""What a server counts, for Prometheus (https://prometheus.io/docs/practices/naming/). Times are in seconds."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters of one server.

    Attributes:
        registry: holds all of them.
    """

    def __init__(self) -> None:
        """All at zero."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "stagepack_requests",
            "Requests that were answered or refused; those for no known model have none.",
            ("model", "protocol", "status"),
            registry=self.registry,
        )
        self.latency = self._seconds(
            "request", "From a request's head (its message in gRPC) to its answer.", ("model", "protocol")
        )
        self.queued = self._seconds("queue", "What a request waits for its run.", ("model",))
        self.stage = self._seconds("stage", "One run of a stage.", ("model", "stage"))
        self.pending = Gauge(
            "stagepack_pending_requests", "Requests that are not answered yet.", ("model",), registry=self.registry
        )
        self.sequences = Gauge(
            "stagepack_sequences", "Sequences whose state is kept.", ("model",), registry=self.registry
        )
        self.rows = Histogram(
            "stagepack_batch_rows", "Rows in one run.", ("model",), buckets=_ROWS, registry=self.registry
        )
        self.received = Counter("stagepack_received_bytes", "Bytes of inputs.", ("model",), registry=self.registry)
        self.sent = Counter("stagepack_sent_bytes", "Bytes of outputs.", ("model",), registry=self.registry)

    def answers(self) -> dict[str, int]:
        """How many requests had which status."""
        counts: dict[str, int] = {}
        for family in self.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    status = sample.labels["status"]
                    counts[status] = counts.get(status, 0) + int(sample.value)
        return counts

    def _seconds(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(f"stagepack_{name}_seconds", text, labels, buckets=_SECONDS, registry=self.registry)
