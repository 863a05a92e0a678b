"""Bodies of inference requests over HTTP: JSON, then the binary tensors.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from stagepack.format.codec import JSON_ERRORS
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.json_numbers import array_from_json
from stagepack_serving.server.messages import InferenceRequest, InferenceTensor
from stagepack_serving.server.parameters import check_request_id, refuse_shared_memory
from stagepack_serving.server.rest_large_request import split_large_json
from stagepack_serving.server.tensor_decoding import (
    NumberDecoder,
    tensor_from_bytes,
    tensor_from_numbers,
    tensor_from_reader,
)

# The HTTP header with the length of the JSON part, in bytes.
BINARY_HEADER: Final = "inference-header-content-length"

# Beyond it, the JSON part is decoded in steps; and so it is with NaN and infinities, which msgspec refuses.
_LARGE_BYTES: Final = 131_072
_LENGTH_PATTERN: Final = re.compile("[0-9]{1,18}")
_NON_FINITE_PATTERN: Final = re.compile(rb"NaN|Infinity")


class InputHeader(Struct, kw_only=True):
    """An input in the JSON part."""

    name: str
    shape: list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Raw | UnsetType = UNSET


class OutputHeader(Struct, kw_only=True):
    """A requested output in the JSON part."""

    name: str
    parameters: dict[str, Any] = {}


class RequestHeader(Struct, kw_only=True):
    """The JSON part of a request. Unknown fields, such as those of other extensions, are ignored."""

    inputs: list[InputHeader]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[OutputHeader] | None = None


def decode_request(body: bytearray, header_length: str | None) -> tuple[RequestHeader, InferenceRequest]:
    """Decode the body of a request. A large one is decoded in steps of a few milliseconds, between which other threads run.

    header_length: the HTTP header `BINARY_HEADER`, the length of the JSON part in bytes; None if the whole body is JSON.
    """
    json_part, binary_part = _split_body(memoryview(body), header_length)
    input_numbers: Sequence[NumberDecoder | bytes | None]
    if len(json_part) > _LARGE_BYTES or _NON_FINITE_PATTERN.search(json_part):
        header_json, input_numbers = split_large_json(json_part)
        header = _decode_header(memoryview(header_json))
    else:
        header = _decode_header(json_part)
        input_numbers = [_number_decoder(input_header.data) for input_header in header.inputs]
    check_request_id(header.id)
    inputs = []
    for input_header, numbers in zip(header.inputs, input_numbers, strict=True):
        tensor, binary_part = _decode_input(input_header, numbers, binary_part)
        inputs.append(tensor)
    if len(binary_part):
        raise RequestError(
            RequestStatus.BAD_REQUEST, f"expected no data after the last tensor, found {len(binary_part)} bytes"
        )
    output_names = [output.name for output in header.outputs or ()]
    return header, InferenceRequest(inputs=inputs, output_names=output_names or None, parameters=header.parameters)


def _split_body(content: memoryview, header_length: str | None) -> tuple[memoryview, memoryview]:
    """The JSON part and the binary part of a body."""
    if header_length is None:
        json_bytes = len(content)
    elif _LENGTH_PATTERN.fullmatch(header_length) and int(header_length) <= len(content):
        json_bytes = int(header_length)
    else:
        message = f"expected the length of the JSON part, 0 to {len(content)} bytes, found {header_length[:80]!r}"
        raise RequestError(RequestStatus.BAD_REQUEST, f"{BINARY_HEADER}: {message}")
    return content[:json_bytes], content[json_bytes:]


def _decode_input(
    header: InputHeader, numbers: NumberDecoder | bytes | None, binary_part: memoryview
) -> tuple[InferenceTensor, memoryview]:
    """Decode an input from the JSON part, or from the start of the binary part. Return the tensor and the rest of the binary part."""
    refuse_shared_memory(header.name, header.parameters)
    binary_bytes = header.parameters.get("binary_data_size")
    if binary_bytes is None:
        if numbers is None:
            raise RequestError(
                RequestStatus.BAD_REQUEST, f"{header.name}: expected data, or the parameter binary_data_size"
            )
        if isinstance(numbers, bytes):
            read_array = functools.partial(array_from_json, numbers, shape=header.shape)
            return tensor_from_reader(header.name, header.datatype, header.shape, read_array), binary_part
        return tensor_from_numbers(header.name, header.datatype, header.shape, numbers), binary_part
    if numbers is not None:
        message = f"{header.name}: expected data or the parameter binary_data_size, found both"
        raise RequestError(RequestStatus.BAD_REQUEST, message)
    if type(binary_bytes) is not int or not 0 <= binary_bytes <= len(binary_part):
        message = (
            f"the parameter binary_data_size: expected 0 to {len(binary_part)} bytes of data, found {binary_bytes!r}"
        )
        raise RequestError(RequestStatus.BAD_REQUEST, f"{header.name}: {message}")
    content = binary_part[:binary_bytes]
    return tensor_from_bytes(header.name, header.datatype, header.shape, content), binary_part[binary_bytes:]


def _decode_header(json_part: memoryview) -> RequestHeader:
    try:
        str(json_part, "utf-8")  # msgspec passes over keys that it does not know
        return msgspec.json.decode(json_part, type=RequestHeader)
    except msgspec.ValidationError as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the request violates the protocol: {error}") from None
    except JSON_ERRORS as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the request is not valid JSON: {error}") from None


def _number_decoder(data: Raw | UnsetType) -> NumberDecoder | None:
    return None if isinstance(data, UnsetType) else functools.partial(_decode_numbers, data)


def _decode_numbers(data: Raw, number_type: Any) -> Any:
    return msgspec.json.decode(data, type=number_type)
