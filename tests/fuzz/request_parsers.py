"""A server without sockets, as the fuzzers call it: the routes of REST and the service of gRPC, with two models behind them."""

import asyncio
import contextlib
import json
from typing import Any
from unittest import mock

import msgspec
import numpy
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

import stagepack
from stagepack.errors import StagepackError
from stagepack_serving.server import grpc_messages, rest_request
from stagepack_serving.server.bundle_listings import fixed_bundles
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.grpc_service import GrpcService
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.rest_service import rest_application
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.openai.requests import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    decode_openai_request,
)
from stagepack_text.server.generate_request import GenerateParameters
from stagepack_text.server.sampling_fields import convert_fields
from tests.conformance.vectors import SCHEMA
from tests.fuzz.parsers import FuzzedParser
from tests.protobuf_fields import message, message_fields

MODELS = ("tower", "counting")
X = {"name": "x", "datatype": "FP32", "shape": [1, 2, 4], "data": [0.5] * 8}
IDS = {"name": "batch_ids", "datatype": "INT64", "shape": [1, 2], "data": [[0, 1]]}
FLAG = {"name": "batch_flag", "datatype": "BOOL", "shape": [1], "data": [True]}
START = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
BINARY_X = {"name": "x", "datatype": "FP32", "shape": [1, 2, 4], "parameters": {"binary_data_size": 32}}
# Path, JSON, binary part.
REST_REQUESTS: list[tuple[str, Any, bytes]] = [
    ("/v2/models/tower/infer", {"inputs": [X]}, b""),
    ("/v2/models/tower/infer", {"id": "7", "inputs": [X], "outputs": [{"name": "output.0"}]}, b""),
    ("/v2/models/tower/infer", {"inputs": [X | {"data": [[[float("nan"), float("inf"), -1e30, 3]] * 2]}]}, b""),
    ("/v2/models/tower/infer", {"inputs": [X], "parameters": {"timeout": 10**6, "binary_data_output": True}}, b""),
    ("/v2/models/tower/infer", {"inputs": [X], "parameters": {"timeout": 10**400}}, b""),
    ("/v2/models/tower/versions/1/infer", {"inputs": [BINARY_X]}, bytes(32)),
    ("/v2/models/counting/infer", {"inputs": [IDS, FLAG], "parameters": START | {"binary_data_output": True}}, b""),
    ("/v2/models/counting/infer", {"inputs": [IDS, FLAG], "parameters": {"sequence_id": "a"}}, b""),
    ("/v2/models/tower/generate", {"text_input": "a", "parameters": {"max_tokens": 3, "stop": ["b"], "seed": 1}}, b""),
    ("/v1/completions", {"model": "tower", "prompt": [1, 2], "max_tokens": 3, "temperature": 0.5, "stop": "."}, b""),
    (
        "/v1/chat/completions",
        {"model": "tower", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 1},
        b"",
    ),
    ("/v1/embeddings", {"model": "tower", "input": ["a", ""], "dimensions": 3, "encoding_format": "base64"}, b""),
    ("/v1/embeddings", {"model": "tower", "input": [[1, 2], [3]], "user": "a"}, b""),
    ("/v2/logging", {"log_verbose_level": 1}, b""),
    ("/v2/repository/index", {"ready": True}, b""),
    ("/v2/repository/models/tower/load", {"parameters": {}}, b""),
]


def rest_parser() -> FuzzedParser:
    """Requests over HTTP: a line with the path, a line with the length of the JSON part or nothing, and the body."""
    control = _control()
    loop = asyncio.new_event_loop()
    application = rest_application(control)

    def read(content: bytes) -> None:
        path, header_length, body = content.split(b"\n", 2) if content.count(b"\n") > 1 else (content, b"", b"")
        _read_text_fields(bytearray(body))
        _compare_with_large_request(bytearray(body), header_length.decode("latin-1") or None)
        headers = [(rest_request.BINARY_HEADER.encode(), header_length)] if header_length else []
        loop.run_until_complete(_post(application, path.decode("latin-1"), headers, body))

    def decode(content: bytes) -> Any:
        path, header_length, body = content.split(b"\n", 2)
        json_bytes = int(header_length or len(body))
        return [path.decode(), json.loads(body[:json_bytes]), body[json_bytes:].decode("latin-1")]

    return FuzzedParser(
        read=read,
        seeds=[_encode_rest(*request) for request in REST_REQUESTS],
        decode=decode,
        encode=_encode_fields,
        close=loop.close,
    )


