"""The same code of `tritonclient` against `stagepack serve` and against a real `tritonserver`, over HTTP and over gRPC."""

import concurrent.futures
import socket
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

from tests.serve.servers import INFER, Client, Server, grpc_channel, post
from tests.serve.servers import refused as refused_call


def random_array(*shape: Any, dtype: Any = "float32") -> Any:
    return numpy.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def tokens(batch: int, length: int) -> Any:
    ids = numpy.random.default_rng(batch * 1000 + length).integers(1, 3000, (batch, length))
    return {"input_ids": ids, "attention_mask": numpy.ones_like(ids)}


def in_process(pipe: Any, inputs: Any) -> Any:
    """The answer of the pipeline in this process, as arrays."""
    with torch.no_grad():
        return pipe(**{input_name: torch.from_numpy(array) for input_name, array in inputs.items()})


def same(answer: Any, expected: Any) -> Any:
    return answer.dtype == expected.numpy().dtype and numpy.array_equal(answer, expected.numpy())


def refused(client: Client, status: Any, call: Any) -> Any:
    """Call what must be refused; the message."""
    with refused_call(status[client.protocol == "grpc"]) as caught:
        call()
    assert client.raw.is_server_live()
    return caught.value.message()


BAD = ("400", "INVALID_ARGUMENT")
GONE = ("404", "NOT_FOUND")


def test_health(client: Client) -> None:
    assert client.raw.is_server_live()
    assert client.raw.is_server_ready()
    assert client.raw.is_model_ready("minilm")
    assert client.raw.is_model_ready("minilm", "1")
    assert client.raw.get_server_metadata()


def test_metadata(client: Client) -> None:
    answer = client.metadata("minilm")
    assert answer["name"] == "minilm"
    assert answer["versions"] == ["1"]
    tensors = [
        (tensor["name"], tensor["datatype"], [int(size) for size in tensor["shape"]])
        for tensor in (*answer["inputs"], *answer["outputs"])
    ]
    assert tensors[:2] == [("input_ids", "INT64", [-1, -1]), ("attention_mask", "INT64", [-1, -1])]
    assert tensors[2:] == [("last_hidden_state", "FP32", [-1, -1, 384]), ("pooler_output", "FP32", [-1, 384])]


def test_config(client: Client) -> None:
    answer = client.config("minilm")
    assert answer["max_batch_size"] == 32
    assert [tensor["name"] for tensor in answer["input"]] == ["input_ids", "attention_mask"]
    assert [[int(size) for size in tensor["dims"]] for tensor in answer["output"]] == [[-1, 384], [384]]
    assert client.config("kinds").get("max_batch_size", 0) == 0


@pytest.mark.parametrize("binary", [True, False])
def test_sizes_change(client: Client, pipes: Mapping[str, Any], binary: bool) -> None:
    for batch, length in ((1, 5), (3, 17), (2, 64), (8, 2), (1, 5)):
        inputs = tokens(batch, length)
        expected = in_process(pipes["minilm"], inputs)
        answer = client.ask("minilm", inputs, binary=binary)
        assert all(same(answer[output_name], expected[output_name]) for output_name in expected), (batch, length)


def test_asks_for_one_output(client: Client, pipes: Mapping[str, Any]) -> None:
    inputs = tokens(2, 9)
    assert list(client.ask("minilm", inputs, outputs=["pooler_output"])) == ["pooler_output"]


def test_skips_and_results_that_are_given_twice(client: Client, pipes: Mapping[str, Any]) -> None:
    inputs = {"x": random_array(5, 8), "weight": random_array(5, 1)}
    expected = in_process(pipes["skips"], inputs)
    answer = client.ask("skips", inputs)
    assert same(answer["y"], expected["y"])
    assert same(answer["again"], expected["y"])
    assert numpy.array_equal(answer["output.x"], inputs["x"])
    assert same(answer["parts.0"], expected["parts"][0])
    assert same(answer["parts.1"], expected["parts"][1])


def test_what_crosses_may_have_strides(client: Client, pipes: Mapping[str, Any]) -> None:
    inputs = {"x": random_array(2, 3, 4)}
    assert same(client.ask("strided", inputs)["y"], in_process(pipes["strided"], inputs)["y"])


def test_bfloat16(client: Client, pipes: Mapping[str, Any]) -> None:
    inputs = random_array(3, 16).astype(ml_dtypes.bfloat16)
    answer = client.raw.infer("half", [client.input("x", inputs, "BF16")])
    with torch.no_grad():
        expected = pipes["half"](torch.from_numpy(inputs.view("uint16")).view(torch.bfloat16))
    answer = answer.as_numpy("output")
    assert numpy.asarray(answer, ml_dtypes.bfloat16).view("uint16").tolist() == expected.view(torch.uint16).tolist()


KINDS = {
    "flag": numpy.array([False, True]),
    "count": numpy.array([-3, 126], "int8"),
    "factor": numpy.array([0.25], "float32"),
}


