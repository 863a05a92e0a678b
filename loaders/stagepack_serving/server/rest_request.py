"""Bodies of inference requests and answers over HTTP: JSON, then the binary tensors. Requests are bounded in size, and may be compressed.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import asyncio
import functools
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from stagepack.format.rules import JSON_ERRORS
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.access_log import weight_fields
from stagepack_serving.server.errors import RequestError, RequestStatus, json_refusal
from stagepack_serving.server.limits import MAX_TEXT_BYTES
from stagepack_serving.server.parameters import (
    InferenceRequest,
    InferenceTensor,
    boolean_parameter,
    check_request_id,
    check_requested_outputs,
    refuse_shared_memory,
)
from stagepack_serving.server.rest_large_request import beside_loop, check_json_counts, split_large_json
from stagepack_serving.server.tensor_decoding import (
    array_from_json,
    json_from_array,
    tensor_from_bytes,
    tensor_from_numbers,
)

# The HTTP header with the length of the JSON part, in bytes.
BINARY_HEADER: Final = "inference-header-content-length"
# Beyond it, the numbers are cut out of the JSON part first; and so it is with NaN and infinities, which msgspec refuses.
_LARGE_BYTES: Final = 131_072
_LENGTH_PATTERN: Final = re.compile("[0-9]{1,18}")
_NON_FINITE_PATTERN: Final = re.compile(rb"NaN|Infinity")
# An option of zlib: accept the headers of gzip and of zlib.
_DETECT_HEADER: Final = 32
# Zlib writes up to so many bytes for one that it reads.
_COMPRESSION: Final = 1032
# Far more than a request that is no inference needs.
_MAX_FIELDS_BYTES: Final = 65_536
_MAX_CONTAINERS: Final = 100_000
Fields = TypeVar("Fields")
Result = TypeVar("Result")


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
    """The JSON part of a request. Unknown fields, such as fields of other extensions, are ignored."""

    inputs: list[InputHeader]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[OutputHeader] | None = None


def decode_rest_request(body: bytearray, header_length: str | None) -> tuple[RequestHeader, InferenceRequest]:
    """Decode the body of a request, whose header `BINARY_HEADER` has the length of the JSON part; None if the whole body is JSON.

    A large one is decoded in steps of a few milliseconds, between which other threads run.
    """
    json_part, binary_part = _split_body(memoryview(body), header_length)
    if len(json_part) > _LARGE_BYTES or _NON_FINITE_PATTERN.search(json_part):
        header_json, input_numbers = split_large_json(json_part)
        header = _decode_header(header_json)
    else:
        header = _decode_header(json_part)
        input_numbers = [None if field.data is UNSET else bytes(field.data) for field in header.inputs]
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
    header: InputHeader, numbers: bytes | None, binary_part: memoryview
) -> tuple[InferenceTensor, memoryview]:
    """Decode an input from the JSON part, or from the start of the binary part. Return the tensor and the rest of the binary part."""
    refuse_shared_memory(header.name, header.parameters)
    binary_bytes = header.parameters.get("binary_data_size")
    if binary_bytes is None:
        if numbers is None:
            raise RequestError(
                RequestStatus.BAD_REQUEST, f"{header.name}: expected data, or the parameter binary_data_size"
            )
        read_array = functools.partial(array_from_json, numbers, shape=header.shape)
        return tensor_from_numbers(header.name, header.datatype, header.shape, read_array), binary_part
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


def _decode_header(json_part: bytes | memoryview) -> RequestHeader:
    try:
        str(json_part, "utf-8")  # msgspec passes over keys that it does not know
        return msgspec.json.decode(json_part, type=RequestHeader)
    except JSON_ERRORS as error:
        raise json_refusal(json_part, error) from None


def decompress_body(body: bytearray, encoding: str, max_bytes: int) -> bytearray:
    """Decompress the body of a request. No more than the largest size of the result is ever decompressed."""
    if encoding not in ("gzip", "deflate"):
        message = f"content-encoding: expected gzip or deflate, found {encoding[:80]!r}"
        raise RequestError(RequestStatus.BAD_REQUEST, message)
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | _DETECT_HEADER)
    try:
        content = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        message = f"content-encoding: the body is not valid {encoding}: {error}"
        raise RequestError(RequestStatus.BAD_REQUEST, message) from None
    if len(content) > max_bytes:
        message = f"expected a request of at most {max_bytes} bytes, found more after decompression"
        raise RequestError(RequestStatus.TOO_LARGE, message)
    if not decompressor.eof or decompressor.unused_data:
        message = f"content-encoding: expected one complete {encoding} stream, found a truncated one or data after it"
        raise RequestError(RequestStatus.BAD_REQUEST, message)
    return bytearray(content)


def requested_model(request: Request) -> tuple[str, str]:
    """Return the model that the path of a request names."""
    return request.path_params["model"], request.path_params.get("version", "")


async def unless_disconnected(answer: Awaitable[Result], receive: Receive) -> Result:
    """Wait for an answer; cancel it if the client closes its connection, as nobody waits for it any more."""
    answer_task = asyncio.ensure_future(answer)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({answer_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if answer_task.done():
            return answer_task.result()
        raise RequestError(RequestStatus.HUNG_UP, "the client closed the connection")
    finally:
        for task in (answer_task, disconnect_task):
            task.cancel()
        # Not each by itself: the deadline cancels this function too, and must not be taken for the end of a task.
        await asyncio.gather(answer_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header_value(request: Request, header_name: str) -> str | None:
    """The value of a header, or the values of a repeated one as RFC 9110, section 5.3, joins them; None for none."""
    values = request.headers.getlist(header_name)
    return ", ".join(values) if values else None


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """Read and decompress the body of a request."""
    body = bytearray()
    body_bytes = int(request.headers.get("content-length", 0))
    try:
        if body_bytes <= max_bytes:
            async for chunk in request.stream():
                body += chunk
                if (body_bytes := len(body)) > max_bytes:
                    break
    except ClientDisconnect:
        raise RequestError(
            RequestStatus.HUNG_UP, "the client closed the connection before the end of the request"
        ) from None
    if body_bytes > max_bytes:
        raise RequestError(
            RequestStatus.TOO_LARGE, f"expected a request of at most {max_bytes} bytes, found {body_bytes} or more"
        )
    encoding = (header_value(request, "content-encoding") or "identity").lower()
    if encoding == "identity":
        return body
    # A few bytes may become many.
    return await beside_loop(_COMPRESSION * len(body), decompress_body, body, encoding, max_bytes)


async def decode_text_request(request: Request, max_bytes: int, decode: Callable[[bytearray], Fields]) -> Fields:
    """Read a request for a text, whose prompt may be large, and decode it beside the event loop."""

    def check_and_decode(body: bytearray) -> Fields:
        check_json_counts(body, _MAX_CONTAINERS, brackets=b"[{")
        return decode(body)

    body = await read_body(request, min(max_bytes, MAX_TEXT_BYTES))
    return await beside_loop(len(body), check_and_decode, body)


async def read_fields(request: Request, fields_type: type[Fields]) -> Fields:
    """Read a body of JSON that is no inference; an empty one is an object without fields."""
    body = await read_body(request, _MAX_FIELDS_BYTES)
    try:
        return msgspec.json.decode(body or b"{}", type=fields_type)
    except JSON_ERRORS as error:
        raise json_refusal(body, error) from None


def check_output_parameters(header: RequestHeader, interface: Interface) -> None:
    """Check, before the model runs, that the outputs can be sent in the form that the request asks for."""
    parameters = _output_parameters(header)
    check_requested_outputs([(output.name, output.parameters) for output in header.outputs or ()])
    for output_name, tensor in interface.outputs.items():
        is_binary = _is_binary(header, output_name)
        is_requested = not parameters or output_name in parameters
        if tensor.datatype == "BF16" and is_requested and not is_binary:
            message = f"{output_name}: BF16 is sent as binary data: set the parameter binary_data"
            raise RequestError(RequestStatus.BAD_REQUEST, message)


def encode_rest_response(
    model_name: str, version: str, header: RequestHeader, outputs: Sequence[InferenceTensor]
) -> tuple[bytes, list[memoryview]]:
    """Encode an answer in the form that the request asks for, in steps of a few milliseconds, between which other threads run."""
    head: dict[str, Any] = {"model_name": model_name, "model_version": version}
    if header.id:
        head["id"] = header.id
    if weights := weight_fields():
        head["parameters"] = weights
    parts = [msgspec.json.encode(head)[:-1], b',"outputs":[']
    binary_parts = []
    for position, tensor in enumerate(outputs):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.array.shape)}
        if position:
            parts.append(b",")
        if _is_binary(header, tensor.name):
            array = numpy.ascontiguousarray(tensor.array)
            entry["parameters"] = {"binary_data_size": array.nbytes}
            binary_parts.append(array.reshape(-1).view(numpy.uint8).data)
            parts.append(msgspec.json.encode(entry))
        else:
            parts += [msgspec.json.encode(entry)[:-1], b',"data":', *json_from_array(tensor.array), b"}"]
    return b"".join([*parts, b"]}"]), binary_parts


def json_bytes(header: RequestHeader, outputs: Sequence[InferenceTensor]) -> int:
    """Return how many bytes of elements `encode_rest_response` will write as JSON."""
    return sum(tensor.array.nbytes for tensor in outputs if not _is_binary(header, tensor.name))


def _output_parameters(header: RequestHeader) -> dict[str, dict[str, Any]]:
    """The parameters of each requested output by name; empty if the request names no outputs."""
    return {output.name: output.parameters for output in header.outputs or ()}


def _is_binary(header: RequestHeader, output_name: str) -> bool:
    default = boolean_parameter(header.parameters, "binary_data_output")
    return boolean_parameter(_output_parameters(header).get(output_name, {}), "binary_data", default)
