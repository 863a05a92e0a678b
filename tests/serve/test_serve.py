"""`stagepack serve`: batches, several bundles, ONNX Runtime without torch, streams, metrics, sequences."""

import collections
import concurrent.futures
import queue
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from tests.serve.bundles import Bundles
from tests.serve.local_server import LocalServer, local_server, refusal
from tests.serve.servers import AnyServer, Client, get, grpc_channel, post, refused, stagepack_server


def metrics(server: AnyServer, **headers: str) -> Any:
    """All samples of the page: (name, labels but the version) -> the sum over the versions."""
    page = get(server.http, headers=headers)[1]
    sums: collections.defaultdict[tuple[str, ...], float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = sorted(label for name, label in sample.labels.items() if name != "version")
            sums[sample.name, *labels] += sample.value
    return sums


def skips(rows: int, value: Any = 1.0) -> Any:
    return {"x": numpy.full((rows, 8), value, "float32"), "weight": numpy.full((rows, 1), value, "float32")}


def expected_answer(pipes: Mapping[str, Any], inputs: Any) -> Any:
    with torch.no_grad():
        return pipes["skips"](torch.from_numpy(inputs["x"]), weight=torch.from_numpy(inputs["weight"]))


def ask(server: AnyServer, protocol: str, model: Any, inputs: Any, **options: Any) -> Any:
    with Client(protocol, server) as client:
        return client.ask(model, inputs, **options)


@pytest.fixture(scope="module")
def server(bundles: Bundles) -> Iterator[LocalServer]:
    with local_server([bundles["skips"], bundles["counting"]]) as server:
        yield server


def test_requests_run_as_one_batch_and_get_their_own_rows(bundles: Bundles, pipes: Mapping[str, Any]) -> None:
    with local_server([bundles["skips"]], "--max-delay-ms", "300", "--max-batch", "16") as server:
        inputs = [skips(1 + request_number % 3, float(request_number)) for request_number in range(8)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda each: ask(server, "grpc", "skips", each, outputs=["y"])["y"], inputs))
        for request_inputs, array in zip(inputs, answers, strict=True):
            assert numpy.allclose(array, expected_answer(pipes, request_inputs)["y"].numpy(), atol=1e-5)
        seen = metrics(server)
        assert seen["stagepack_batch_rows_sum", "skips"] == sum(len(request_inputs["x"]) for request_inputs in inputs)
        assert seen["stagepack_batch_rows_count", "skips"] < 8


def test_one_that_fails_does_not_fail_the_others_of_its_batch(bundles: Bundles) -> None:
    ids = numpy.array([[101, 1037, 4937, 102]])
    good = {"input_ids": ids, "attention_mask": numpy.ones_like(ids)}
    bad = good | {"input_ids": ids + 10**6}
    with local_server([bundles["minilm"]], "--max-delay-ms", "300") as server:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            requests = [good] * 3 + [bad] + [good] * 4
            futures = [pool.submit(ask, server, "http", "minilm", each) for each in requests]
            errors = [future.exception() for future in futures]
        assert [error is not None for error in errors] == [each is bad for each in requests]
        assert metrics(server)["stagepack_batch_rows_sum", "minilm"] > 8  # those beside it ran again


def test_metrics(server: LocalServer) -> None:
    before = metrics(server)
    inputs = skips(4)
    ask(server, "http", "skips", inputs, outputs=["y"])
    ask(server, "grpc", "skips", inputs, outputs=["y"])
    with pytest.raises(InferenceServerException):
        ask(server, "http", "skips", {"x": inputs["x"]}, outputs=["y"])
    after = metrics(server)

    def grew(*key: Any) -> Any:
        return after[key] - before.get(key, 0)

    assert grew("stagepack_requests_total", "OK", "rest", "skips") == 1
    assert grew("stagepack_requests_total", "OK", "grpc", "skips") == 1
    assert grew("stagepack_requests_total", "BAD_REQUEST", "rest", "skips") == 1
    assert grew("stagepack_received_bytes_total", "skips") == 2 * 4 * 9 * 4
    assert grew("stagepack_sent_bytes_total", "skips") == 2 * 4 * 8 * 4
    assert grew("stagepack_queue_seconds_count", "skips") == 2
    for stage in "012":
        assert grew("stagepack_stage_seconds_count", stage, "skips") == 2
        assert grew("stagepack_stage_seconds_sum", stage, "skips") > 0
    assert after["stagepack_pending_requests", "skips"] == 0
    assert grew("stagepack_request_seconds_count", "rest", "skips") == 2


