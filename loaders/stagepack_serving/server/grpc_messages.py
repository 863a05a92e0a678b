"""Inference requests and answers as messages of gRPC."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from stagepack_loaders.elements import Array
from stagepack_serving.server.access_log import weight_fields
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.parameters import (
    InferenceRequest,
    InferenceTensor,
    check_requested_outputs,
    refuse_shared_memory,
)
from stagepack_serving.server.rest_large_request import with_pauses
from stagepack_serving.server.tensor_decoding import tensor_from_bytes, tensor_from_numbers

# What is parsed of a request, as in gRPC's own default. The parser holds the interpreter for 10 ms per megabyte.
MAX_PARSED_BYTES: Final = 4_194_304
# The parser makes 44 bytes of objects of one byte of empty inputs: a request of 64 MB took 2.8 GB and 2.6 s. A message without tensors has
# at most so many bytes, and a larger request few fields: numbers, which become 16 times as large, are then all that grows.
MAX_OTHER_BYTES: Final = 1_000_000
MAX_FIELDS: Final = 20_000
# The parser copies less in less time than it takes to look for what it would copy.
_FEW_BYTES: Final = 65_536
_FEW_FIELDS: Final = 4096
# What the parser takes.
_MOST_TAG_BYTES: Final = 5
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
# Serializers write fields in the order of their numbers, these first.
_MODEL_FIELDS: Final = (
    pb.ModelInferRequest.MODEL_NAME_FIELD_NUMBER,
    pb.ModelInferRequest.MODEL_VERSION_FIELD_NUMBER,
)
_RAW_INPUTS: Final = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
# The messages in a request with many fields, and in those.
_PARTS: Final[Sequence[Sequence[int]]] = (
    (pb.ModelInferRequest.INPUTS_FIELD_NUMBER, pb.ModelInferRequest.OUTPUTS_FIELD_NUMBER),
    (pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER,),
    (),
)
# Protobuf parses messages of less than 2 GiB, in which an answer has less than 1 MB beside its tensors.
MAX_ANSWER_BYTES: Final = 2**31 - 1_000_000
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


@dataclass(frozen=True, slots=True)
class ParsedInference:
    """A request that is parsed, but not decoded.

    Attributes:
        message: the ``ModelInferRequest``; its raw contents may be missing.
        raw_contents: its raw contents.
        byte_count: the size of the request in bytes.
    """

    message: Any
    raw_contents: Sequence[bytes | memoryview]
    byte_count: int

    def input_contents(self) -> Iterator[tuple[Any, bytes | memoryview | None]]:
        """Pair each ``InferInputTensor`` with its raw contents, which are little-endian; None if the message has its elements."""
        inputs = self.message.inputs
        if not self.raw_contents:
            return zip(inputs, itertools.repeat(None), strict=False)
        if len(self.raw_contents) != len(inputs):
            raise BadRequestError(
                f"expected raw contents for all {len(inputs)} inputs or none, found {len(self.raw_contents)}"
            )
        return zip(inputs, self.raw_contents, strict=True)


def parse_inference(content: bytes) -> ParsedInference:
    """Parse the bytes of a ``ModelInferRequest``."""
    other_content, raw_contents = separate_raw_contents(content)
    if len(other_content) > MAX_PARSED_BYTES:
        expected = f"expected at most {MAX_PARSED_BYTES} bytes beside the raw contents of tensors"
        advice = "send tensors as raw_input_contents"
        raise RequestError(RequestStatus.TOO_LARGE, f"{expected}, found {len(other_content)}: {advice}")
    if len(other_content) > MAX_OTHER_BYTES:
        fields = _fields_of_parts(other_content, 0, len(other_content))
        if any(True for _ in itertools.islice(fields, MAX_FIELDS, None)):
            raise BadRequestError(f"expected at most {MAX_FIELDS} fields, found more")
    message = pb.ModelInferRequest.FromString(other_content)
    return ParsedInference(message, raw_contents or message.raw_input_contents, len(content))


def named_model(content: bytes) -> tuple[str, str]:
    """Return the name and the version of the model that the first fields of a ``ModelInferRequest`` name; empty for none."""
    names = dict.fromkeys(_MODEL_FIELDS, "")
    with contextlib.suppress(DecodeError, UnicodeDecodeError):
        for field_number, start, end in itertools.islice(_fields(content, 0, len(content)), len(names)):
            if field_number in names:
                names[field_number] = content[start:end].decode()
    name, version = names.values()
    return name, version


def parse_message(parser: Callable[[bytes], Any], content: bytes) -> Any:
    """Parse a message without tensors, unless it is so large that its parser could take much memory and time."""
    if len(content) > MAX_OTHER_BYTES:
        message = f"expected a message of at most {MAX_OTHER_BYTES} bytes, found {len(content)}"
        raise RequestError(RequestStatus.TOO_LARGE, message)
    return parser(content)


def separate_raw_contents(content: bytes) -> tuple[bytes, list[memoryview]]:
    """Take the data of tensors out of a large request, so that its parser does not copy them twice.

    The result is the request without its raw contents, and these, on the memory of the request. The request as it is, and none, if it is
    small, has none, has very many fields, or is no message but perhaps for the parser.
    """
    raw_contents: list[memoryview] = []
    if len(content) <= _FEW_BYTES:
        return content, raw_contents
    view = memoryview(content)
    other_fields: list[memoryview] = []
    field_start = 0
    most_fields = _FEW_FIELDS if len(content) <= MAX_OTHER_BYTES else MAX_FIELDS
    try:
        for position, (field_number, start, end) in enumerate(_fields(content, 0, len(content))):
            if position >= most_fields:
                return content, []
            if field_number == _RAW_INPUTS:
                raw_contents.append(view[start:end])
            else:
                other_fields.append(view[field_start:end])
            field_start = end
    except DecodeError:
        return content, []
    return (b"".join(other_fields), raw_contents) if raw_contents else (content, raw_contents)


def _fields_of_parts(content: bytes, position: int, end: int, depth: int = 0) -> Iterator[None]:
    """Count the fields of a request, of its inputs and outputs, and of the contents of inputs."""
    for field_number, start, field_end in _fields(content, position, end):
        yield
        if field_number in _PARTS[depth]:
            yield from _fields_of_parts(content, start, field_end, depth + 1)


def _fields(content: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number, the start and the end of each field of a message, half-open; 0 for what is neither a text, bytes nor a message.

    Source: https://protobuf.dev/programming-guides/encoding/.
    """
    while position < end:
        start = position
        tag, position = _read_varint(content, position)
        if position - start > _MOST_TAG_BYTES:
            raise DecodeError("the number of a field is too long")
        wire_type = tag & 7
        start = position
        if wire_type == _VARINT:
            _, position = _read_varint(content, position)
        elif wire_type == _DELIMITED:
            byte_count, start = _read_varint(content, position)
            position = start + byte_count
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:
            raise DecodeError(f"unexpected wire type {wire_type}")
        if position > end:
            raise DecodeError("a field is longer than its message")
        yield tag >> 3 if wire_type == _DELIMITED else 0, start, position


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    """A number of up to 64 bits, and the position after it."""
    number = 0
    for shift, byte in zip(range(0, 70, 7), content[position : position + 10], strict=False):
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + shift // 7 + 1
    raise DecodeError("a number is cut short or too long")


