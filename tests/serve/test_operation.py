"""What those who run a server look at: the OpenAPI document, statistics, metrics and the log."""

import json
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from stagepack_serving.server.bundle_listings import fixed_bundles
from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.log_settings import update_log_settings
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.rest_service import rest_application
from tests.serve.servers import Client, get, post, refused
from tests.serve.version_models import Repository, X, count, export_counter, export_scale, factor_of
from tests.waiting import wait_until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics(repository: Repository) -> Samples:
    """All samples of the page: the name and the labels -> the value."""
    families = text_string_to_metric_families(get(repository.server.http)[1])
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value_of(samples: Samples, metric_name: str, **labels: str) -> float:
    return samples[metric_name, frozenset(labels.items())]


def test_the_openapi_document_has_every_path_and_method(repository: Repository) -> None:
    models = ModelRegistry(ServerLimits(), Metrics())
    application: Any = rest_application(ModelControl(models, fixed_bundles({}), lambda *_, **__: None))
    while not hasattr(application, "routes"):  # others wrap that of starlette
        application = application._application
    routed = {(route.path, method) for route in application.routes for method in route.methods - {"HEAD"}}
    paths = json.loads(get(repository.server.http, "/openapi.json")[1])["paths"]
    assert routed == {
        (path, method.upper()) for path, operations in paths.items() for method in operations.keys() - {"parameters"}
    }


def test_the_openapi_document_describes_the_answers(repository: Repository) -> None:
    document = json.loads(get(repository.server.http, "/openapi.json")[1])
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 2.0, 3.0]}
    update = {"parameters": {"source": "next"}}
    bodies = {"infer": {"inputs": [tensor]}, "index": {"ready": True}, "logging": {"log_info": True}, "update": update}
    checked_count = 0
    for path, operations in document["paths"].items():
        for method in operations.keys() & {"get", "post"}:
            if method == "post" and ("/generate" in path or path.startswith("/v1/")):
                continue  # of models that generate
            operation = operations[method]
            for model_name, expected_status in (("scale", 200), ("nothing", 404)):
                concrete_path = path.format(model=model_name, version="1")
                if method == "get":
                    status, answer = _get_json(repository, concrete_path)
                else:
                    body = bodies.get(path.rpartition("/")[2], {})
                    _check(document, operation["requestBody"], body)
                    status, answer, _ = post(repository.server.http, concrete_path, json.dumps(body))
                    post(repository.server.http, "/v2/repository/models/scale/load", b"")
                if path == "/v1/models/{model}":
                    continue  # neither model generates
                assert status == (expected_status if "{model}" in path else 200), concrete_path
                content = operation["responses"][str(status)].get("content")
                assert content is None or "application/json" not in content or answer is not None
                if answer is not None:
                    _check(document, operation["responses"][str(status)], answer)
                    checked_count += 1
    assert checked_count > 25


def _get_json(repository: Repository, path: str) -> tuple[int, Any]:
    """The status and the answer; None if the answer is no JSON."""
    status, text, _ = get(repository.server.http, path)
    return status, json.loads(text) if text.startswith(("{", "[")) else None