@pytest.mark.parametrize("binary", [True, False])
def test_all_kinds_of_values(client: Client, pipes: Mapping[str, Any], binary: bool) -> None:
    inputs = KINDS | {"x": random_array(3, 4)}
    with torch.no_grad():
        tensors = [torch.from_numpy(inputs[input_name]) for input_name in ("x", "flag", "count")]
        expected = pipes["kinds"](*tensors, torch.tensor(0.25))
    answer = client.ask("kinds", inputs, binary=binary)
    assert same(answer["waves"], torch.view_as_real(expected["waves"].resolve_conj()))
    assert same(answer["no"], expected["no"])
    assert same(answer["more"], expected["more"])
    assert answer["number"].tolist() == [expected["number"]] == [6]
    assert answer["output.factor"].tolist() == [0.5]
    assert same(answer["y"], expected["y"])


def test_empty_tensors(client: Client) -> None:
    message = refused(client, BAD, lambda: client.ask("kinds", KINDS | {"x": random_array(0, 4)}))
    assert "0" in message


def test_64_requests_at_once(client: Client, server: Server, pipes: Mapping[str, Any]) -> None:
    lengths = [3, 4, 5, 9]
    inputs = [tokens(1 + request_number % 3, lengths[request_number % 4]) for request_number in range(64)]
    expected = [in_process(pipes["minilm"], each)["pooler_output"].numpy() for each in inputs]

    def ask(request_number: int) -> Any:  # a client of its own: that for HTTP stays in one thread
        with Client(client.protocol, server) as own_client:
            return own_client.ask("minilm", inputs[request_number], outputs=["pooler_output"])["pooler_output"]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert max(abs(answer - wanted).max() for answer, wanted in zip(answers, expected, strict=True)) < 1e-5


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
    for sequence_id, array, step, start, end in steps:
        answer = client.ask("counting", {"x": array}, sequence_id=sequence_id, sequence_start=start, sequence_end=end)
        expected = (first if sequence_id == 7 else second)[step]
        assert same(answer["sum"], expected["sum"])
        assert same(answer["other"], expected["other"])


def test_a_sequence_that_did_not_start(client: Client) -> None:
    inputs = {"x": numpy.ones(3, "float32")}
    assert "START" in refused(client, BAD, lambda: client.ask("counting", inputs, sequence_id=99)).upper()
    refused(client, BAD, lambda: client.ask("counting", inputs))


def test_wrong_names(client: Client) -> None:
    inputs = tokens(1, 4)
    assert "nope" in refused(client, GONE, lambda: client.ask("nope", inputs, outputs=["x"]))
    assert "nope" in refused(client, GONE, lambda: client.metadata("nope"))
    assert "7" in refused(client, GONE, lambda: client.ask("minilm", inputs, model_version="7"))
    wrong = {"input_ids": inputs["input_ids"], "extra": inputs["input_ids"]}
    assert "extra" in refused(client, BAD, lambda: client.ask("minilm", wrong))
    assert "extra" in refused(client, BAD, lambda: client.ask("minilm", inputs, outputs=["extra"]))


def test_a_missing_input(client: Client) -> None:
    message = refused(client, BAD, lambda: client.ask("minilm", {"input_ids": tokens(1, 4)["input_ids"]}))
    assert "attention_mask" in message


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        pytest.param(random_array(1, 4), "input_ids", id="wrong dtype"),
        *(
            pytest.param(numpy.ones(shape, "int64"), "input_ids", id=f"wrong shape {shape}")
            for shape in ((4,), (1, 4, 1), (1, 600), (1, 1), (1, 7))
        ),
        pytest.param(tokens(1, 4)["input_ids"] + 10**6, "out of range in stage 0", id="beyond the vocabulary"),
    ],
)
def test_an_input_that_does_not_fit(client: Client, ids: Any, says: str) -> None:
    assert says in refused(client, BAD, lambda: client.ask("minilm", tokens(1, 4) | {"input_ids": ids}))


def test_more_bytes_than_the_shape_says(client: Client) -> None:
    inputs = client.input("x", random_array(4, 8))
    inputs._shape = [2, 8]
    if client.protocol == "grpc":
        inputs._input.shape[0] = 2
    weight = client.input("weight", random_array(2, 1))
    assert "64" in refused(client, BAD, lambda: client.raw.infer("skips", [inputs, weight]))


def test_an_oversized_body(client: Client, server: Server) -> None:
    """A body of 70 MB, where the model takes 36 bytes a row; each server says so in its way."""
    large = client.input("x", numpy.zeros((70_000_000 // 32, 8), "float32"))
    inputs = [large, client.input("weight", numpy.zeros((2, 1), "float32"))]
    statuses = {"http": ("413", "400"), "grpc": ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")}
    with refused_call(*statuses[client.protocol]):
        client.raw.infer("skips", inputs)
    assert client.raw.is_server_live()


def test_garbage_bytes(client: Client, server: Server) -> None:
    garbage = numpy.random.default_rng(0).bytes(20_000)
    if client.protocol == "http":
        for headers in ({}, {"Inference-Header-Content-Length": "100"}, {"Inference-Header-Content-Length": "-1"}):
            assert post(server.http, INFER, garbage, headers)[0] in (400, 500)  # Triton calls it its own error
    else:
        with grpc_channel(server) as channel, refused_call("INTERNAL", "INVALID_ARGUMENT"):
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(garbage)
    for port in (server.http, server.grpc):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(garbage)
    assert client.raw.is_server_live()
