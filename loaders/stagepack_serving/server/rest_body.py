"""The body of an HTTP request, bounded in size."""

from starlette.requests import ClientDisconnect, Request

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.rest_compression import decompress_body


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
