"""Inference requests and answers as messages of gRPC.

- The fields of a message of gRPC, read before it is parsed, when a few bytes may become a hundred bytes of objects. Source:
  https://protobuf.dev/programming-guides/encoding/. A request of 64 MB with empty inputs alone took 2.8 GB and 2.6 s to parse.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.parameters import (
    InferenceRequest,
    InferenceTensor,
    check_requested_outputs,
    refuse_shared_memory,
)
from stagepack_serving.server.rest_large_request import with_pauses
from stagepack_serving.server.tensor_decoding import tensor_from_bytes, tensor_from_reader

_MAX_FIELDS: Final = 20_000
# Beside the data of tensors.
_MAX_OTHER_BYTES: Final = 1_000_000
# The parser copies less in less time than it takes to look for what it would copy.
_FEW_BYTES: Final = 65_536
_FEW_FIELDS: Final = 256
# What the parser takes.
_MOST_TAG_BYTES: Final = 5
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_MODEL_NAME: Final = pb.ModelInferRequest.MODEL_NAME_FIELD_NUMBER
_MODEL_VERSION: Final = pb.ModelInferRequest.MODEL_VERSION_FIELD_NUMBER
_INPUT_NAME: Final = pb.ModelInferRequest.InferInputTensor.NAME_FIELD_NUMBER
_RAW_INPUTS: Final = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_INPUTS: Final = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_CONTENTS: Final = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
# Elements that are decoded at a time.
_PIECE_ELEMENTS: Final = 16_384
_RAW_OUTPUTS: Final = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_INFER_RESPONSE: Final = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
# Datatype -> the field of InferTensorContents that holds its elements.
_CONTENT_FIELDS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def check_message_size(content: bytes, *, is_inference: bool) -> None:
    """Refuse a message of so many parts that its parser would take much more memory than the message."""
    if len(content) <= _MAX_OTHER_BYTES:
        return
    other_bytes = len(content)
    for field_count, data_bytes in enumerate(_data_bytes(content) if is_inference else (), start=1):
        other_bytes -= data_bytes
        if field_count > _MAX_FIELDS:
            raise RequestError(RequestStatus.BAD_REQUEST, f"expected at most {_MAX_FIELDS} fields, found more")
    if other_bytes > _MAX_OTHER_BYTES:
        message = f"expected at most {_MAX_OTHER_BYTES} bytes beside the data of tensors, found {other_bytes}"
        raise RequestError(RequestStatus.BAD_REQUEST, message)


def separate_raw_contents(content: bytes) -> tuple[bytes, list[memoryview]]:
    """Take the data of tensors out of a large request, so that its parser does not copy them twice.

    The result is the request without its raw contents, and these, on the memory of the request. The request as it is, and none, if it is
        small, has none, has so many fields that the parser is faster, or is no message but perhaps for the parser.
    """
    raw_contents: list[memoryview] = []
    if len(content) <= _FEW_BYTES:
        return content, raw_contents
    view = memoryview(content)
    other_fields: list[memoryview] = []
    field_start = 0
    try:
        for position, (field_number, start, end) in enumerate(_fields(content, 0, len(content))):
            if position >= _FEW_FIELDS:
                return content, []
            if field_number == _RAW_INPUTS:
                raw_contents.append(view[start:end])
            else:
                other_fields.append(view[field_start:end])
            field_start = end
    except DecodeError:
        return content, []
    return (b"".join(other_fields), raw_contents) if raw_contents else (content, raw_contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutline:
    """What a request says of itself, before it is parsed.

    Attributes:
        model_name: the model that it names.
        version: the version that it names; may be empty.
        input_names: the names of its inputs.
    """

    model_name: str
    version: str
    input_names: frozenset[str]


def outline_request(content: bytes) -> RequestOutline:
    """Read the names in a request, and not its tensors. The last one of a field holds, as for the parser."""
    names, input_names = {_MODEL_NAME: "", _MODEL_VERSION: ""}, set()
    for field_number, start, end in _fields(content, 0, len(content)):
        if field_number in names:
            names[field_number] = _text(content, start, end)
        elif field_number == _INPUTS:
            input_name = ""
            for input_field_number, input_start, input_end in _fields(content, start, end):
                if input_field_number == _INPUT_NAME:
                    input_name = _text(content, input_start, input_end)
            input_names.add(input_name)
    return RequestOutline(
        model_name=names[_MODEL_NAME], version=names[_MODEL_VERSION], input_names=frozenset(input_names)
    )


def _text(content: bytes, start: int, end: int) -> str:
    # The parser refuses what is not UTF-8.
    return content[start:end].decode(errors="replace")


def _data_bytes(content: bytes) -> Iterator[int]:
    """For each field of a request, of its inputs and of their contents, the bytes of data of tensors in it, but for those in its fields."""
    for field_number, start, end in _fields(content, 0, len(content)):
        yield end - start if field_number == _RAW_INPUTS else 0
        if field_number == _INPUTS:
            for input_field_number, input_start, input_end in _fields(content, start, end):
                yield 0
                if input_field_number == _CONTENTS:
                    for _, contents_start, contents_end in _fields(content, input_start, input_end):
                        yield contents_end - contents_start


def _fields(content: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number, the start and the end of each field of a message, half-open; 0 for what is neither a text, bytes nor a message."""
    while position < end:
        start = position
        tag, position = _read_varint(content, position, end)
        if position - start > _MOST_TAG_BYTES:
            raise DecodeError("the number of a field is too long")
        wire_type = tag & 7
        start = position
        if wire_type == _VARINT:
            _, position = _read_varint(content, position, end)
        elif wire_type == _DELIMITED:
            byte_count, start = _read_varint(content, position, end)
            position = start + byte_count
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:
            raise DecodeError(f"unexpected wire type {wire_type}")
        if position > end:
            raise DecodeError("a field is longer than its message")
        yield tag >> 3 if wire_type == _DELIMITED else 0, start, position


