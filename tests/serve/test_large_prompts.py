"""Large requests for a text over gRPC: they have the limit of REST, and are not parsed beyond it."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from stagepack_serving.server.grpc_messages import RequestOutline, outline_request
from stagepack_serving.server.limits import MAX_TEXT_BYTES
from tests.serve.generating_model import export_decoder
from tests.serve.servers import Server, stagepack_server
from tests.serve.test_large_messages import INFER, field

pytestmark = pytest.mark.xdist_group("serve")
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
# Fields of a request, of an input and of its contents.
MODEL_NAME, MODEL_VERSION, INPUTS, RAW_CONTENTS = 1, 2, 5, 7
INPUT_NAME, CONTENTS = 1, 5
INT64_CONTENTS, BYTES_CONTENTS = 3, 8

MODEL = field(MODEL_NAME, b"writer")
# Too long for a text; a number of one byte takes eight when it is parsed.
LARGE = b"\x05" * (3 * MAX_TEXT_BYTES)


def input_of(name: bytes, datatype: str, *fields: bytes) -> bytes:
    """An input of a request."""
    tensor = pb.ModelInferRequest.InferInputTensor(datatype=datatype, shape=[1, len(LARGE)])
    return field(INPUTS, b"".join([tensor.SerializeToString(), field(INPUT_NAME, name), *fields]))


TYPED = field(CONTENTS, field(INT64_CONTENTS, LARGE))
PROMPT = input_of(b"input_ids", "INT64", TYPED)
LARGE_REQUESTS = {
    "typed": MODEL + PROMPT,
    "raw": MODEL + input_of(b"input_ids", "INT64") + field(RAW_CONTENTS, LARGE),
    "text": MODEL + input_of(b"text_input", "BYTES", field(CONTENTS, field(BYTES_CONTENTS, LARGE))),
    "version": MODEL + field(MODEL_VERSION, b"1") + PROMPT,
    # The parser takes the last text of a field, and leaves out a number in the place of a text.
    "two models": field(MODEL_NAME, b"other") + PROMPT + MODEL,
    "a number as the model": MODEL + PROMPT + bytes([MODEL_NAME * 8, 5]),
    "two names": MODEL + input_of(b"cache_position", "INT64", TYPED, field(INPUT_NAME, b"input_ids")),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with stagepack_server([export_decoder(tmp_path_factory.mktemp("prompts"))]) as server:
        yield server


def refusal(server: Server, method: str, content: bytes) -> tuple[grpc.StatusCode, str]:
    """Why a call with one message is refused."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", options=options) as channel:
        call = channel.stream_stream(method)(iter([content]), timeout=60)
        with pytest.raises(grpc.RpcError):
            list(call)
        return call.code(), call.details()


def peak_bytes(server: Server) -> int:
    """The most memory that the server has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("method", [INFER, STREAM])
@pytest.mark.parametrize("name", LARGE_REQUESTS)
def test_a_large_request_for_a_text_is_refused_before_it_is_parsed(server: Server, name: str, method: str) -> None:
    content, bytes_before = LARGE_REQUESTS[name], peak_bytes(server)
    expected = f"expected a request for a text of at most {MAX_TEXT_BYTES} bytes, found {len(content)}"
    assert refusal(server, method, content) == (grpc.StatusCode.RESOURCE_EXHAUSTED, expected)
    assert peak_bytes(server) - bytes_before < 4 * len(content)


def test_other_large_requests_are_parsed(server: Server) -> None:
    numbers = field(CONTENTS, field(INT64_CONTENTS, bytes(MAX_TEXT_BYTES)))
    call = MODEL + input_of(b"cache_position", "INT64", numbers)
    status, message = refusal(server, INFER, call)
    assert (status, "cache_position: expected" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True), message
    unknown = field(MODEL_NAME, b"unknown") + input_of(b"input_ids", "INT64", numbers)
    status, message = refusal(server, INFER, unknown)
    assert (status, "unknown model 'unknown'" in message) == (grpc.StatusCode.NOT_FOUND, True), message


@pytest.mark.parametrize("name", LARGE_REQUESTS)
def test_an_outline_has_the_names_that_the_parser_reads(name: str) -> None:
    content = LARGE_REQUESTS[name]
    message = pb.ModelInferRequest.FromString(content)
    assert outline_request(content) == RequestOutline(
        model_name=message.model_name,
        version=message.model_version,
        input_names=frozenset(tensor.name for tensor in message.inputs),
    )
