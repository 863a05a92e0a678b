"""The body of an HTTP request, bounded in size."""

from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.rest_compression import decompress_body

# Far more than a request that is no inference needs.
_MAX_FIELDS_BYTES: Final = 65_536

Fields = TypeVar("Fields")


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """Read and decompress the body of a request.

    Args:
        request: the request.
        max_bytes: the largest size, both as received and decompressed.

    Returns:
        The body.

    Raises:
        RequestError: it is too large, or the client disconnects before its end.
    """
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
    return body if encoding == "identity" else decompress_body(body, encoding, max_bytes)


async def read_fields(request: Request, fields_type: type[Fields]) -> Fields:
    """Read a body of JSON that is no inference.

    Args:
        request: the request.
        fields_type: the type of the body; an empty body is an object without fields.

    Returns:
        The body.

    Raises:
        RequestError: it is too large, no JSON, or of another type.
    """
    body = await read_body(request, _MAX_FIELDS_BYTES)
    try:
        return msgspec.json.decode(body or b"{}", type=fields_type)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(RequestStatus.BAD_REQUEST, f"the body violates the protocol: {error}") from None
