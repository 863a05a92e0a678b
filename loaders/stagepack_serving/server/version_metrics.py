"""The metrics of loaded versions, as Prometheus asks for them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stagepack_serving.server.metrics import BY_VERSION

if TYPE_CHECKING:
    from stagepack_serving.server.served_model import ServedModel


def version_metrics(models: Iterable["ServedModel"]) -> Iterator[Metric]:
    """Yield what loaded versions are and hold, and what the processes of their stages report with their heartbeats.

    While a version is replaced by another one of the same number, both are counted together.
    """
    pending, sequences, weights, runs, busy, sent, queue, texts, held, restarts = (
        Counter[tuple[str, ...]]() for _ in range(10)
    )
    digests: dict[tuple[str, ...], int] = {}
    for model in models:
        labels = (model.name, model.version)
        pending[labels] += model.admission.pending_requests
        sequences[labels] += model.sequence_count
        weights[labels] += model.weight_bytes
        restarts[labels] += model.restart_count
        digests[(*labels, model.bundle.digest)] = 1
        for part in model.parts.values():
            texts[labels] += part.text_count
            held[labels] += part.held_tokens
        for rank, status in model.process_statuses().items():
            sent[(*labels, str(rank))] += status.sent_bytes
            queue[(*labels, str(rank))] += status.pending_requests
            for stage in status.stages:
                runs[(*labels, str(stage.stage))] += stage.runs
                busy[(*labels, str(stage.stage))] += stage.busy_seconds
    yield _fill(GaugeMetricFamily, "pending_requests", "Requests that are not answered yet.", "", pending)
    yield _fill(GaugeMetricFamily, "sequences", "Sequences whose state is kept.", "", sequences)
    yield _fill(GaugeMetricFamily, "texts", "Texts that are generated, or wait for it.", "", texts)
    yield _fill(GaugeMetricFamily, "cache_tokens", "Tokens that the cache of a decoder holds.", "", held)
    yield _fill(GaugeMetricFamily, "weight_bytes", "Bytes of the weights of a loaded version.", "", weights)
    yield _fill(
        GaugeMetricFamily, "model_info", "1 for the digest of the bundle of a loaded version.", "digest", digests
    )
    yield _fill(CounterMetricFamily, "restarts", "How often the processes were started again.", "", restarts)
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
    label_names = (*BY_VERSION, further_label) if further_label else BY_VERSION
    family = family_type(f"stagepack_{topic}", help_text, labels=label_names)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
