"""Requests that `stagepack serve` refuses: malformed, too large, too many, too slow."""

import concurrent.futures
import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

import stagepack
from stagepack_serving.server.tensor_decoding import array_from_json
from tests.modules import module_of
from tests.serve.attacks import READS_NOTHING, RawConnection
from tests.serve.bundles import Bundles
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import (
    INFER,
    AnyServer,
    Client,
    ask_slow,
    begin_post,
    get,
    grpc_channel,
    grpc_stub,
    post,
    refused,
    request_counts,
    skips_message,
    skips_request,
    stagepack_server,
    wait_for_requests,
)
from tests.waiting import wait_until


def test_a_body_that_is_too_large(small: LocalServer) -> None:
    for size in (200_000, 1_500_000, 5_000_000):
        status, answer, _ = post(small.http, INFER, b" " * size)
        assert status == 413
        assert "100000" in answer["error"]
        assert post(small.http, INFER, json.dumps(skips_request()))[0] == 200


def test_a_message_that_is_too_large(small: LocalServer) -> None:
    with Client("grpc", small) as client:
        arrays = {name: numpy.zeros((10_000, size), "float32") for name, size in (("x", 8), ("weight", 1))}
        with refused("RESOURCE_EXHAUSTED"):
            client.ask("skips", arrays, outputs=["y"])
        assert client.raw.is_server_live()


def test_a_packed_body(small: LocalServer) -> None:
    plain = json.dumps(skips_request()).encode()
    expected = post(small.http, INFER, plain)[1]
    status, answer, _ = post(small.http, INFER, gzip.compress(plain), {"Content-Encoding": "gzip"})
    assert (status, answer) == (200, expected)
    assert post(small.http, INFER, gzip.compress(b" " * 10_000_000), {"Content-Encoding": "gzip"})[0] == 413
    assert post(small.http, INFER, gzip.compress(plain)[:-9], {"Content-Encoding": "gzip"})[0] == 400
    assert post(small.http, INFER, plain, {"Content-Encoding": "gzip"})[0] == 400
    assert post(small.http, INFER, plain, {"Content-Encoding": "br"})[0] == 400


@pytest.mark.parametrize("header_name", ["Content-Encoding", "Inference-Header-Content-Length"])
def test_header_that_is_repeated_has_all_its_values(small: LocalServer, header_name: str) -> None:
    plain = json.dumps(skips_request()).encode()
    body, value = (gzip.compress(plain), "gzip") if header_name == "Content-Encoding" else (plain, str(len(plain)))
    status, answer, _ = post(small.http, INFER, body, [(header_name, value), (header_name, "7")])
    assert status == 400
    assert f"found '{value}, 7'" in answer["error"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body.pop("inputs"), "inputs"),
        (lambda body: body.update(inputs=3), "inputs"),
        (lambda body: body["inputs"][0].pop("data"), "data"),
        (lambda body: body["inputs"][0].update(data=[1.0]), "16 elements"),
        (lambda body: body["inputs"][0].update(data=["a"] * 16), "FP32"),
        (lambda body: body["inputs"][0].update(data=[[1.0], [2.0, 3.0]]), "x"),
        (lambda body: body["inputs"][0].update(shape=[-2, -8]), "-2"),
        (lambda body: body["inputs"][0].update(shape=[2**62, 2**62]), "x"),
        (lambda body: body["inputs"][0].update(shape=[2**80]), "shape"),
        (lambda body: body["inputs"][0].update(shape=[0, 2**62, 2**62]), "x"),
        (lambda body: body["inputs"][0].update(shape=[1] * 65, data=[1.0]), "64"),
        (lambda body: body["inputs"][0].update(shape=[2**62] * 900), "64"),
        (lambda body: body["inputs"][0].update(data=["x" * 1000, *range(1000)]), "FP32"),
        (lambda body: body["inputs"][0].update(data=[[1.0, 2.0]] * 8), "shape [2, 8]"),
        (lambda body: body["inputs"][0].update(data=[1e39] + [0] * 15), "overflow"),
        (lambda body: body["inputs"][0].update(datatype="INT8", data=[200] + [0] * 15), "INT8"),
        (lambda body: body["inputs"][0].update(datatype="INT8", data=[0.5] + [0] * 15), "INT8"),
        (lambda body: body["inputs"][0].update(name="x" * 50_000), "..."),
        (lambda body: body["inputs"][0].update(datatype="BYTES"), "BYTES"),
        (lambda body: body["inputs"][0].update(datatype="BF16"), "BF16"),
        (lambda body: body["inputs"][0].update(parameters={"binary_data_size": 5}), "data"),
        (lambda body: body["inputs"][0].update(parameters={"binary_data_size": "5"}), "data"),
        (lambda body: body["inputs"].append(body["inputs"][0]), "duplicate"),
        (lambda body: body["outputs"][0].update(parameters={"classification": 2}), "classification"),
        (lambda body: body["outputs"].append(body["outputs"][0]), "duplicate output: y, y"),
        (lambda body: body["outputs"][0].update(parameters={"binary_data": "no"}), "true or false"),
        (lambda body: body.update(parameters={"binary_data_output": 1}), "true or false"),
        (lambda body: body["outputs"][0].update(parameters={"shared_memory_region": "a"}), "no shared memory"),
        (lambda body: body["inputs"][0].update(parameters={"shared_memory_region": "a"}), "no shared memory"),
        (lambda body: body.update(parameters={"timeout": "soon"}), "timeout"),
    ],
)
def test_requests_that_break_the_protocol(small: LocalServer, change: Any, says: str) -> None:
    body = skips_request()
    change(body)
    status, answer, _ = post(small.http, INFER, json.dumps(body))
    assert status == 400
    assert says in answer["error"]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, '{"inputs": [NaN]}', "\ufeff{}", "\x00"])