@pytest.mark.slow
def test_stages_on_several_devices_work_on_several_batches(bundles: Bundles, pipes: Mapping[str, Any]) -> None:
    # Two of them are one to torch, but not to the server.
    devices = ("--device", "cpu", "--device", "cpu:0", "--device", "cpu")
    with local_server([bundles["skips"]], *devices, "--max-batch", "1") as server:
        assert server.facts["models"][0]["devices"] == ["cpu", "cpu:0"]
        inputs = [skips(1 + request_number % 5, request_number / 7) for request_number in range(40)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda each: ask(server, "grpc", "skips", each, outputs=["y", "parts.0"]), inputs))
        for request_inputs, answer in zip(inputs, answers, strict=True):
            expected = expected_answer(pipes, request_inputs)
            assert numpy.array_equal(answer["y"], expected["y"].numpy())
            assert numpy.array_equal(answer["parts.0"], expected["parts"][0].numpy())


def test_names_of_several_bundles(bundles: Bundles) -> None:
    with local_server([f"one={bundles['skips']}", f"two={bundles['skips']}", bundles["half"]]) as server:
        for model_name in ("one", "two"):
            assert ask(server, "http", model_name, skips(2), outputs=["y"])["y"].shape == (2, 8)
        assert [model["name"] for model in server.facts["models"]] == ["one", "two", "half"]
    assert "'skips'" in refusal(*[bundles["skips"]] * 2)


def test_onnxruntime(bundles: Bundles, pipes: Mapping[str, Any]) -> None:
    with stagepack_server([bundles["skips"]], "--runtime", "onnxruntime", is_forked=False) as server:
        assert server.facts["models"][0]["batch"] == 32
        inputs = skips(3, 0.5)
        answers = ask(server, "grpc", "skips", inputs)
        assert numpy.allclose(answers["y"], expected_answer(pipes, inputs)["y"].numpy(), atol=1e-5)
        assert numpy.array_equal(answers["output.x"], inputs["x"])
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_stream_of_requests(server: LocalServer) -> None:
    answer_queue: queue.Queue[Any] = queue.Queue()
    with Client("grpc", server) as client:
        client.raw.start_stream(lambda result, error: answer_queue.put((result, error)))
        for step in range(4):
            inputs = [client.input("x", numpy.ones(3, "float32"))]
            ends = {"sequence_start": step == 0, "sequence_end": step == 3}
            client.raw.async_stream_infer("counting", inputs, sequence_id=5, **ends)
        client.raw.async_stream_infer("counting", inputs, sequence_id=5, request_id="late")
        answers = [answer_queue.get(timeout=30) for _ in range(5)]
        client.raw.stop_stream()
    assert [result.as_numpy("sum")[0] for result, _ in answers[:4]] == [1, 2, 3, 4]
    assert "sequence" in str(answers[4][1])


def test_numbers_have_ranges_too(bundles: Bundles) -> None:
    with local_server([bundles["first"]]) as server:
        inputs = {"x": numpy.arange(9, dtype="float32"), "n": numpy.array([3])}
        assert ask(server, "http", "first", inputs)["output"].tolist() == [0, 1, 2]
        for count in (-3, 0, 1, 9, 100):
            with pytest.raises(InferenceServerException, match="2 to 8"):
                ask(server, "grpc", "first", inputs | {"n": numpy.array([count])})


def test_a_stream_runs_its_requests_together(bundles: Bundles) -> None:
    answer_queue: queue.Queue[Any] = queue.Queue()
    with stagepack_server([bundles["skips"]], "--max-delay-ms", "300") as server, Client("grpc", server) as client:
        client.raw.start_stream(lambda result, error: answer_queue.put((result, error)))
        inputs = [client.input(input_name, array) for input_name, array in skips(1).items()]
        for request_number in range(8):
            client.raw.async_stream_infer("skips", inputs, request_id=str(request_number))
        answers = [answer_queue.get(timeout=30) for _ in range(8)]
        assert not [error for _, error in answers if error]
        assert sorted(result.get_response().id for result, _ in answers) == list("01234567")
        assert metrics(server)["stagepack_batch_rows_count", "skips"] < 8
        started = time.monotonic()
        assert server.stop() == 0  # the stream has nothing under way, so nobody waits for it
        assert time.monotonic() - started < 10
        client.raw.stop_stream(cancel_requests=True)


def test_state_that_is_given_out_stays_that_of_its_call(bundles: Bundles) -> None:
    with local_server([bundles["alias"]]) as server, Client("grpc", server) as client:
        answer_queue: queue.Queue[Any] = queue.Queue()
        inputs = [client.input("x", numpy.ones(1, "float32"))]
        client.ask("alias", {"x": numpy.ones(1, "float32")}, sequence_id=1, sequence_start=True)
        for request_number in range(20):  # at once; each is to see what those before it have written
            options = {"sequence_id": 1, "request_id": str(request_number)}
            client.raw.async_infer("alias", inputs, lambda result, error: answer_queue.put((result, error)), **options)
        answers = [answer_queue.get(timeout=60) for _ in range(20)]
        assert not [error for _, error in answers if error]
        for output_name in ("itself", "view"):
            arrays = [result.as_numpy(output_name) for result, _ in answers]
            assert all((array == array.flat[0]).all() for array in arrays)
            assert sorted(array.flat[0] for array in arrays) == list(range(2, 22))


