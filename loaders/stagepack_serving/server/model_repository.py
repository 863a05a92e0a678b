"""Where the bundles of a server are: a model repository as Triton has it, or the paths of the command line.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.

- What the loaded versions of models are and hold, as metrics for Prometheus.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stagepack.errors import InputError
from stagepack_serving.server.served_model import ServedModel

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_VERSION: Final = re.compile("[1-9][0-9]{0,17}", re.ASCII)
_BY_VERSION = ("model", "version")
_BY_STAGE = (*_BY_VERSION, "stage")
_BY_PROCESS = (*_BY_VERSION, "process")


class BundleSource(Protocol):
    """Bundles by the names and versions of models. Clients choose among the names, and never a path."""

    def bundle_paths(self) -> Mapping[str, Mapping[int, str]]:
        """Return the paths or URLs of the bundles that are there now.

        Returns:
            For each name of a model its bundles by version.

        Raises:
            InputError: the folder cannot be read.
        """


class FixedBundles:
    """The bundles of a command line: each is version 1 of its model."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths

    def bundle_paths(self) -> Mapping[str, Mapping[int, str]]:
        """See `BundleSource`."""
        return {model_name: {1: path} for model_name, path in self._paths.items()}


class RepositoryFolder:
    """A folder with a folder for each model, which has a bundle for each version: ``tower/1/manifest.json``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def bundle_paths(self) -> Mapping[str, Mapping[int, str]]:
        """See `BundleSource`. Entries whose names are no names of models or numbers of versions are left out."""
        try:
            return {
                model.name: {
                    int(version.name): version.path
                    for version in os.scandir(model.path)
                    if _VERSION.fullmatch(version.name) and version.is_dir()
                }
                for model in sorted(os.scandir(self._folder), key=lambda entry: entry.name)
                if _MODEL_NAME.fullmatch(model.name) and model.is_dir()
            }
        except OSError as error:
            raise InputError(f"{error.filename}: the model repository cannot be read: {error.strerror}") from None


def folder_state(path: str) -> object:
    """Return a value that changes when a file in a folder changes."""
    folder = path if os.path.isdir(path) else path.partition("#")[0]
    try:
        return sorted(
            (os.path.join(parent, file_name), status.st_ino, status.st_size, status.st_mtime_ns)
            for parent, _, file_names in os.walk(folder)
            for file_name in file_names
            for status in [os.stat(os.path.join(parent, file_name))]
        )
    except OSError:
        return None


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