def test_bodies_that_are_no_request(small: LocalServer, content: str) -> None:
    status, answer, _ = post(small.http, INFER, content.encode()[:90_000])
    assert status == 400
    assert answer["error"]


def test_long_names_over_grpc(small: LocalServer) -> None:
    with Client("grpc", small) as client:
        for call in (lambda: client.metadata("m" * 20_000), lambda: client.ask("m" * 20_000, {}, outputs=["y"])):
            with refused("NOT_FOUND"):
                call()


def test_large_unsigned_numbers() -> None:
    expected = [1, 2**63, 2**64 - 1]
    assert array_from_json(json.dumps(expected).encode(), numpy.dtype("uint64"), [3]).tolist() == expected


def test_special_numbers_in_json(small: LocalServer) -> None:
    body = skips_request()
    body["inputs"][0]["data"][3] = float("nan")
    body["inputs"][0]["data"][9] = float("-inf")
    body["outputs"] = [{"name": "output.x"}]
    status, answer, _ = post(small.http, INFER, json.dumps(body))
    assert status == 200
    elements = answer["outputs"][0]["data"]
    assert numpy.isnan(elements[3])
    assert elements[9] == float("-inf")


def test_paths_and_methods(small: LocalServer) -> None:
    missing = ("/v2/nothing", "/v2/models/skips/versions/2/infer", "/v2/models/skips/nothing")
    for path, expected_status in (*((path, 404) for path in missing), ("/v2/models/skips", 405)):
        status, answer, _ = post(small.http, path, b"")
        assert (status, bool(answer["error"])) == (expected_status, True)


def ask_when_free(server: AnyServer) -> Any:
    """The answer to a short request, once the runs before it, which were given up, are over."""
    until = time.monotonic() + 60
    while True:
        try:
            return ask_slow(server, 1)
        except InferenceServerException:
            assert time.monotonic() < until


def test_deadlines(slow: Path) -> None:
    with local_server([slow], "--deadline-s", "0.1") as server:
        for protocol, status in (("http", "504"), ("grpc", "DEADLINE_EXCEEDED")):
            for times, options in ((300, {}), (100, {"timeout": 20_000})):
                with refused(status):
                    ask_slow(server, times, protocol, **options)
                assert ask_when_free(server).shape == (256, 512)


