"""Bodies of inference requests and answers: JSON, and after it the tensors that travel as bytes.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import functools
import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.errors import Reason, RequestError
from stagepack_serving.server.messages import Request, Tensor, check_memory, flag, from_bytes, from_numbers

BINARY_HEADER: Final = "inference-header-content-length"

# Gives the data of an input as a type of lists that it is asked for.
Numbers = Callable[..., Any]

_LENGTH: Final = re.compile("[0-9]{1,18}")
_SPECIAL: Final = re.compile(rb"NaN|Infinity")


class InputBody(Struct, kw_only=True):
    """An input in the JSON part."""

    name: str
    shape: list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Raw | UnsetType = UNSET


class OutputBody(Struct, kw_only=True):
    """An output that is asked for."""

    name: str
    parameters: dict[str, Any] = {}


class RequestBody(Struct, kw_only=True):
    """The JSON part of a request. Fields of extensions that are not known here are left alone."""

    inputs: list[InputBody]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[OutputBody] | None = None


def read_request(body: bytearray, header_length: str | None) -> tuple[RequestBody, Request]:
    """A request; `header_length` is the length of its JSON part in bytes, if tensors follow.

    Raises:
        RequestError: it breaks the protocol.
    """
    content = memoryview(body)
    if header_length is None:
        header, rest = content, content[len(content) :]
    elif _LENGTH.fullmatch(header_length) and int(header_length) <= len(content):
        header, rest = content[: int(header_length)], content[int(header_length) :]
    else:
        message = (
            f"{BINARY_HEADER}: expected the bytes of the JSON part, 0 to {len(content)}, found {header_length[:80]!r}"
        )
        raise RequestError(Reason.BAD_REQUEST, message)
    fields, data = _decode(header)
    inputs = []
    for given, numbers in zip(fields.inputs, data, strict=True):
        check_memory(given.name, given.parameters)
        size = given.parameters.get("binary_data_size")
        if size is None:
            if numbers is None:
                raise RequestError(
                    Reason.BAD_REQUEST, f"{given.name}: expected data, or the parameter binary_data_size"
                )
            inputs.append(from_numbers(given.name, given.datatype, given.shape, numbers))
        elif numbers is not None or type(size) is not int or not 0 <= size <= len(rest):
            found = "data too" if numbers is not None else f"{size!r}, and {len(rest)} bytes are left"
            raise RequestError(
                Reason.BAD_REQUEST, f"{given.name}: expected the binary data of binary_data_size bytes, found {found}"
            )
        else:
            inputs.append(from_bytes(given.name, given.datatype, given.shape, rest[:size]))
            rest = rest[size:]
    if len(rest):
        raise RequestError(Reason.BAD_REQUEST, f"{len(rest)} bytes after the last tensor belong to none")
    outputs = [output.name for output in fields.outputs or ()]
    return fields, Request(inputs=inputs, outputs=outputs or None, parameters=fields.parameters)


def check_forms(fields: RequestBody, interface: Interface) -> None:
    """Check before the model runs that the outputs can be written as the request wants them.

    Raises:
        RequestError: one cannot.
    """
    wanted = _wanted(fields)
    if len(wanted) < len(fields.outputs or ()):
        raise RequestError(
            Reason.BAD_REQUEST,
            f"an output is asked for twice: {', '.join(output.name for output in fields.outputs or ())}",
        )
    for name, spec in interface.outputs.items():
        check_memory(name, wanted.get(name, {}))
        _is_binary(fields, name)
        if wanted.get(name, {}).get("classification"):
            raise RequestError(Reason.BAD_REQUEST, f"{name}: this server does not classify: ask for the tensor")
        if spec.datatype == "BF16" and (not wanted or name in wanted) and not _is_binary(fields, name):
            raise RequestError(Reason.BAD_REQUEST, f"{name}: BF16 travels as binary data: ask for it by binary_data")


def _wanted(fields: RequestBody) -> dict[str, dict[str, Any]]:
    return {output.name: output.parameters for output in fields.outputs or ()}


def _is_binary(fields: RequestBody, name: str) -> bool:
    return flag(_wanted(fields).get(name, {}), "binary_data", flag(fields.parameters, "binary_data_output"))


def write_answer(
    model: str, version: str, fields: RequestBody, tensors: Sequence[Tensor]
) -> tuple[bytes, list[memoryview]]:
    """The JSON part of an answer, and the tensors that follow as bytes, as the request wants them."""
    outputs: list[dict[str, Any]] = []
    content = []
    finite = True
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.array.shape)}
        if _is_binary(fields, tensor.name):
            array = numpy.ascontiguousarray(tensor.array)
            output["parameters"] = {"binary_data_size": array.nbytes}
            content.append(array.reshape(-1).view(numpy.uint8).data)
        else:
            output["data"] = tensor.array.reshape(-1).tolist()
            finite = finite and bool(tensor.array.dtype.kind != "f" or numpy.isfinite(tensor.array).all())
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if fields.id:
        answer["id"] = fields.id
    # JSON has no word for NaN and infinities: as Triton does, they are written as Python's json does.
    return msgspec.json.encode(answer) if finite else json.dumps(answer).encode(), content


def unpack(body: bytearray, encoding: str, limit: int) -> bytearray:
    """A body of HTTP's content encoding `gzip` or `deflate`, of at most `limit` bytes.

    Raises:
        RequestError: it is of another encoding, damaged, or too large.
    """
    if encoding not in ("gzip", "deflate"):
        raise RequestError(Reason.BAD_REQUEST, f"content-encoding: expected gzip or deflate, found {encoding[:80]!r}")
    packed = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: either header
    try:
        found = packed.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(Reason.BAD_REQUEST, f"content-encoding: the body is no {encoding}: {error}") from None
    if len(found) > limit:
        raise RequestError(Reason.TOO_LARGE, f"the request is over {limit} bytes unpacked")
    if not packed.eof or packed.unused_data:
        raise RequestError(Reason.BAD_REQUEST, f"content-encoding: the body is not one whole {encoding} stream")
    return bytearray(found)


def _decode(header: memoryview) -> tuple[RequestBody, list[Numbers | None]]:
    """The JSON part, and for each input that has data there, what gives it as lists of a type."""
    try:
        fields = msgspec.json.decode(header, type=RequestBody)
    except msgspec.ValidationError as error:
        raise RequestError(Reason.BAD_REQUEST, f"the request breaks the protocol: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if not _SPECIAL.search(header):
            raise RequestError(Reason.BAD_REQUEST, f"the request is no JSON: {error}") from None
        return _decode_special(bytes(header))
    return fields, [
        None if isinstance(one.data, UnsetType) else functools.partial(_decode_data, one.data) for one in fields.inputs
    ]


def _decode_data(data: Raw, kind: Any) -> Any:
    return msgspec.json.decode(data, type=kind)


def _decode_special(header: bytes) -> tuple[RequestBody, list[Numbers | None]]:
    """The same of JSON with NaN and infinities, which JSON has no word for: clients write them as Python's json does."""
    try:
        fields = json.loads(header)
        inputs = fields["inputs"]
        data = [one.pop("data", UNSET) for one in inputs]
        found = msgspec.convert(fields, RequestBody)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise RequestError(Reason.BAD_REQUEST, f"the request breaks the protocol: {error}") from None
    return found, [None if one is UNSET else functools.partial(msgspec.convert, one) for one in data]