def _check(document: Any, described: Any, content: Any) -> None:
    """Compare the content of a request or an answer with its schema."""
    schema = described["content"]["application/json"]["schema"]
    jsonschema.validate(content, {**schema, "components": document["components"]})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_statistics_are_those_of_each_version(repository: Repository, protocol: str) -> None:
    name = f"stats_{protocol}"
    export_scale(repository.folder / name / "1", 1.0)
    how = {} if protocol == "http" else {"as_json": True}
    with Client(protocol, repository.server) as client:
        client.raw.load_model(name)
        for _ in range(3):
            factor_of(client, name)
        with pytest.raises(InferenceServerException):
            client.ask(name, {"other": X}, outputs=["y"])
        (version,) = client.raw.get_inference_statistics(name, **how)["model_stats"]
        assert (version["name"], version["version"]) == (name, "1")
        assert (int(version["inference_count"]), int(version["execution_count"])) == (6, 3)  # two rows a request
        totals = version["inference_stats"]
        counts = [int(totals[part]["count"]) for part in ("success", "fail", "queue", "compute_infer")]
        assert counts == [3, 1, 3, 3]
        assert 0 < int(totals["compute_infer"]["ns"]) < int(totals["success"]["ns"]) < 60e9
        assert [int(batch["batch_size"]) for batch in version["batch_stats"]] == [2]

        export_scale(repository.folder / name / "2", 2.0)
        client.raw.load_model(name)
        factor_of(client, name)
        wait_until(lambda: len(client.raw.get_inference_statistics(name, **how)["model_stats"]) == 1)
        (version,) = client.raw.get_inference_statistics(name, "2", **how)["model_stats"]
        assert int(version["inference_count"]) == 2
        names = {entry["name"] for entry in client.raw.get_inference_statistics(**how)["model_stats"]}
        assert names >= {name, "scale", "counter"}
        with pytest.raises(InferenceServerException, match="is not loaded"):
            client.raw.get_inference_statistics(name, "1")


def test_metrics_of_versions_and_of_the_process(repository: Repository) -> None:
    export_counter(repository.folder / "metered" / "1", 1.0)
    with Client("grpc", repository.server) as client:
        client.raw.load_model("metered")
        count(client, "metered", 1, sequence_start=True)
        seen, version = metrics(repository), {"model": "metered", "version": "1"}
        assert value_of(seen, "stagepack_requests_total", **version, protocol="grpc", status="OK") == 1
        assert value_of(seen, "stagepack_sequences", **version) == 1
        assert value_of(seen, "stagepack_weight_bytes", **version) == 16
        assert value_of(seen, "stagepack_stage_seconds_count", **version, stage="0") == 1
        digest = json.loads((repository.folder / "metered" / "1" / "manifest.json").read_text())["sha256"]
        assert value_of(seen, "stagepack_model_info", **version, digest=digest) == 1
        assert value_of(seen, "process_resident_memory_bytes") > 10e6
        assert value_of(seen, "process_open_fds") > 5

        export_counter(repository.folder / "metered" / "2", 1.0)
        client.raw.load_model("metered")
        count(client, "metered", 1, sequence_end=True)
        wait_until(lambda: "1" not in repository.states("metered"))
        assert not [labels for _, labels in metrics(repository) if labels >= set(version.items())]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_level_of_the_log(repository: Repository, protocol: str) -> None:
    with Client(protocol, repository.server) as client:

        def settings(changes: Any) -> Any:
            if protocol == "http":
                return client.raw.update_log_settings(changes)
            answer = client.raw.update_log_settings(changes, as_json=True)
            return {name: next(iter(value.values()), None) for name, value in answer["settings"].items()}

        quiet = settings({"log_info": False, "log_warning": False})
        assert (quiet["log_info"], quiet["log_warning"], quiet["log_error"]) == (False, False, True)
        assert settings({"log_verbose_level": 1})["log_info"] is True
        assert settings({"log_verbose_level": 0, "log_info": True})["log_verbose_level"] == 0
        for changes in ({"log_file": "server.log"}, {"log_format": "ISO8601"}):
            with refused("400", "INVALID_ARGUMENT"):
                client.raw.update_log_settings(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_info": "yes"}, "log_info: expected true or false, found 'yes'"),
        ({"log_verbose_level": -1}, "log_verbose_level: expected a number, 0 or more, found -1"),
        ({"log_verbose_level": True}, "log_verbose_level: expected a number, 0 or more, found True"),
    ],
)
def test_level_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        update_log_settings(changes)


def test_the_address_of_a_server_points_to_its_protocols(repository: Repository) -> None:
    port = repository.server.http
    index = json.loads(get(port, "/")[1])
    assert index["docs"] == "/docs"
    assert index["protocol"] == "/v2"
    for path in (value for value in index.values() if value.startswith("/")):
        assert get(port, path)[0] == 200
    assert "<td>POST</td><td><code>/v2/models/{model}/infer</code></td>" in get(port, "/docs")[1]