@pytest.mark.parametrize("options", [(), pytest.param(("--processes", "1"), marks=pytest.mark.slow)])
def test_a_full_queue(slow: Path, options: tuple[str, ...]) -> None:
    with serving([slow], "--max-queue", "2", *options) as server:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(ask_slow, server, 300, ("http", "grpc")[number % 2]) for number in range(6)]
            errors = [future.exception() for future in futures]
        assert all(error is None or isinstance(error, InferenceServerException) for error in errors)
        statuses = [error.status() for error in errors if isinstance(error, InferenceServerException)]
        assert 2 <= len(statuses) <= 4
        assert set(statuses) <= {"503", "StatusCode.UNAVAILABLE"}
        assert ask_slow(server, 1).shape == (256, 512)


@pytest.mark.slow
def test_clients_that_hang_up_are_not_worked_for(slow: Path) -> None:
    with stagepack_server([slow]) as server:
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [256, 512], "data": numpy.ones((256, 512)).tolist()},
            {"name": "times", "datatype": "INT64", "shape": [1], "data": [1500]},
        ]
        for _ in range(6):
            connection = http.client.HTTPConnection("127.0.0.1", server.http)
            connection.request("POST", "/v2/models/slow/infer", json.dumps({"inputs": inputs}))
            time.sleep(0.2)
            connection.close()
        assert ask_slow(server, 1).shape == (256, 512)
        assert server.stop() == 0
        answers = server.answers()
    assert answers["HUNG_UP"] >= 4  # the first one may be done, and ran to its end anyhow


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers more than sockets hold."""
    out, model = tmp_path_factory.mktemp("wide") / "wide.stagepack", module_of(lambda self, x: x.repeat(10_000_000))
    return stagepack.export(model, (torch.ones(1),), out=out, stages=1).path


WIDE = "/v2/models/wide/infer"
# Who reads nothing is let go at the deadline, and not after 5 s.
SOON = {"stagepack_serving.server.limits._LEAST_SENDING_SECONDS": 1.0}


def wide_body(**parameters: int) -> bytes:
    """A request whose answer is not JSON."""
    request_input = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    return json.dumps({"inputs": [request_input], "parameters": {"binary_data_output": True, **parameters}}).encode()


def test_who_does_not_read_is_let_go(wide: Path) -> None:
    with stagepack_server([wide], "--deadline-s", "2", "--max-queue", "1", constants=SOON) as server:
        body = wide_body()
        with begin_post(server, WIDE, body):
            wait_for_requests(server, "wide")
            status, _, headers = post(server.http, WIDE, body)
            assert (status, headers["retry-after"]) == (503, "1")
            wait_until(lambda: request_counts(server, "wide")[0] == 0)
            with Client("grpc", server) as client:
                assert client.ask("wide", {"x": numpy.ones(1, "float32")})["output"].shape == (10_000_000,)
        assert server.stop() == 0
        assert server.answers() == {"TOO_LATE": 1, "BUSY": 1, "OK": 1}


def test_requests_are_refused_by_their_heads(wide: Path) -> None:
    """Nothing of a body is sent, or a body that is no request: neither is read while the queue is full."""
    with stagepack_server([wide], "--max-queue", "1") as server, begin_post(server, WIDE, wide_body()):
        wait_for_requests(server, "wide")
        wait_until(lambda: post(server.http, WIDE, b"")[0] == 503)
        for path in (WIDE, "/v2/models/wide/generate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            for header in ("Content-Length: 60000000", "Content-Length: 60000000\r\nExpect: 100-continue"):
                with socket.create_connection(("127.0.0.1", server.http), timeout=20) as plain:
                    plain.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
                    answer = plain.recv(4096)
                assert answer.startswith(b"HTTP/1.1 503"), path
                assert b"retry-after: 1" in answer
            assert post(server.http, path, b"no request")[0] == 503
        with grpc_channel(server) as channel, contextlib.ExitStack() as unsent:
            message_comes = threading.Event()
            unsent.callback(message_comes.set)
            infer = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
            for messages in (iter([b"\xff"]), iter(message_comes.wait, True)):
                with refused("UNAVAILABLE", says="requests are waiting already"):
                    infer(messages, timeout=20)
        page = get(server.http)[1]
        for protocol in ("rest", "openai", "grpc"):
            assert f'stagepack_requests_total{{model="wide",protocol="{protocol}",status="BUSY",version=""}}' in page


def test_unread_small_answer_over_grpc_ends_its_connection(bundles: Bundles) -> None:
    with stagepack_server([bundles["skips"]], "--deadline-s", "2", "--max-connections", "2", constants=SOON) as server:
        reader = RawConnection(server.grpc, READS_NOTHING)
        with contextlib.closing(reader.socket):
            for _ in range(2):
                reader.ask(skips_message().SerializeToString())
            wait_until(lambda: not reader.is_open, 30)
        with grpc_stub(server) as stub:
            assert stub.ModelInfer(skips_message(), timeout=20).outputs
        assert server.stop() == 0


def test_an_answer_that_has_begun_is_not_cut_off(wide: Path) -> None:
    with stagepack_server([wide]) as server:
        status = 504
        while status == 504:  # on a busy machine, the model itself may need more than the deadline of 1 s
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http)) as connection:
                connection.request("POST", WIDE, wide_body(timeout=1_000_000))
                response = connection.getresponse()
                status = response.status
                time.sleep(1.5)  # sockets hold a part of the answer, and the deadline passes
                content = response.read()
        assert status == 200
        assert len(content) == int(response.headers["content-length"]) > 40_000_000
        assert server.stop() == 0
        assert server.answers()["OK"] == 1


def test_a_stream_whose_answers_are_not_read_is_ended(wide: Path) -> None:
    with (
        stagepack_server([wide], "--deadline-s", "1") as server,
        Client("grpc", server) as client,
        grpc_stub(server, max_receive_message_length=-1) as stub,
    ):
        assert client.ask("wide", {"x": numpy.ones(1, "float32")})["output"].shape == (10_000_000,)
        bytes_before = server.memory()
        is_done = threading.Event()
        responses = stub.ModelStreamInfer(wide_requests(20, is_done))
        time.sleep(3)
        # Without an end, the server keeps the answers of all requests, 40 MB each.
        wait_until(lambda: server.memory() < bytes_before + 400_000_000, 60)
        with refused("DEADLINE_EXCEEDED", says="the client did not read an answer before the deadline"):
            list(responses)
        is_done.set()
        assert client.ask("wide", {"x": numpy.ones(1, "float32")})["output"].shape == (10_000_000,)


def wide_requests(request_count: int, is_done: threading.Event) -> Iterator[pb.ModelInferRequest]:
    """Requests for the model with wide answers; after them the stream stays open."""
    for index in range(request_count):
        request = pb.ModelInferRequest(model_name="wide", id=str(index), raw_input_contents=[b"\0\0\x80?"])
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        yield request
    is_done.wait()


def test_bfloat16_as_json_is_refused_before_the_model_runs(bundles: Bundles) -> None:
    with local_server([bundles["half"]]) as server, Client("http", server) as client:
        inputs = [client.input("x", numpy.zeros((1, 16), ml_dtypes.bfloat16), "BF16")]
        with pytest.raises(InferenceServerException, match="binary"):
            client.raw.infer("half", inputs, outputs=[client.module.InferRequestedOutput("output", binary_data=False)])
        assert "stagepack_batch_rows_count" not in get(server.http)[1]


def test_short_deadlines_cut_no_answer_off(bundles: Bundles) -> None:
    body = json.dumps(skips_request(64))
    statuses = set()

    def ask(_: int) -> int:
        status, answer, _ = post(server.http, INFER, body)  # raises an error if the answer is not whole
        assert ("outputs" in answer) == (status == 200)
        return status

    with (
        local_server([bundles["skips"]], "--deadline-s", "0.02") as server,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        statuses = set(pool.map(ask, range(800)))
    assert statuses <= {200, 503, 504}
    assert len(statuses) > 1


def test_unread_answer_over_grpc_ends_its_connection(wide: Path) -> None:
    with (
        stagepack_server([wide], "--deadline-s", "2", "--max-connections", "2", constants=SOON) as server,
        Client("grpc", server) as client,
    ):
        reader = RawConnection(server.grpc)
        with contextlib.closing(reader.socket):
            reader.ask(next(wide_requests(1, threading.Event())).SerializeToString())
            wait_for_requests(server, "wide")
            wait_until(lambda: not reader.is_open, 30)
        assert client.ask("wide", {"x": numpy.ones(1, "float32")})["output"].shape == (10_000_000,)
