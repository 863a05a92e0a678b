"""Messages of gRPC: answers are the bytes that protobuf reads; large requests are bounded before they are parsed."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import ml_dtypes
import numpy
import pytest
import uvloop
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.grpc_calls import CheckedMethods, GrpcLoop
from stagepack_serving.server.grpc_messages import (
    MAX_FIELDS,
    MAX_OTHER_BYTES,
    MAX_PARSED_BYTES,
    decode_grpc_request,
    encode_grpc_response,
    encode_stream_response,
    named_model,
    parse_inference,
    parse_message,
    separate_raw_contents,
)
from stagepack_serving.server.limits import MAX_TEXT_BYTES, ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.parameters import InferenceTensor
from tests.process_facts import memory_bytes
from tests.serve.asgi import run_in_server_loop
from tests.serve.local_server import LocalServer
from tests.serve.servers import Server, grpc_channel, refused, stagepack_server

SERVICE = "/inference.GRPCInferenceService"
INFER, STREAM, METADATA = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer", f"{SERVICE}/ModelMetadata"
# Fields of a request, of an input and of its contents.
MODEL_NAME, MODEL_VERSION, PARAMETERS, INPUTS, OUTPUTS, RAW_CONTENTS = 1, 2, 4, 5, 6, 7
INPUT_NAME, SHAPE, CONTENTS = 1, 3, 5
OUTPUT_PARAMETERS = 2
INT64_CONTENTS, BYTES_CONTENTS = 3, 8

ARRAYS = {
    "FP32": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "BOOL": numpy.array([True, False]),
    "BF16": numpy.array([1.5, -2.0], ml_dtypes.bfloat16),
    "INT64": numpy.array(-7),
    "FP64": numpy.empty((0, 3)),
    "UINT8": numpy.arange(300, dtype=numpy.uint8)[::2],
    "INT16": numpy.zeros((130, 130), numpy.int16),
    "FP16": numpy.ones((1100, 1000), numpy.float16),
}


def field(number: int, content: bytes) -> bytes:
    """A field with bytes or a message."""
    size, digits = len(content), []
    while True:
        digits.append(size % 128 + 128 * (size >= 128))
        size //= 128
        if not size:
            return bytes([number * 8 + 2, *digits]) + content


@pytest.mark.parametrize("names", [[], *([name] for name in ARRAYS), list(ARRAYS)], ids=lambda names: "-".join(names))
def test_protobuf_reads_what_was_encoded(names: list[str]) -> None:
    outputs = [InferenceTensor(name=f"output.{name}", datatype=name, array=ARRAYS[name]) for name in names]
    content = encode_grpc_response("m", "1", "an id", outputs)
    expected = pb.ModelInferResponse(model_name="m", model_version="1", id="an id")
    for output in outputs:
        expected.outputs.add(name=output.name, datatype=output.datatype, shape=output.array.shape)
        expected.raw_output_contents.append(output.array.tobytes())
    assert pb.ModelInferResponse.FromString(content) == expected
    in_stream = pb.ModelStreamInferResponse.FromString(encode_stream_response(content))
    assert in_stream == pb.ModelStreamInferResponse(infer_response=expected)


@pytest.mark.parametrize("message", ["duplicate output: y, y", "y: this server does not support classification"])
def test_outputs_that_cannot_be_sent_are_refused(message: str) -> None:
    request = pb.ModelInferRequest(model_name="m")
    for _ in range(2 if message.startswith("duplicate") else 1):
        request.outputs.add(name="y").parameters["classification"].int64_param = 3
    with pytest.raises(RequestError, match=message):
        decode_grpc_request(parse_inference(request.SerializeToString()))


def raw_request(*raw_contents: bytes) -> pb.ModelInferRequest:
    """A request with an input for each of its raw contents."""
    message = pb.ModelInferRequest(model_name="scale", id="7", raw_input_contents=raw_contents)
    for position in range(len(raw_contents)):
        message.inputs.add(name=f"x{position}", datatype="FP32", shape=[2, 3])
    return message


EMPTY_INPUTS = field(INPUTS, b"") * 3_000_000
TOO_LARGE = {
    "inputs": EMPTY_INPUTS,
    "parameters": field(INPUTS, field(PARAMETERS, b"") * 3_000_000),
    "raw": field(RAW_CONTENTS, b"") * 3_000_000,
    "strings": field(INPUTS, field(CONTENTS, field(BYTES_CONTENTS, b"") * 3_000_000)),
    "unknown": b"\x68\x01" * 3_000_000,  # numbers of unknown fields
    "map": field(PARAMETERS, field(1, b"") * 3_000_000),
    "name": field(MODEL_NAME, bytes(MAX_PARSED_BYTES)),
    "shape": field(INPUTS, field(SHAPE, bytes(MAX_PARSED_BYTES))),
    "typed": field(INPUTS, field(CONTENTS, field(INT64_CONTENTS, bytes(MAX_PARSED_BYTES)))),
    "beside raw contents": field(RAW_CONTENTS, bytes(9_000_000)) + field(MODEL_NAME, bytes(MAX_PARSED_BYTES)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_message_that_is_large_beside_raw_contents_is_not_parsed(name: str) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_PARSED_BYTES} bytes .* send tensors as raw_input_contents"):
        parse_inference(TOO_LARGE[name])
    with pytest.raises(RequestError, match=f"at most {MAX_OTHER_BYTES} bytes"):
        parse_message(pb.ModelMetadataRequest.FromString, TOO_LARGE[name])


@pytest.mark.parametrize(
    "content",
    [
        field(INPUTS, b"") * 600_000,
        field(INPUTS, field(PARAMETERS, b"") * 600_000),
        field(OUTPUTS, b"") * 600_000,
        field(OUTPUTS, field(OUTPUT_PARAMETERS, b"") * 600_000),
        field(PARAMETERS, b"") * 600_000,
        field(RAW_CONTENTS, b"") * 600_000,
        field(INPUTS, field(CONTENTS, field(BYTES_CONTENTS, b"") * 600_000)),
        b"\x68\x01" * 600_000,
    ],
    ids=["inputs", "parameters", "outputs", "of outputs", "of the request", "raw", "strings", "unknown"],
)
def test_messages_of_many_parts_are_refused(content: bytes) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_FIELDS} fields, found more"):
        parse_inference(content)


def test_large_tensors_are_accepted() -> None:
    raw = raw_request(bytes(2_000_000), bytes(3_000_000))
    typed, texts = raw_request(), raw_request()
    typed.inputs.add(name="x").contents.fp32_contents.extend([0.5] * 300_000)
    typed.inputs.add(name="y").contents.int64_contents.extend([2**62] * 300_000)
    texts.inputs.add(name="x").contents.bytes_contents.append(bytes(2_000_000))
    parts = raw_request(*[bytes(4000)] * (MAX_FIELDS // 4))
    for message in (raw, typed, texts, parts):
        content = message.SerializeToString()
        assert len(content) > 2_000_000
        parsed = parse_inference(content)
        assert [bytes(raw_content) for raw_content in parsed.raw_contents] == message.raw_input_contents
        assert list(parsed.message.inputs) == list(message.inputs)
        with pytest.raises(RequestError, match="at most 1000000 bytes"):
            parse_message(pb.ModelMetadataRequest.FromString, content)


def test_large_raw_contents_are_not_copied() -> None:
    message = raw_request(b"a" * 8_000_000, b"", b"b" * 30_000)
    # Fields may come in any order: here one before the others.
    content = field(RAW_CONTENTS, b"first") + message.SerializeToString()
    other_content, raw_contents = separate_raw_contents(content)
    assert [bytes(raw_content) for raw_content in raw_contents] == [b"first", *message.raw_input_contents]
    assert all(raw_content.obj is content for raw_content in raw_contents)
    message.ClearField("raw_input_contents")
    assert pb.ModelInferRequest.FromString(other_content) == message == parse_inference(content).message


@pytest.mark.parametrize(
    "content",
    [
        field(RAW_CONTENTS, bytes(60_000)),
        field(INPUTS, field(CONTENTS, bytes(80_000))),
        field(RAW_CONTENTS, b"") * 5000 + field(RAW_CONTENTS, bytes(80_000)),
        field(RAW_CONTENTS, bytes(80_000)) + b"\x7b\x7c",  # an unknown group
        # A number of a field with more bytes than the parser takes.
        field(RAW_CONTENTS, bytes(80_000)) + b"\xba\x80\x80\x80\x80\x00\x00",
    ],
    ids=["small", "typed", "many", "group", "number"],
)
def test_other_requests_are_parsed_as_they_are(content: bytes) -> None:
    assert separate_raw_contents(content) == (content, [])


@pytest.mark.parametrize(
    "content",
    [
        field(RAW_CONTENTS, bytes(2_000_000))[:-1],
        field(INPUTS, field(CONTENTS, bytes(2_000_000))),  # a tag without a field
        b"\x2b" + bytes(2_000_000),  # a group
        b"\xff" * 2_000_000,
    ],
    ids=["short", "tag", "group", "number"],
)
def test_bytes_that_are_no_message(content: bytes) -> None:
    with pytest.raises((DecodeError, RequestError)):
        parse_inference(content)
    with pytest.raises(DecodeError):
        pb.ModelInferRequest.FromString(separate_raw_contents(content)[0])


@pytest.mark.parametrize(
    ("method", "content", "status"),
    [
        (INFER, EMPTY_INPUTS[:90_000], "NOT_FOUND"),
        (METADATA, field(MODEL_NAME, b"skips"), ""),
        (METADATA, b"\xff", "INVALID_ARGUMENT"),
        (METADATA, None, "INVALID_ARGUMENT"),
    ],
    ids=["unknown model", "answered", "no message", "nothing"],
)
def test_calls_with_one_message(small: LocalServer, method: str, content: bytes | None, status: str) -> None:
    with grpc_channel(small) as channel:
        call = channel.stream_unary(method)
        contents = iter([] if content is None else [content])
        if not status:
            assert pb.ModelMetadataResponse.FromString(call(contents, timeout=20)).name == "skips"
        else:
            with refused(status):
                call(contents, timeout=20)


def peak_bytes(server: Server) -> int:
    return memory_bytes(server.process.pid, "VmHWM")


def test_a_compressed_message_counts_decompressed(server: Server) -> None:
    """200 kB that gzip made of 200 MB are refused, and never in memory whole."""
    bytes_before = peak_bytes(server)
    with grpc_channel(server, max_send_message_length=-1) as channel, refused("RESOURCE_EXHAUSTED"):
        channel.unary_unary(INFER)(bytes(200_000_000), compression=grpc.Compression.Gzip, timeout=60)
    assert peak_bytes(server) - bytes_before < 130_000_000


MODEL = field(MODEL_NAME, b"writer")


@pytest.fixture(scope="module")
def server(writer: Path) -> Iterator[Server]:
    with stagepack_server([writer]) as server:
        yield server


def large_request(input_name: str, datatype: str, *input_fields: bytes, model: bytes = MODEL) -> bytes:
    """A request with more data than one for a text may have."""
    raw_content = bytes(3 * MAX_TEXT_BYTES)
    tensor = pb.ModelInferRequest.InferInputTensor(name=input_name, datatype=datatype, shape=[1, len(raw_content) // 8])
    return (
        model + field(INPUTS, b"".join([tensor.SerializeToString(), *input_fields])) + field(RAW_CONTENTS, raw_content)
    )


def large_prompt() -> bytes:
    return large_request("input_ids", "INT64")


# Made by the tests alone: each has 48 MB.
TOO_LONG: dict[str, Callable[[], bytes]] = {
    "tokens": large_prompt,
    "text": lambda: large_request("text_input", "BYTES"),
    "version": lambda: field(MODEL_VERSION, b"1") + large_prompt(),
    # The parser takes the last text of a field, and leaves out a number in the place of a text.
    "two models": lambda: field(MODEL_NAME, b"other") + large_prompt(),
    "a number as the model": lambda: large_prompt() + bytes([MODEL_NAME * 8, 5]),
    "two names": lambda: large_request("cache_position", "INT64", field(INPUT_NAME, b"input_ids")),
}


@pytest.mark.parametrize("method", [INFER, STREAM])
@pytest.mark.parametrize("name", TOO_LONG)
def test_a_large_request_for_a_text_is_refused(server: Server, name: str, method: str) -> None:
    """Also in a stream, which it ends."""
    content, bytes_before = TOO_LONG[name](), peak_bytes(server)
    status, details = refusal(server, method, content)
    expected = f"expected a request for a text of at most {MAX_TEXT_BYTES} bytes, found {len(content)}"
    assert (status, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, expected)
    assert peak_bytes(server) - bytes_before < 4 * len(content)


def refusal(server: Server, method: str, content: bytes) -> tuple[grpc.StatusCode | None, str]:
    """Why a call with one message is refused; the status is None if an answer of a stream says why."""
    with grpc_channel(server, max_send_message_length=-1) as channel:
        call = channel.stream_stream(method)(iter([content]), timeout=60)
        try:
            [answer] = call
        except grpc.RpcError:
            return call.code(), call.details()
        return None, pb.ModelStreamInferResponse.FromString(answer).error_message


@pytest.mark.parametrize("method", [INFER, STREAM])
@pytest.mark.parametrize(
    ("make_content", "status", "says"),
    [
        (
            lambda: EMPTY_INPUTS,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"at most {MAX_PARSED_BYTES} bytes beside the raw contents",
        ),
        (lambda: EMPTY_INPUTS[:MAX_PARSED_BYTES], grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_FIELDS} fields"),
        (
            lambda: large_request("cache_position", "INT64"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "the input 'input_ids' is missing",
        ),
        (
            lambda: large_request("input_ids", "INT64", model=field(MODEL_NAME, b"unknown")),
            grpc.StatusCode.NOT_FOUND,
            "unknown model 'unknown'",
        ),
    ],
    ids=["many inputs", "many inputs in few bytes", "call of the decoder", "unknown model"],
)
def test_a_large_request_is_refused_and_takes_little_memory(
    server: Server, method: str, make_content: Callable[[], bytes], status: grpc.StatusCode, says: str
) -> None:
    content, bytes_before = make_content(), peak_bytes(server)
    found_status, details = refusal(server, method, content)
    # A stream tells in an answer why a request that was parsed is refused.
    assert found_status == status or (method == STREAM and found_status is None)
    assert says in details
    assert peak_bytes(server) - bytes_before < 4 * len(content)


def test_steps_of_calls_end_without_an_error() -> None:
    async def end_steps() -> None:
        step, *others = (asyncio.get_running_loop().create_future() for _ in range(3))
        step.set_exception(grpc.aio.InternalError('Failed "execute_batch": (ReceiveMessageOperation,)'))
        assert await step is None
        for future, error in zip(others, (grpc.aio.InternalError("not begun"), KeyError("another")), strict=True):
            future.set_exception(error)
            with pytest.raises(type(error)):
                await future

    uvloop.run(end_steps(), loop_factory=GrpcLoop)


def test_calls_leave_nothing_to_the_garbage_collector() -> None:
    async def refuse() -> None:
        server = grpc.aio.server()
        CheckedMethods(server, ModelRegistry(ServerLimits(), Metrics()), None)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(5):
                assert await channel.unary_unary("/no/method")(b"").code() is grpc.StatusCode.UNIMPLEMENTED
        await server.stop(None)

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run_in_server_loop(refuse())
        gc.collect()
        names = {type(each).__name__ for each in gc.garbage}
        assert not names & {"AbortError", "OpenCall", "RPCState", "_ServicerContext"}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_the_model_is_found_without_a_parse_of_the_tensors() -> None:
    request = pb.ModelInferRequest(model_name="m", model_version="2", raw_input_contents=[b"1234"])
    assert named_model(request.SerializeToString()) == ("m", "2")
    assert named_model(pb.ModelInferRequest(model_name="m").SerializeToString()) == ("m", "")
    for content in (b"", b"\xff", b"\x0a\x02\xff\xff", pb.ModelInferRequest(id="1").SerializeToString()):
        assert named_model(content) == ("", "")
