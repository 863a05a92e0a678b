"""Inference requests and answers as messages of gRPC."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
from tritonclient.grpc import service_pb2 as pb

from stagepack_loaders.elements import Array
from stagepack_serving.server.beside_loop import with_pauses
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.grpc_message_fields import separate_raw_contents
from stagepack_serving.server.messages import InferenceRequest, InferenceTensor
from stagepack_serving.server.parameters import check_requested_outputs, refuse_shared_memory
from stagepack_serving.server.tensor_decoding import tensor_from_bytes, tensor_from_reader

# Elements that are decoded at a time.
_PIECE_ELEMENTS: Final = 16_384
_RAW_CONTENTS: Final = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_INFER_RESPONSE: Final = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_BYTES: Final = 2  # the wire type of bytes and messages
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
        contents += [_field_start(_RAW_CONTENTS, elements.nbytes), elements]
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
    for number in (field_number << 3 | _BYTES, byte_count):
        while number > 0x7F:
            start.append(number & 0x7F | 0x80)
            number >>= 7
        start.append(number)
    return bytes(start)


def _parameter_value(parameter: Any) -> Any:
    field_name = parameter.WhichOneof("parameter_choice")
    return None if field_name is None else getattr(parameter, field_name)
