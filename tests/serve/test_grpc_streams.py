"""Open gRPC streams: a withdrawn token ends them, and a bug that one request meets does not."""

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import grpc
import numpy
import pytest
import torch
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

import stagepack
from stagepack.cli import serve_command
from stagepack_serving.server import grpc_service
from stagepack_serving.server.grpc_messages import ParsedInference, decode_grpc_request
from stagepack_serving.server.grpc_service import HealthService
from stagepack_serving.server.security import AuthenticationError, ServerSecurity
from tests.serve.local_server import local_server
from tests.serve.servers import refused

if TYPE_CHECKING:
    from stagepack_serving.server.model_registry import ModelRegistry

TOKEN, OTHER_TOKEN = "token-of-these-tests", "other-token-of-these-tests"
METADATA = (("authorization", f"Bearer {TOKEN}"),)


def decode_or_fail(request: ParsedInference) -> Any:
    """Has a bug that requests of one id meet."""
    if request.message.id == "bug":
        raise KeyError("in these tests")
    return decode_grpc_request(request)


@dataclass(frozen=True, slots=True)
class StreamServer:
    """A server, and the file with the tokens that it accepts now."""

    address: str
    token_file: Path


@pytest.fixture(scope="module")
def running(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamServer]:
    folder = tmp_path_factory.mktemp("streams")
    torch.manual_seed(0)
    scale = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=folder / "scale.stagepack", stages=1).path
    token_file = folder / "tokens"
    security = ServerSecurity(check_token=lambda token: token in token_file.read_text().split())
    with (
        mock.patch.object(serve_command, "server_security", return_value=security),
        mock.patch.object(grpc_service, "decode_grpc_request", decode_or_fail),
        local_server([scale, writer]) as server,
    ):
        yield StreamServer(f"127.0.0.1:{server.grpc}", token_file)


@pytest.fixture
def server(running: StreamServer) -> StreamServer:
    running.token_file.write_text(f"{TOKEN}\n{OTHER_TOKEN}\n")
    return running


def scale_request(request_id: str) -> pb.ModelInferRequest:
    content = numpy.ones((1, 2), "float32").tobytes()
    request = pb.ModelInferRequest(model_name="scale", id=request_id, raw_input_contents=[content])
    request.inputs.add(name="input", datatype="FP32", shape=[1, 2])
    return request


def text_request(request_id: str, token_count: int) -> pb.ModelInferRequest:
    content = numpy.array([5, 6]).tobytes()
    request = pb.ModelInferRequest(model_name="writer", id=request_id, raw_input_contents=[content])
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    request.parameters["max_tokens"].int64_param = token_count
    return request


class Stream:
    """A stream of requests, each sent when the test says so."""

    def __init__(self, channel: Any, token: str) -> None:
        self.requests: queue.Queue[Any] = queue.Queue()
        metadata = [("authorization", f"Bearer {token}")]
        self.answers = GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter(self.requests.get, None), metadata=metadata, timeout=60
        )

    def ask(self, request: pb.ModelInferRequest) -> Any:
        """The next answer after a request."""
        self.requests.put(request)
        return next(self.answers)


def test_a_withdrawn_token_ends_its_streams(server: StreamServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stream, other_stream = Stream(channel, TOKEN), Stream(channel, OTHER_TOKEN)
        for each in (stream, other_stream):
            assert each.ask(scale_request("1")).infer_response.outputs
        server.token_file.write_text(OTHER_TOKEN)
        with refused("UNAUTHENTICATED", says="the token is not accepted") as raised:
            stream.ask(scale_request("2"))
        challenge = ("www-authenticate", 'Bearer realm="stagepack", error="invalid_token"')
        assert challenge in raised.value.trailing_metadata()
        assert other_stream.ask(scale_request("2")).infer_response.outputs
        other_stream.requests.put(None)
        assert list(other_stream.answers) == []


def test_a_withdrawn_token_ends_a_stream_that_is_being_answered(server: StreamServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stream = Stream(channel, TOKEN)
        stream.ask(text_request("long", 90))
        server.token_file.write_text(OTHER_TOKEN)
        for request in (scale_request("late"), None):
            stream.requests.put(request)
        with refused("UNAUTHENTICATED"):
            list(stream.answers)
        other_stream = Stream(channel, OTHER_TOKEN)
        assert other_stream.ask(text_request("other", 1)).infer_response.outputs
        other_stream.requests.put(None)


def test_a_bug_that_one_request_meets_ends_no_stream(server: StreamServer, caplog: pytest.LogCaptureFixture) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stream = Stream(channel, TOKEN)
        stream.ask(text_request("text", 20))
        for request in (scale_request("bug"), scale_request("good"), scale_request("bug"), None):
            stream.requests.put(request)
        answers = list(stream.answers)
        says = "a bug in stagepack: KeyError('in these tests')"
        with refused("INTERNAL", says=says):
            GRPCInferenceServiceStub(channel).ModelInfer(scale_request("bug"), metadata=METADATA, timeout=60)
    ids = [answer.infer_response.id for answer in answers if not answer.error_message]
    assert (ids.count("text"), ids.count("good")) == (19, 1)
    errors = [(answer.infer_response.id, answer.error_message) for answer in answers if answer.error_message]
    assert errors == [("bug", says)] * 2
    assert caplog.text.count("scale: a bug in stagepack\nTraceback") == 3
    assert "ExceptionGroup" not in caplog.text


def test_bytes_that_are_no_message_end_a_stream_without_a_traceback(
    server: StreamServer, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with refused("INVALID_ARGUMENT"):
            list(stream(iter([b"\xff\xff\xff"]), metadata=METADATA, timeout=60))
    assert "Traceback" not in caplog.text


def test_a_withdrawn_token_is_told_no_status() -> None:
    tokens, models = {TOKEN}, SimpleNamespace(stopping=asyncio.Event(), is_ready=True, serving=[])
    service = HealthService(cast("ModelRegistry", models), tokens.__contains__)
    call = SimpleNamespace(invocation_metadata=lambda: METADATA)

    async def watch() -> None:
        statuses = aiter(service.Watch(HealthCheckRequest(), call))
        assert (await anext(statuses)).status == HealthCheckResponse.SERVING
        models.is_ready = False
        assert (await anext(statuses)).status == HealthCheckResponse.NOT_SERVING
        tokens.clear()
        models.is_ready = True
        await anext(statuses)

    with pytest.raises(AuthenticationError):
        asyncio.run(watch())