def _read_varint(content: bytes, position: int, end: int) -> tuple[int, int]:
    """A number of up to 64 bits, and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise DecodeError("a number is cut short or too long")


@dataclass(frozen=True, slots=True)
class ParsedInference:
    """A request that is parsed, but not decoded.

    Attributes:
        message: the ``ModelInferRequest``; its raw contents may be missing.
        raw_contents: its raw contents.
    """

    message: Any
    raw_contents: Sequence[bytes | memoryview]

    def input_contents(self) -> Iterator[tuple[Any, bytes | memoryview | None]]:
        """Pair the inputs with their raw contents.

        The result is each ``InferInputTensor``, and its elements, little-endian; None if the message has them.
        """
        inputs = self.message.inputs
        if not self.raw_contents:
            return zip(inputs, itertools.repeat(None), strict=False)
        if len(self.raw_contents) != len(inputs):
            raise RequestError(
                RequestStatus.BAD_REQUEST,
                f"expected raw contents for all {len(inputs)} inputs or none, found {len(self.raw_contents)}",
            )
        return zip(inputs, self.raw_contents, strict=True)


def parse_inference(content: bytes) -> ParsedInference:
    """Parse a request.

    content: the bytes of a ``ModelInferRequest``.
    """
    other_content, raw_contents = separate_raw_contents(content)
    message = pb.ModelInferRequest.FromString(other_content)
    return ParsedInference(message, raw_contents or message.raw_input_contents)


def decode_request(request: ParsedInference) -> InferenceRequest:
    """Decode a request."""
    message = request.message
    check_requested_outputs([(output.name, decode_parameters(output.parameters)) for output in message.outputs])
    inputs = [decode_input(input_message, raw_content) for input_message, raw_content in request.input_contents()]
    output_names = [output.name for output in message.outputs]
    parameters = decode_parameters(message.parameters)
    return InferenceRequest(inputs=inputs, output_names=output_names or None, parameters=parameters)


def encode_response(model_name: str, version: str, request_id: str, outputs: Sequence[InferenceTensor]) -> bytes:
    """Encode an answer. Its tensors are copied once; protobuf would copy them five times.

    request_id: the id of the request; may be empty.
    """
    response = pb.ModelInferResponse(model_name=model_name, model_version=version, id=request_id)
    contents: list[Any] = []  # bytes and arrays, which are buffers
    for tensor in outputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        elements = numpy.ascontiguousarray(tensor.array).reshape(-1).view(numpy.uint8)
        contents += [_field_start(_RAW_OUTPUTS, elements.nbytes), elements]
    return b"".join([response.SerializeToString(), *contents])


def encode_stream_response(response: bytes) -> bytes:
    """Encode an answer in a stream."""
    return _field_start(_INFER_RESPONSE, len(response)) + response


def decode_parameters(parameters: Any) -> dict[str, Any]:
    """Decode the parameters of a request."""
    return {parameter_name: _parameter_value(value) for parameter_name, value in parameters.items()}


def decode_input(message: Any, raw_content: bytes | memoryview | None) -> InferenceTensor:
    """Decode an input.

    raw_content: its elements, little-endian; None if the message has them.
    """
    refuse_shared_memory(message.name, message.parameters)
    if raw_content is not None:
        if message.HasField("contents"):
            raise RequestError(RequestStatus.BAD_REQUEST, f"{message.name}: expected raw or typed contents, found both")
        return tensor_from_bytes(message.name, message.datatype, message.shape, raw_content)
    field_name = _CONTENT_FIELDS.get(message.datatype)
    if field_name is None:
        raise RequestError(
            RequestStatus.BAD_REQUEST, f"{message.name}: expected raw contents for the datatype {message.datatype!r}"
        )
    numbers = getattr(message.contents, field_name)

    def read_array(dtype: numpy.dtype[Any]) -> Array:
        starts = range(0, len(numbers), _PIECE_ELEMENTS)
        pieces = [numpy.array(numbers[start : start + _PIECE_ELEMENTS], dtype) for start in with_pauses(starts)]
        return numpy.concatenate([numpy.empty(0, dtype), *pieces])

    return tensor_from_reader(message.name, message.datatype, message.shape, read_array)


def typed_bytes(message: Any) -> int:
    """Return the least size of the numbers in the typed contents of a request."""
    return sum(
        len(getattr(tensor.contents, field_name))
        for tensor in message.inputs
        if tensor.HasField("contents") and (field_name := _CONTENT_FIELDS.get(tensor.datatype))
    )


def _field_start(field_number: int, byte_count: int) -> bytes:
    """What is before the bytes of a field. Source: https://protobuf.dev/programming-guides/encoding/."""
    start = bytearray()
    for number in (field_number << 3 | _DELIMITED, byte_count):
        while number > 0x7F:
            start.append(number & 0x7F | 0x80)
            number >>= 7
        start.append(number)
    return bytes(start)


def _parameter_value(parameter: Any) -> Any:
    field_name = parameter.WhichOneof("parameter_choice")
    return None if field_name is None else getattr(parameter, field_name)