def grpc_parser() -> FuzzedParser:
    """Messages of gRPC that ask for an inference."""
    service = GrpcService(_control())
    loop = asyncio.new_event_loop()

    def read(content: bytes) -> None:
        try:
            message = pb.ModelInferRequest.FromString(content)
        except DecodeError as error:
            raise StagepackError(str(error)) from None
        _compare_with_separation(content, message)
        loop.run_until_complete(service.ModelInfer(grpc_messages.parse_inference(content), _GrpcContext()))

    def request(**fields: Any) -> bytes:
        content: bytes = pb.ModelInferRequest(**fields).SerializeToString()
        return content

    typed = {"name": "x", "datatype": "FP32", "shape": [1, 2, 4], "contents": {"fp32_contents": [0.5] * 8}}
    ids = {"name": "batch_ids", "datatype": "INT64", "shape": [1, 2]}
    flag = {"name": "batch_flag", "datatype": "BOOL", "shape": [1]}
    start = {
        "sequence_id": pb.InferParameter(int64_param=7),
        "sequence_start": pb.InferParameter(bool_param=True),
        "timeout": pb.InferParameter(uint64_param=1_000_000),
    }
    seeds = [
        request(model_name="tower", id="7", inputs=[typed], outputs=[{"name": "output.0"}]),
        request(model_name="tower", inputs=[typed | {"contents": None}], raw_input_contents=[bytes(32)]),
        request(
            model_name="counting",
            inputs=[ids, flag],
            parameters=start,
            raw_input_contents=[numpy.array([0, 1]).tobytes(), b"\1"],
        ),
        request(
            model_name="counting",
            inputs=[ids, flag | {"shape": []}],
            parameters=start,
            raw_input_contents=[bytes(16), b"\2"],
        ),
        request(
            model_name="counting",
            model_version="1",
            inputs=[ids | {"contents": {"int64_contents": [0, 1]}}, flag | {"contents": {"bool_contents": [True]}}],
            parameters={"sequence_id": pb.InferParameter(string_param="a")},
        ),
    ]
    return FuzzedParser(read=read, seeds=seeds, decode=message_fields, encode=message, close=loop.close)


def _compare_with_separation(content: bytes, message: Any) -> None:
    """The raw contents that are separated before a request is parsed, and the rest, are what the parser finds."""
    try:
        with mock.patch.object(grpc_messages, "_FEW_BYTES", 0):
            request = grpc_messages.parse_inference(content)
    except DecodeError:
        return  # the server refuses it
    assert [bytes(raw_content) for raw_content in request.raw_contents] == list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    request.message.ClearField("raw_input_contents")
    assert request.message.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)


class _GrpcContext:
    def time_remaining(self) -> None:
        return None


def _control() -> ModelControl:
    """A server that serves the frozen bundles, and loads nothing."""
    models = ModelRegistry(ServerLimits(deadline=20), Metrics())
    for name in MODELS:
        bundle = stagepack.open(SCHEMA / "frozen" / "1.0" / f"{name}.stagepack")
        models.serve([ServedModel(name, stagepack.load(bundle), models.limits, models.metrics)])
    return ModelControl(models, fixed_bundles({}), mock.Mock())


def _encode_rest(path: str, fields: Any, binary_part: bytes) -> bytes:
    json_part = json.dumps(fields).encode()
    header_length = str(len(json_part)) if binary_part else ""
    return f"{path}\n{header_length}\n".encode() + json_part + binary_part


def _encode_fields(fields: Any) -> bytes:
    path, json_fields, binary_part = fields
    return _encode_rest(path, json_fields, binary_part.encode("latin-1"))


async def _post(application: Any, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a request to the application. Its exception, if it has one, is raised."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-length", str(len(body)).encode()), *headers],
        "state": {"abort_connection": mock.Mock()},
    }
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await application(scope, messages.get, send)
    status = sent[0]["status"]
    assert status in {200, *(status.http_code for status in RequestStatus), 405}, status


def _compare_with_large_request(body: bytearray, header_length: str | None) -> None:
    """Decode an inference request in one step and as a large one, in several: the results are the same."""
    with mock.patch.object(rest_request, "_LARGE_BYTES", -1):
        in_steps = _decoded(body, header_length)
    assert in_steps == _decoded(body, header_length)


def _decoded(body: bytearray, header_length: str | None) -> Any:
    try:
        header, request = rest_request.decode_rest_request(body, header_length)
    except RequestError as error:
        return error.status
    tensors = [
        (tensor.name, tensor.array.dtype, tensor.array.shape, tensor.array.tobytes()) for tensor in request.inputs
    ]
    return tensors, request.output_names, repr(header.parameters)


def _read_text_fields(body: bytearray) -> None:
    """Decode requests for texts, whose models are not served here."""
    with contextlib.suppress(RequestError):
        decode_openai_request(body, EmbeddingFields).sentences()
    for fields_type in (CompletionFields, ChatFields):
        try:
            fields = decode_openai_request(body, fields_type)
            fields.settings()
            fields.stop_strings()
            if isinstance(fields, ChatFields):
                fields.template_messages()
                fields.schema()
                fields.callable_tools()
            else:
                for has_tokens in (False, True):
                    fields.prompts(has_tokens=has_tokens)
        except RequestError:
            pass
    with contextlib.suppress(RequestError, msgspec.DecodeError, UnicodeDecodeError):
        convert_fields(msgspec.json.decode(body), GenerateParameters).settings()
