"""What the loaded versions of models are and hold, as metrics for Prometheus."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stagepack_serving.server.served_model import ServedModel

_BY_VERSION = ("model", "version")
_BY_STAGE = (*_BY_VERSION, "stage")
_BY_PROCESS = (*_BY_VERSION, "process")


class ModelCollector(Collector):
    """Asks the versions at each scrape, so that the metrics hold no version that is closed.

    While a version is replaced by another one of the same number, both are counted together.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        pending, sequences, weights = (Counter[tuple[str, ...]]() for _ in range(3))
        digests: dict[tuple[str, ...], int] = {}
        for model in self._models:
            labels = (model.name, model.version)
            pending[labels] += model.pending_requests
            sequences[labels] += model.sequence_count
            weights[labels] += model.weight_bytes
            digests[(*labels, model.bundle.digest)] = 1
        yield _gauge("pending_requests", "Requests that are not answered yet.", _BY_VERSION, pending)
        yield _gauge("sequences", "Sequences whose state is kept.", _BY_VERSION, sequences)
        yield _gauge("weight_bytes", "Bytes of the weights of a loaded version.", _BY_VERSION, weights)
        yield _gauge(
            "model_info", "1 for the digest of the bundle of a loaded version.", (*_BY_VERSION, "digest"), digests
        )
        yield from self._process_metrics()

    def _process_metrics(self) -> Iterator[Metric]:
        """What the processes of the stages report with their heartbeats."""
        runs, busy, sent, queue = (Counter[tuple[str, ...]]() for _ in range(4))
        for model in self._models:
            for rank, status in model.process_statuses().items():
                process_labels = (model.name, model.version, str(rank))
                sent[process_labels] += status.sent_bytes
                queue[process_labels] += status.pending_requests
                for stage in status.stages:
                    stage_labels = (model.name, model.version, str(stage.stage))
                    runs[stage_labels] += stage.runs
                    busy[stage_labels] += stage.busy_seconds
        yield _counter("stage_runs", "Runs of a stage.", _BY_STAGE, runs)
        yield _counter("stage_busy_seconds", "Time that a stage has run.", _BY_STAGE, busy)
        yield _counter("process_sent_bytes", "Bytes sent to other processes.", _BY_PROCESS, sent)
        yield _gauge("process_queue", "Requests that wait for a process.", _BY_PROCESS, queue)


def _gauge(topic: str, help_text: str, label_names: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    return _fill(GaugeMetricFamily(f"stagepack_{topic}", help_text, labels=label_names), values)


def _counter(
    topic: str, help_text: str, label_names: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> Metric:
    return _fill(CounterMetricFamily(f"stagepack_{topic}", help_text, labels=label_names), values)


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
