"""Large messages over gRPC: those that would take much more memory when they are parsed are refused before."""

from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.grpc_messages import check_message_size, separate_raw_contents
from tests.serve.servers import Server

INFER = "/inference.GRPCInferenceService/ModelInfer"
METADATA = "/inference.GRPCInferenceService/ModelMetadata"


def request_of(**contents: list[float]) -> pb.ModelInferRequest:
    """A request with one input with typed contents."""
    message = pb.ModelInferRequest(model_name="scale", id="7")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    for field_name, numbers in contents.items():
        getattr(tensor.contents, field_name).extend(numbers)
    return message


def test_large_tensors_are_accepted() -> None:
    raw = request_of()
    raw.raw_input_contents.extend([bytes(2_000_000), bytes(3_000_000)])
    typed = request_of(fp32_contents=[0.5] * 1_000_000, int64_contents=[2**62] * 300_000)
    texts = request_of()
    texts.inputs[0].contents.bytes_contents.append(bytes(2_000_000))
    for message in (raw, typed, texts):
        content = message.SerializeToString()
        assert len(content) > 2_000_000
        check_message_size(content, is_inference=True)
        with pytest.raises(RequestError, match="at most 1000000 bytes"):
            check_message_size(content, is_inference=False)


def field(number: int, content: bytes) -> bytes:
    """A field with bytes or a message."""
    size, digits = len(content), []
    while True:
        digits.append(size % 128 + 128 * (size >= 128))
        size //= 128
        if not size:
            return bytes([number * 8 + 2, *digits]) + content


EMPTY_INPUTS = field(5, b"") * 600_000
EMPTY_PARAMETERS = field(5, field(4, b"") * 600_000)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (EMPTY_INPUTS, "at most 20000 fields"),
        (EMPTY_PARAMETERS, "at most 20000 fields"),
        (field(7, b"") * 600_000, "at most 20000 fields"),  # raw contents
        (field(5, field(5, field(8, b"") * 600_000)), "at most 20000 fields"),  # strings
        (b"\x68\x01" * 600_000, "at most 20000 fields"),  # numbers of unknown fields
        (field(4, field(1, b"") * 600_000), "1000000 bytes beside the data of tensors"),
        (field(1, bytes(1_200_000)), "1000000 bytes beside the data of tensors"),
        (field(5, field(3, bytes(1_200_000))), "1000000 bytes beside the data of tensors"),
    ],
    ids=["inputs", "parameters", "raw", "strings", "unknown", "map", "name", "shape"],
)
def test_messages_of_many_parts_are_refused(content: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check_message_size(content, is_inference=True)


def test_raw_contents_are_separated_from_a_large_request_without_a_copy() -> None:
    message = request_of()
    message.raw_input_contents.extend([b"a" * 80_000, b"", b"b" * 30_000])
    # Fields may come in any order: here one before the others.
    content = field(7, b"first") + message.SerializeToString()
    other_content, raw_contents = separate_raw_contents(content)
    assert [bytes(raw_content) for raw_content in raw_contents] == [b"first", *message.raw_input_contents]
    assert all(raw_content.obj is content for raw_content in raw_contents)
    assert pb.ModelInferRequest.FromString(other_content) == request_of()


@pytest.mark.parametrize(
    "content",
    [
        field(7, bytes(60_000)),
        field(5, field(5, bytes(80_000))),
        field(7, b"") * 300 + field(7, bytes(80_000)),
        field(7, bytes(80_000)) + b"\x7b\x7c",  # an unknown group
        field(7, bytes(80_000))
        + b"\xba\x80\x80\x80\x80\x00\x00",  # a number of a field with more bytes than the parser takes
    ],
    ids=["small", "typed", "many", "group", "number"],
)
def test_other_requests_are_parsed_as_they_are(content: bytes) -> None:
    assert separate_raw_contents(content) == (content, [])


@pytest.mark.parametrize(
    "content",
    [
        field(7, bytes(2_000_000))[:-1],
        field(5, field(5, bytes(2_000_000))),  # a tag without a field
        b"\x2b" + bytes(2_000_000),  # a group
        b"\xff" * 2_000_000,
    ],
    ids=["short", "tag", "group", "number"],
)
def test_bytes_that_are_no_message(content: bytes) -> None:
    with pytest.raises((DecodeError, RequestError)):
        check_message_size(content, is_inference=True)
    with pytest.raises(DecodeError):
        pb.ModelInferRequest.FromString(separate_raw_contents(content)[0])


@pytest.mark.xdist_group("serve")
@pytest.mark.parametrize(
    ("method", "content", "status"),
    [
        (INFER, EMPTY_INPUTS[:90_000], grpc.StatusCode.NOT_FOUND),
        (METADATA, field(1, b"skips"), None),
        (METADATA, b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (METADATA, None, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["unknown model", "answered", "no message", "nothing"],
)
def test_calls_with_one_message(
    small: Server, method: str, content: bytes | None, status: grpc.StatusCode | None
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{small.grpc}") as channel:
        call = channel.stream_unary(method)
        contents = iter([] if content is None else [content])
        if status is None:
            assert pb.ModelMetadataResponse.FromString(call(contents, timeout=20)).name == "skips"
        else:
            with pytest.raises(grpc.RpcError) as caught:
                call(contents, timeout=20)
            assert caught.value.code() == status


@pytest.mark.xdist_group("serve")
def test_a_compressed_message_counts_decompressed(small: Server) -> None:
    """200 kB that gzip made of 200 MB are refused, and never in memory whole."""

    def peak_bytes() -> int:
        status = Path(f"/proc/{small.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    bytes_before = peak_bytes()
    with (
        grpc.insecure_channel(f"127.0.0.1:{small.grpc}", options=[("grpc.max_send_message_length", -1)]) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(INFER)(bytes(200_000_000), compression=grpc.Compression.Gzip, timeout=60)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_bytes() - bytes_before < 130_000_000