def test_sequences_have_places(bundles: Bundles) -> None:
    inputs = {"x": numpy.ones(3, "float32")}
    options = ("--max-sequences", "2", "--sequence-idle-s", "1")
    with local_server([bundles["counting"]], *options) as server, Client("http", server) as client:
        for sequence_id in ("a", "b"):
            client.ask("counting", inputs, sequence_id=sequence_id, sequence_start=True)
        with refused("503"):
            client.ask("counting", inputs, sequence_id="c", sequence_start=True)
        client.ask("counting", inputs, sequence_id="a", sequence_end=True)
        client.ask("counting", inputs, sequence_id="c", sequence_start=True)
        with pytest.raises(InferenceServerException, match="sequence_end: expected true or false"):
            client.ask("counting", inputs, sequence_id="b", sequence_end="false")
        assert metrics(server)["stagepack_sequences", "counting"] == 2
        assert client.ask("counting", inputs, sequence_id="b")["sum"].tolist() == [2.0] * 3
        assert client.ask("counting", inputs, sequence_id="b", sequence_start=True)["sum"].tolist() == [1.0] * 3


def test_index_of_models(server: LocalServer) -> None:
    with Client("http", server) as client:
        index = client.raw.get_model_repository_index()
        assert {entry["name"] for entry in index} >= {"skips"}
        assert all(entry["version"] == "1" and entry["state"] == "READY" for entry in index)
    with Client("grpc", server) as client:
        assert client.raw.get_model_repository_index(as_json=True)["models"] == index
    for body, status in ((b'{"ready": true}', 200), (b'{"ready": 1}', 400), (b"[]", 400), (b"{", 400)):
        assert post(server.http, "/v2/repository/index", body)[0] == status


def test_access_log(bundles: Bundles, tmp_path: Path) -> None:
    (log := tmp_path / "log").touch()
    with stagepack_server([bundles["skips"]], "--access-log", errors=log) as server:
        for protocol in ("http", "grpc"):
            ask(server, protocol, "skips", skips(1))
        with pytest.raises(InferenceServerException):
            ask(server, "http", "skips", {"x": skips(1)["x"]})
    lines = log.read_text().splitlines()
    time_pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    times, sizes = r"\d+\.\d ms( \(queue \d+\.\d, run \d+\.\d\))?", r"\d+ B in \d+ B out"
    rest, grpc_call = "POST /v2/models/skips/infer", "/inference.GRPCInferenceService/ModelInfer"
    expected = (("rest skips 1 OK", rest), ("grpc skips 1 OK", grpc_call), ("rest skips 1 BAD_REQUEST", rest))
    inferences = [line for line in lines if " skips 1 " in line]
    for line, (request, operation) in zip(inferences, expected, strict=True):
        pattern = rf"{time_pattern} {request} {times} 127\.0\.0\.1:\d+ {operation} {sizes} trace=[0-9a-f]{{32}}"
        assert re.fullmatch(pattern, line), line


def test_grpc_health_and_reflection(bundles: Bundles) -> None:
    statuses = []
    with stagepack_server([bundles["skips"]], "--linger-s", "1") as server, grpc_channel(server) as channel:
        stub = HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            assert stub.Check(HealthCheckRequest(service=service)).status == HealthCheckResponse.SERVING
        with refused("NOT_FOUND"):
            stub.Check(HealthCheckRequest(service="other"))
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(services)
        watch = stub.Watch(HealthCheckRequest(service=""))
        statuses.append(next(watch).status)
        server.process.send_signal(signal.SIGTERM)
        statuses += [response.status for response in watch]
    assert statuses == [HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING]


def test_what_is_not_there(server: LocalServer) -> None:
    with Client("grpc", server) as client, refused("UNIMPLEMENTED", says="TraceSetting"):
        client.raw.get_trace_settings()
    with Client("http", server) as client, refused("404"):
        client.raw.get_trace_settings()


def test_a_bundle_that_fails_its_own_rules(bundles: Bundles, tmp_path: Path) -> None:
    assert "nothing" in refusal(tmp_path / "nothing")
    assert "cuda:7" in refusal(bundles["skips"], "--device", "cuda:7")
    assert "onnx" in refusal(bundles["half"], "--runtime", "onnxruntime")
