"""The body of an HTTP request, bounded in size."""

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from stagepack.format.codec import JSON_ERRORS
from stagepack_serving.server.beside_loop import beside_loop
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.limits import MAX_TEXT_BYTES
from stagepack_serving.server.rest_compression import decompress_body
from stagepack_serving.server.rest_large_request import check_json_counts

# Zlib writes up to so many bytes for one that it reads.
_COMPRESSION: Final = 1032
# Far more than a request that is no inference needs.
_MAX_FIELDS_BYTES: Final = 65_536
_MAX_CONTAINERS: Final = 100_000
_MAX_STRINGS: Final = 100_000

Fields = TypeVar("Fields")


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
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    # A few bytes may become many.
    return await beside_loop(_COMPRESSION * len(body), decompress_body, body, encoding, max_bytes)


async def decode_text_request(request: Request, max_bytes: int, decode: Callable[[bytearray], Fields]) -> Fields:
    """Read a request for a text, whose prompt may be large, and decode it beside the event loop."""

    def check_and_decode(body: bytearray) -> Fields:
        check_json_counts(body, _MAX_CONTAINERS, _MAX_STRINGS, brackets=b"[{")
        return decode(body)

    body = await read_body(request, min(max_bytes, MAX_TEXT_BYTES))
    return await beside_loop(len(body), check_and_decode, body)


async def read_fields(request: Request, fields_type: type[Fields]) -> Fields:
    """Read a body of JSON that is no inference.

    fields_type: the type of the body; an empty body is an object without fields.
    """
    body = await read_body(request, _MAX_FIELDS_BYTES)
    try:
        return msgspec.json.decode(body or b"{}", type=fields_type)
    except JSON_ERRORS as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the body violates the protocol: {error}") from None
