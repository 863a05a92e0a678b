"""Large JSON: it is read and written as small JSON is, and others are answered meanwhile."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack_serving.server import rest_request
from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.parameters import InferenceTensor
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.rest_request import RequestHeader, decode_rest_request, encode_rest_response
from tests.modules import module_of
from tests.serve.servers import Server, stagepack_server


def decode(body: bytes | str) -> Any:
    """The JSON part of a request and its tensors, or the error."""
    content = bytearray(body.encode() if isinstance(body, str) else body)
    try:
        header, request = decode_rest_request(content, None)
    except RequestError as error:
        return str(error)
    tensors = [
        (tensor.name, tensor.datatype, tensor.array.dtype, tensor.array.shape, tensor.array.tolist())
        for tensor in request.inputs
    ]
    return header.id, header.parameters, header.outputs, tensors


def request_of(*inputs: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"inputs": list(inputs), **fields})


def tensor_of(datatype: str, shape: list[int], data: Any, **fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data, **fields}


NESTED = numpy.arange(24).reshape(2, 3, 4).tolist()
BODIES = [
    request_of(tensor_of("FP32", [3], [1, 2.5, -1e-3])),
    request_of(tensor_of("INT64", [24], list(range(24))), id="7", parameters={"a": [{"b": "NaN"}]}),
    request_of(tensor_of("INT32", [2, 3, 4], NESTED), tensor_of("BOOL", [2], [True, False]), outputs=[{"name": "y"}]),
    request_of(tensor_of("FP64", [2, 3, 4], NESTED)).replace(",", " ,\n").replace("[", "[\t "),
    request_of(tensor_of("FP32", [2, 2], [[float("nan"), float("inf")], [-float("inf"), 1.0]]), id="NaN Infinity"),
    request_of(tensor_of("UINT64", [2], [2**63, 2**64 - 1])),
    request_of({"name": "x", "datatype": "FP32", "shape": [1]}, tensor_of("FP32", [1, 1], [[5]])),
    request_of(tensor_of("FP32", [0], [])),
    request_of(tensor_of("FP32", [2, 0], [[], []]), tensor_of("INT64", [1, 0], [[]]), tensor_of("FP32", [0, 2], [])),
    request_of(tensor_of("FP32", [1, 2, 0, 2**40], [[[], []]]), tensor_of("FP32", [3, 0], [])),
    request_of(),
]
REFUSED = [
    (request_of(tensor_of("FP32", [2, 2], [[1, 2], [3]])), "2, 2"),
    (request_of(tensor_of("FP32", [2, 2], [[1], [2, 3, 4]])), "other sizes"),
    (request_of(tensor_of("FP32", [2**40, 0], [[], []])), "other sizes"),
    (request_of(tensor_of("FP32", [0, 2], [[]])), "other sizes"),
    (request_of(tensor_of("FP32", [1, 2], [[], [1, 2]])), "FP32"),
    (request_of(tensor_of("FP32", [2, 2], [1, 2, 3, [4]])), "other sizes"),
    (request_of(tensor_of("FP32", [3], [1, "a", 3])), "Expected `float`"),
    (request_of(tensor_of("FP32", [3], ["],[", 1, 2])), "FP32"),
    (request_of(tensor_of("FP32", [1], [1e39])), "overflow"),
    (request_of(tensor_of("INT8", [1], [200])), "INT8"),
    (request_of(tensor_of("INT8", [1], [0.5])), "INT8"),
    (request_of(tensor_of("INT8", [1], [float("nan")])), "INT8"),
    (request_of(tensor_of("BOOL", [1], [1])), "BOOL"),
    (request_of(tensor_of("FP32", [2], [1, None])), "FP32"),
    (request_of(tensor_of("FP32", [4], [1, 2, 3])), "4 elements"),
    (request_of(tensor_of("FP32", [], 3)), "flat or in lists"),
    (request_of(tensor_of("FP32", [0, 2**61], [])), "less than 2**63 bytes"),
    (request_of(tensor_of("FP32", [1], [1] * 60 + [{}])), "FP32"),
    ('{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1NaN]}]}', "FP32"),
    ('{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1,,2]}]}', "the request is not valid JSON"),
    ('{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]', "the request is not valid JSON"),
    ('{"inputs": 3}', "violates the protocol"),
    ('{"inputs": [' + "[" * 5000 + "]" * 5000 + "]}", "violates the protocol"),
    (request_of(tensor_of("FP32", [1], [1], parameters={"a": [[]] * 400_000})), "1000000 bytes of JSON"),
    (request_of(parameters={"a": [{}] * 20_000}), "10000 lists and objects"),
    (request_of(tensor_of("FP32", [1], [1]), unknown=1).encode().replace(b"unk", b"\xef"), "utf-8"),
    (request_of(tensor_of("FP32", [1], [float("nan")]), id="\ud800"), "is a lone surrogate"),
    (request_of(tensor_of("FP32", [1], [float("nan")], name="\ud800")), "is a lone surrogate"),
    (request_of(tensor_of("FP32", [1], [float("nan")]), outputs=[{"name": "\ud800"}]), "is a lone surrogate"),
    (request_of(tensor_of("FP32", [1], [1]), parameters={"a": float("nan")}), "the request"),
    (request_of(tensor_of("FP32", [1], [1]), id="7" * 1025), "id: expected a string of at most 1024 characters"),
    (request_of(tensor_of("FP32", [1], [float("nan")]), unknown=1).encode().replace(b"unk", b"\xef"), "utf-8"),
]


@pytest.mark.parametrize("body", BODIES)
def test_large_json_is_read_as_small_json(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    expected = repr(decode(body))
    monkeypatch.setattr(rest_request, "_LARGE_BYTES", 0)
    for piece_bytes in (1, 7, 1_000_000):
        monkeypatch.setattr("stagepack_serving.server.tensor_decoding._PIECE_BYTES", piece_bytes)
        assert repr(decode(body)) == expected


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_large_json_is_refused_as_small_json(monkeypatch: pytest.MonkeyPatch, body: bytes | str, says: str) -> None:
    if "1000000" not in says and "10000" not in says:
        assert isinstance(decode(body), str)
    monkeypatch.setattr(rest_request, "_LARGE_BYTES", 0)
    for piece_bytes in (1, 1_000_000):
        monkeypatch.setattr("stagepack_serving.server.tensor_decoding._PIECE_BYTES", piece_bytes)
        refusal = decode(body)
        assert isinstance(refusal, str)
        assert says in refusal


def test_large_answers_are_json() -> None:
    arrays = [numpy.linspace(0, 1, 40_000, dtype="float32").reshape(2, -1), numpy.arange(3), numpy.zeros(0)]
    arrays.append(numpy.array([[numpy.nan, 1.0], [-numpy.inf, numpy.inf]]))
    outputs = [InferenceTensor(name=f"y{number}", datatype="FP64", array=array) for number, array in enumerate(arrays)]
    content, binary_parts = encode_rest_response("m", "1", RequestHeader(inputs=[], id="7"), outputs)
    assert not binary_parts
    answer = json.loads(content)
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("m", "1", "7")
    for entry, array in zip(answer["outputs"], arrays, strict=True):
        assert entry["shape"] == list(array.shape)
        assert numpy.array_equal(numpy.array(entry["data"], array.dtype), array.reshape(-1), equal_nan=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("same") / "same.stagepack"
    shapes = {"x": {0: torch.export.Dim("size", min=2, max=2**24)}}
    stagepack.export(module_of(lambda self, x: x + 0), (torch.ones(4),), out=path, stages=1, dynamic_shapes=shapes)
    with stagepack_server([path]) as server:
        yield server


def ask(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status and the body of an answer, which is not parsed: that would hold the interpreter of this test."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def ask_meanwhile(server: Server, path: str, body: bytes) -> tuple[int, bytes, float, list[float]]:
    """The answer to a request, how long it took, and how long requests for the health of the server took meanwhile, in seconds."""
    start_time, waits = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, server, "POST", path, body)
        while not future.done():
            asked = time.monotonic()
            assert ask(server, "GET", "/v2/health/live")[0] == 200
            waits.append(time.monotonic() - asked)
            time.sleep(0.01)
        return *future.result(), time.monotonic() - start_time, waits


def test_the_event_loop_runs_while_large_json_is_read_and_written() -> None:
    data = numpy.linspace(0, 1, 500_000).astype("float32")
    body = bytearray(request_of(tensor_of("FP32", [data.size], data.tolist())).encode())

    async def longest_stall() -> tuple[float, float]:
        """The longest time for which the loop ran nothing else, and all time."""
        stalls = []

        async def tick() -> None:
            while True:
                start_time = time.monotonic()
                await asyncio.sleep(0.001)
                stalls.append(time.monotonic() - start_time)

        ticking, start_time = asyncio.create_task(tick()), time.monotonic()
        header, request = await beside_loop(len(body), decode_rest_request, body, None)
        content, _ = await beside_loop(len(body), encode_rest_response, "m", "1", header, request.inputs)
        seconds = time.monotonic() - start_time
        ticking.cancel()
        assert len(content) > 5_000_000
        return max(stalls), seconds

    stall, seconds = asyncio.run(longest_stall())
    assert stall < seconds / 2, (stall, seconds)


@pytest.mark.slow
@pytest.mark.xdist_group("serve")
def test_others_are_answered_while_large_json_is_read_and_written(large: Server) -> None:
    data = numpy.linspace(0, 1, 1_500_000).astype("float32")
    body = request_of({"name": "x", "datatype": "FP32", "shape": [data.size], "data": data.tolist()})
    status, answer, seconds, waits = ask_meanwhile(large, "/v2/models/same/infer", body.encode())
    assert status == 200
    assert numpy.array_equal(numpy.array(json.loads(answer)["outputs"][0]["data"], "float32"), data)
    assert max(waits) < seconds / 3, (seconds, max(waits), len(waits))


@pytest.mark.slow
@pytest.mark.xdist_group("serve")
def test_hostile_json_does_not_stop_the_server(large: Server) -> None:
    bodies = {
        "infer": [
            b'{"inputs":[],"parameters":{"a":[' + b",".join([b"[]"] * 20_000_000) + b"]}}",
            b'{"inputs":[' + b",".join([b"{}"] * 20_000_000) + b"]}",
            b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":['
            + b",".join([b'""'] * 20_000_000)
            + b"]}]}",
            b'{"inputs":[{"name":"x","datatype":"FP32","data":[1],"shape":[' + b",".join([b"1"] * 30_000_000) + b"]}]}",
        ],
        "generate": [b"[" + b",".join([b"[]"] * 5_000_000) + b"]", b"[" + b",".join([b'"a"'] * 3_900_000) + b"]"],
    }
    for path, contents in bodies.items():
        for content in contents:
            status, _, _, waits = ask_meanwhile(large, f"/v2/models/same/{path}", content)
            assert status == 400
            assert max(waits) < 2
