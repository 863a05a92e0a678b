"""Why a request is refused, as status codes of HTTP and gRPC; and why a server cannot start."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

import msgspec
from grpc import StatusCode

from stagepack.errors import StagepackError

_MAX_MESSAGE_LENGTH: Final = 1000  # characters
# OpenAI's names of errors by the status code of HTTP.
_OPENAI_CODES: Final[Mapping[int, str]] = {
    HTTPStatus.NOT_FOUND: "model_not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_supported",
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
}
# The code of a prompt, or of an answer, that is longer than the cache.
CONTEXT_CODE: Final = "context_length_exceeded"
# Clients that try again wait so many seconds, if nothing else is known.
RETRY_SECONDS: Final = 1
_OPENAI_TYPES: Final[Mapping[int, str]] = {
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_FIRST_SERVER_CODE: Final = 500
# Escapes in JSON: a pair of surrogates, a lone one, or another.
_ESCAPE: Final = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL)
# The search holds the interpreter, for some milliseconds in so many bytes.
_SEARCHED_BYTES: Final = 1_000_000


class RequestStatus(Enum):
    """Why a request is refused. Each value begins with the status codes of HTTP and gRPC.

    The names are values of the label ``status`` of the metrics.
    """

    BAD_REQUEST = (HTTPStatus.BAD_REQUEST, StatusCode.INVALID_ARGUMENT)
    UNAUTHENTICATED = (HTTPStatus.UNAUTHORIZED, StatusCode.UNAUTHENTICATED)
    FORBIDDEN = (HTTPStatus.FORBIDDEN, StatusCode.PERMISSION_DENIED)
    NOT_FOUND = (HTTPStatus.NOT_FOUND, StatusCode.NOT_FOUND)
    TOO_LARGE = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, StatusCode.RESOURCE_EXHAUSTED)
    MODEL_FAILED = (HTTPStatus.INTERNAL_SERVER_ERROR, StatusCode.INTERNAL)
    BUSY = (HTTPStatus.SERVICE_UNAVAILABLE, StatusCode.UNAVAILABLE)
    # The third part tells it from BUSY: an enum takes names of equal values for one member.
    STAGE_LOST = (HTTPStatus.SERVICE_UNAVAILABLE, StatusCode.UNAVAILABLE, "lost")
    HUNG_UP = (HTTPStatus.BAD_REQUEST, StatusCode.CANCELLED)
    TOO_LATE = (HTTPStatus.GATEWAY_TIMEOUT, StatusCode.DEADLINE_EXCEEDED)

    @property
    def http_code(self) -> int:
        """The status code of HTTP."""
        return int(self.value[0])

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may be answered later."""
        return self.http_code == HTTPStatus.SERVICE_UNAVAILABLE

    @property
    def grpc_code(self) -> StatusCode:
        """The status code of gRPC."""
        return self.value[1]


class RequestError(StagepackError):
    """A request is refused.

    Attributes:
        status: why it is refused.
        code: OpenAI's name of the error, where the status does not say it.
        field_name: the field of the request that is wrong; None for another reason.
        retry_seconds: after how many seconds a client may ask again that was refused for want of room.
    """

    def __init__(self, status: RequestStatus, message: str, code: str | None = None) -> None:
        super().__init__(message if len(message) <= _MAX_MESSAGE_LENGTH else f"{message[:_MAX_MESSAGE_LENGTH]}...")
        self.status = status
        self.code = code
        self.field_name: str | None = None
        self.retry_seconds = RETRY_SECONDS


class BadRequestError(RequestError):
    """A request breaks the protocol or the contract of the model: the same request is refused again."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(RequestStatus.BAD_REQUEST, message, code)


class FieldError(BadRequestError):
    """A field of a request is wrong."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field_name = field_name


def json_refusal(content: bytes | bytearray | memoryview, error: Exception) -> BadRequestError:
    """Return why the JSON of a request is refused, by one of `JSON_ERRORS`."""
    if isinstance(error, msgspec.ValidationError):
        return BadRequestError(f"the request violates the protocol: {error}")
    # msgspec calls them truncated data, or an unexpected end.
    escapes = _ESCAPE.finditer(content[:_SEARCHED_BYTES])
    lone_surrogate = next((bytes(escape[1]) for escape in escapes if escape[1] is not None), None)
    reason = error if lone_surrogate is None else f"{lone_surrogate.decode()} is a lone surrogate, which is no text"
    return BadRequestError(f"the request is not valid JSON: {reason}")


@contextlib.contextmanager
def errors_of_field(field_name: str) -> Iterator[None]:
    """Say of requests that are refused that a field is wrong."""
    try:
        yield
    except RequestError as error:
        if error.status is RequestStatus.BAD_REQUEST and error.field_name is None:
            error.field_name = field_name
        raise


def refusal_fields(
    path: str, message: str, http_code: int, code: str | None = None, field_name: str | None = None
) -> dict[str, Any]:
    """Return the JSON of the answer to a request that is refused, in the form of the API that its path belongs to."""
    if not is_openai_path(path):
        return {"error": message}
    error_type = _OPENAI_TYPES.get(
        http_code, "invalid_request_error" if http_code < _FIRST_SERVER_CODE else "server_error"
    )
    code = code or _OPENAI_CODES.get(http_code)
    return {"error": {"message": message, "type": error_type, "param": field_name, "code": code}}


def refusal_headers(http_code: int, retry_seconds: int = RETRY_SECONDS) -> dict[str, str]:
    """Return the headers of the answer to a request that is refused."""
    return {"retry-after": str(retry_seconds)} if http_code == HTTPStatus.SERVICE_UNAVAILABLE else {}


def is_openai_path(path: str) -> bool:
    """Return whether a path belongs to OpenAI's API."""
    return path == "/v1" or path.startswith("/v1/")


class AddressError(StagepackError):
    """The server cannot listen at an address: it is in use, or does not belong to this machine. Choose another address."""


class CredentialError(StagepackError):
    """A file with a certificate, a key or tokens cannot be used: it cannot be read, holds something else, or other users can read it."""


class AssetError(StagepackError):
    """The tokenizer or the chat template in a bundle cannot be used. Export the model again with other ones."""
