"""The same code of `tritonclient` against `stagepack serve` and against a real `tritonserver`, over HTTP and over gRPC."""

import concurrent.futures
import contextlib
import http.client
import socket
from collections.abc import Mapping
from typing import Any

import grpc
import ml_dtypes
import numpy
import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.serve.servers import Client, Server

pytestmark = pytest.mark.xdist_group("serve")


def numbers(*shape: Any, dtype: Any = "float32") -> Any:
    return numpy.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def tokens(batch: int, length: int) -> Any:
    ids = numpy.random.default_rng(batch * 1000 + length).integers(1, 3000, (batch, length))
    return {"input_ids": ids, "attention_mask": numpy.ones_like(ids)}


def in_process(pipe: Any, given: Any) -> Any:
    """The answer of the pipeline in this process, as arrays."""
    with torch.no_grad():
        return pipe(**{name: torch.from_numpy(array) for name, array in given.items()})


def same(found: Any, wanted: Any) -> Any:
    return found.dtype == wanted.numpy().dtype and numpy.array_equal(found, wanted.numpy())


def refused(client: Client, status: Any, call: Any) -> Any:
    """Call what must be refused; the message."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert (
        str(caught.value.status()) in {"http": (str(status[0]),), "grpc": (f"StatusCode.{status[1]}",)}[client.protocol]
    )
    assert client.raw.is_server_live()
    return caught.value.message()


BAD = (400, "INVALID_ARGUMENT")
GONE = (404, "NOT_FOUND")


def test_health(client: Client) -> None:
    assert client.raw.is_server_live()
    assert client.raw.is_server_ready()
    assert client.raw.is_model_ready("minilm")
    assert client.raw.is_model_ready("minilm", "1")
    assert client.raw.get_server_metadata()


def test_metadata(client: Client) -> None:
    found = client.metadata("minilm")
    assert found["name"] == "minilm"
    assert found["versions"] == ["1"]
    inputs = [(one["name"], one["datatype"], [int(size) for size in one["shape"]]) for one in found["inputs"]]
    assert inputs == [("input_ids", "INT64", [-1, -1]), ("attention_mask", "INT64", [-1, -1])]
    outputs = [(one["name"], one["datatype"], [int(size) for size in one["shape"]]) for one in found["outputs"]]
    assert outputs == [("last_hidden_state", "FP32", [-1, -1, 384]), ("pooler_output", "FP32", [-1, 384])]


def test_config(client: Client) -> None:
    found = client.config("minilm")
    assert found["max_batch_size"] == 32
    assert [one["name"] for one in found["input"]] == ["input_ids", "attention_mask"]
    assert [[int(size) for size in one["dims"]] for one in found["output"]] == [[-1, 384], [384]]
    assert client.config("kinds").get("max_batch_size", 0) == 0


@pytest.mark.parametrize("binary", [True, False])
def test_sizes_change(client: Client, pipes: Mapping[str, Any], binary: bool) -> None:
    for batch, length in ((1, 5), (3, 17), (2, 64), (8, 2), (1, 5)):
        given = tokens(batch, length)
        wanted = in_process(pipes["minilm"], given)
        found = client.ask("minilm", given, binary=binary)
        assert all(same(found[name], wanted[name]) for name in wanted), (batch, length)


def test_asks_for_one_output(client: Client, pipes: Mapping[str, Any]) -> None:
    given = tokens(2, 9)
    assert list(client.ask("minilm", given, outputs=["pooler_output"])) == ["pooler_output"]


def test_skips_and_results_that_are_given_twice(client: Client, pipes: Mapping[str, Any]) -> None:
    given = {"x": numbers(5, 8), "weight": numbers(5, 1)}
    wanted = in_process(pipes["skips"], given)
    found = client.ask("skips", given)
    assert same(found["y"], wanted["y"])
    assert same(found["again"], wanted["y"])
    assert numpy.array_equal(found["output.x"], given["x"])
    assert same(found["parts.0"], wanted["parts"][0])
    assert same(found["parts.1"], wanted["parts"][1])


def test_what_crosses_may_have_strides(client: Client, pipes: Mapping[str, Any]) -> None:
    given = {"x": numbers(2, 3, 4)}
    assert same(client.ask("strided", given)["y"], in_process(pipes["strided"], given)["y"])


def test_bfloat16(client: Client, pipes: Mapping[str, Any]) -> None:
    given = numbers(3, 16).astype(ml_dtypes.bfloat16)
    answer = client.raw.infer("half", [client.input("x", given, "BF16")])
    with torch.no_grad():
        wanted = pipes["half"](torch.from_numpy(given.view("uint16")).view(torch.bfloat16))
    found = answer.as_numpy("output")
    assert numpy.asarray(found, ml_dtypes.bfloat16).view("uint16").tolist() == wanted.view(torch.uint16).tolist()


@pytest.mark.parametrize("binary", [True, False])
def test_all_kinds_of_values(client: Client, pipes: Mapping[str, Any], binary: bool) -> None:
    given = {
        "x": numbers(3, 4),
        "flag": numpy.array([False, True]),
        "count": numpy.array([-3, 126], "int8"),
        "factor": numpy.array([0.25], "float32"),
    }
    with torch.no_grad():
        tensors = [torch.from_numpy(given[name]) for name in ("x", "flag", "count")]
        wanted = pipes["kinds"](*tensors, torch.tensor(0.25))
    found = client.ask("kinds", given, binary=binary)
    assert same(found["waves"], torch.view_as_real(wanted["waves"].resolve_conj()))
    assert same(found["no"], wanted["no"])
    assert same(found["more"], wanted["more"])
    assert found["number"].tolist() == [wanted["number"]] == [6]
    assert found["output.factor"].tolist() == [0.5]
    assert same(found["y"], wanted["y"])


def test_empty_tensors(client: Client, pipes: Mapping[str, Any]) -> None:
    given = {
        "x": numbers(2, 4),
        "flag": numpy.array([False, True]),
        "count": numpy.zeros(2, "int8"),
        "factor": numbers(1),
    }
    message = refused(client, BAD, lambda: client.ask("kinds", given | {"x": numbers(0, 4)}))
    assert "0" in message


def test_64_requests_at_once(client: Client, server: Server, pipes: Mapping[str, Any]) -> None:
    lengths = [5, 9, 16, 33]
    given = [tokens(1 + number % 3, lengths[number % 4]) for number in range(64)]
    wanted = [in_process(pipes["minilm"], one)["pooler_output"].numpy() for one in given]

    def ask(number: int) -> Any:  # a client of its own: that for HTTP stays in one thread
        with contextlib.closing(Client(client.protocol, server)) as mine:
            return mine.ask("minilm", given[number], outputs=["pooler_output"])["pooler_output"]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        found = list(pool.map(ask, range(64)))
    assert max(abs(one - other).max() for one, other in zip(found, wanted, strict=True)) < 1e-5


def test_sequences_keep_their_state_apart(client: Client, pipes: Mapping[str, Any]) -> None:
    with torch.no_grad():
        first = [pipes["counting"](torch.full((3,), 2.0)) for _ in range(3)]
        pipes["counting"].reset_state()
        second = [pipes["counting"](torch.full((3,), 5.0)) for _ in range(2)]
        pipes["counting"].reset_state()
    two, five = numpy.full(3, 2, "float32"), numpy.full(3, 5, "float32")
    steps = [
        (7, two, 0, True, False),
        (8, five, 0, True, False),
        (7, two, 1, False, False),
        (8, five, 1, False, True),
        (7, two, 2, False, True),
    ]
    for name, array, step, start, end in steps:
        found = client.ask("counting", {"x": array}, sequence_id=name, sequence_start=start, sequence_end=end)
        wanted = (first if name == 7 else second)[step]
        assert same(found["sum"], wanted["sum"])
        assert same(found["other"], wanted["other"])


def test_a_sequence_that_did_not_start(client: Client) -> None:
    given = {"x": numpy.ones(3, "float32")}
    assert "START" in refused(client, BAD, lambda: client.ask("counting", given, sequence_id=99)).upper()
    refused(client, BAD, lambda: client.ask("counting", given))


def test_wrong_names(client: Client) -> None:
    given = tokens(1, 4)
    assert "nope" in refused(client, GONE, lambda: client.ask("nope", given, outputs=["x"]))
    assert "nope" in refused(client, GONE, lambda: client.metadata("nope"))
    assert "7" in refused(client, GONE, lambda: client.ask("minilm", given, model_version="7"))
    assert "extra" in refused(
        client, BAD, lambda: client.ask("minilm", {"input_ids": given["input_ids"], "extra": given["input_ids"]})
    )
    assert "extra" in refused(client, BAD, lambda: client.ask("minilm", given, outputs=["extra"]))


def test_a_missing_input(client: Client) -> None:
    message = refused(client, BAD, lambda: client.ask("minilm", {"input_ids": tokens(1, 4)["input_ids"]}))
    assert "attention_mask" in message


def test_wrong_dtype(client: Client) -> None:
    given = tokens(1, 4)
    message = refused(client, BAD, lambda: client.ask("minilm", given | {"input_ids": numbers(1, 4)}))
    assert "input_ids" in message


@pytest.mark.parametrize("shape", [(4,), (1, 4, 1), (1, 600), (1, 1), (1, 7)])
def test_wrong_shapes(client: Client, shape: Any) -> None:
    given = tokens(1, 4)
    message = refused(client, BAD, lambda: client.ask("minilm", given | {"input_ids": numpy.ones(shape, "int64")}))
    assert "input_ids" in message


def test_token_numbers_beyond_the_vocabulary(client: Client) -> None:
    given = tokens(1, 4)
    beyond = given | {"input_ids": given["input_ids"] + 10**6}
    assert "out of range in stage 0" in refused(client, BAD, lambda: client.ask("minilm", beyond))


def test_more_bytes_than_the_shape_says(client: Client) -> None:
    given = client.input("x", numbers(4, 8))
    given._shape = [2, 8]
    if client.protocol == "grpc":
        given._input.shape[0] = 2
    message = refused(client, BAD, lambda: client.raw.infer("skips", [given, client.input("weight", numbers(2, 1))]))
    assert "64" in message


def test_an_oversized_body(client: Client, server: Server) -> None:
    """Of 70 MB, where the model takes 36 bytes a row; each server says so in its way."""
    large = client.input("x", numpy.zeros((70_000_000 // 32, 8), "float32"))
    given = [large, client.input("weight", numpy.zeros((2, 1), "float32"))]
    with pytest.raises(InferenceServerException) as caught:
        client.raw.infer("skips", given)
    assert (
        caught.value.status()
        in {
            "http": ("413", "400"),
            "grpc": ("StatusCode.RESOURCE_EXHAUSTED", "StatusCode.INVALID_ARGUMENT"),
        }[client.protocol]
    )
    assert client.raw.is_server_live()


def test_garbage_bytes(client: Client, server: Server) -> None:
    garbage = numpy.random.default_rng(0).bytes(20_000)
    if client.protocol == "http":
        for headers in ({}, {"Inference-Header-Content-Length": "100"}, {"Inference-Header-Content-Length": "-1"}):
            connection = http.client.HTTPConnection("127.0.0.1", server.http)
            connection.request("POST", "/v2/models/skips/infer", garbage, headers)
            assert connection.getresponse().status in (400, 500)  # Triton calls a body that is no JSON its own error
            connection.close()
    else:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as caught:
                call(garbage)
            assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
    for port in (server.http, server.grpc):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(garbage)
    assert client.raw.is_server_live()
