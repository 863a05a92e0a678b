"""Compressed bodies of HTTP requests."""

import zlib
from typing import Final

from stagepack_serving.server.errors import RequestError, RequestStatus

# An option of zlib: accept the header of gzip and that of zlib.
_DETECT_HEADER: Final = 32


def decompress_body(body: bytearray, encoding: str, max_bytes: int) -> bytearray:
    """Decompress the body of a request.

    max_bytes: the largest size of the result, in bytes; no more than that is ever decompressed.
    """
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