def decode_grpc_request(request: ParsedInference) -> InferenceRequest:
    """Decode a request."""
    message = request.message
    check_requested_outputs([(output.name, decode_parameters(output.parameters)) for output in message.outputs])
    inputs = [decode_input(input_message, raw_content) for input_message, raw_content in request.input_contents()]
    output_names = [output.name for output in message.outputs]
    parameters = decode_parameters(message.parameters)
    return InferenceRequest(
        inputs=inputs, output_names=output_names or None, parameters=parameters, max_answer_bytes=MAX_ANSWER_BYTES
    )


def encode_grpc_response(model_name: str, version: str, request_id: str, outputs: Sequence[InferenceTensor]) -> bytes:
    """Encode an answer. Its tensors are copied once; protobuf would copy them five times."""
    response = pb.ModelInferResponse(model_name=model_name, model_version=version, id=request_id)
    add_weight_parameter(response)
    contents: list[Any] = []  # bytes and arrays, which are buffers
    for tensor in outputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        elements = numpy.ascontiguousarray(tensor.array).reshape(-1).view(numpy.uint8)
        contents += [_field_start(_RAW_OUTPUTS, elements.nbytes), elements]
    return b"".join([response.SerializeToString(), *contents])


def add_weight_parameter(response: Any) -> None:
    """Name the version of the weights of the request that a task works on."""
    for parameter_name, value in weight_fields().items():
        response.parameters[parameter_name].string_param = value


def encode_stream_response(response: bytes) -> bytes:
    """Encode an answer in a stream."""
    return _field_start(_INFER_RESPONSE, len(response)) + response


def decode_parameters(parameters: Any) -> dict[str, Any]:
    """Decode the parameters of a request."""
    return {parameter_name: parameter_value(value) for parameter_name, value in parameters.items()}


def decode_input(message: Any, raw_content: bytes | memoryview | None) -> InferenceTensor:
    """Decode an input from its raw contents, or from its message for None."""
    refuse_shared_memory(message.name, message.parameters)
    if raw_content is not None:
        if message.HasField("contents"):
            raise BadRequestError(f"{message.name}: expected raw or typed contents, found both")
        return tensor_from_bytes(message.name, message.datatype, message.shape, raw_content)
    field_name = _CONTENT_FIELDS.get(message.datatype)
    if field_name is None:
        raise BadRequestError(f"{message.name}: expected raw contents for the datatype {message.datatype!r}")
    numbers = getattr(message.contents, field_name)

    def read_array(dtype: numpy.dtype[Any]) -> Array:
        starts = range(0, len(numbers), _PIECE_ELEMENTS)
        pieces = [numpy.array(numbers[start : start + _PIECE_ELEMENTS], dtype) for start in with_pauses(starts)]
        return numpy.concatenate([numpy.empty(0, dtype), *pieces])

    return tensor_from_numbers(message.name, message.datatype, message.shape, read_array)


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


def parameter_value(parameter: Any) -> Any:
    """Return the value of a parameter or a setting; None for one without a value."""
    field_name = parameter.WhichOneof("parameter_choice")
    return None if field_name is None else getattr(parameter, field_name)
