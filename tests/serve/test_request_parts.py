"""The parts of requests in the metrics: together they are all of their time."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from stagepack_serving.server.metrics import REQUEST_PARTS, Timeline
from tests.serve.bundles import Bundles
from tests.serve.local_server import serving
from tests.serve.servers import AnyServer, Client, ask_slow, get, post_json


def seconds_by_model(server: AnyServer, sample_name: str, label_name: str) -> Mapping[str, Counter[str]]:
    """The sums of a metric, by model and one more label."""
    sums: dict[str, Counter[str]] = {}
    for family in text_string_to_metric_families(get(server.http)[1]):
        for sample in family.samples:
            if sample.name == sample_name:
                by_label = sums.setdefault(sample.labels["model"], Counter())
                by_label[sample.labels[label_name]] += sample.value  # type: ignore[assignment]  # counters take floats
    return sums


@pytest.mark.parametrize("options", [(), pytest.param(("--processes", "1"), marks=pytest.mark.slow)])
def test_parts_of_requests_are_all_of_their_time(
    slow: Path, bundles: Bundles, writer: Path, options: tuple[str, ...]
) -> None:
    paths = [slow] if options else [slow, bundles["skips"], writer]
    with serving(paths, *options) as server:
        for protocol in ("http", "grpc"):
            ask_slow(server, 50, protocol)
            with pytest.raises(InferenceServerException):  # too late
                ask_slow(server, 100, protocol, timeout=20_000)
            with Client(protocol, server) as client, pytest.raises(InferenceServerException):  # no such model
                client.ask("unknown", {"x": numpy.ones((1, 1), "float32")}, outputs=["y"])
        if not options:
            fields = {"input_ids": [5, 6, 7], "parameters": {"max_tokens": 8}}
            assert post_json(server, "/v2/models/writer/generate", **fields)[0] == 200
            assert post_json(server, "/v1/completions", model="writer", prompt=[5, 6], max_tokens=3)[0] == 200
        request_seconds = seconds_by_model(server, "stagepack_request_seconds_sum", "protocol")
        part_seconds = seconds_by_model(server, "stagepack_request_part_seconds_total", "part")
    assert part_seconds.keys() == request_seconds.keys() >= {"slow", ""}
    for model_name, sums in request_seconds.items():
        assert sum(part_seconds[model_name].values()) == pytest.approx(sum(sums.values()), rel=1e-6)
    parts = part_seconds["slow"]
    assert parts.keys() == set(REQUEST_PARTS) - {"generate"}
    assert parts["run"] > parts["encode"]
    if not options:
        assert part_seconds["writer"]["generate"] > 0


def test_parts_that_are_entered_too_early_begin_where_the_last_one_ended() -> None:
    timeline = Timeline()
    start_time = time.monotonic()
    timeline.enter("queue", start_time + 1)
    timeline.enter("run", start_time - 1)
    timeline.enter("send", start_time + 3)
    timeline.move("run", "convert", 0.5)
    timeline.move("queue", "convert", 0.5)  # more than it has
    parts = {part: round(seconds, 1) for part, seconds in timeline.seconds.items() if seconds}
    assert parts == {"receive": 1.0, "run": 1.5, "convert": 0.5}
