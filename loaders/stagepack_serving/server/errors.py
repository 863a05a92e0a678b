"""Why a request gets no answer, with the status codes of HTTP and of gRPC; and why there is no server."""

from enum import Enum
from http import HTTPStatus
from typing import Final

from grpc import StatusCode

from stagepack.errors import StagepackError

_LONGEST: Final = 1000


class Reason(Enum):
    """What a client does differently: the status codes that say so."""

    BAD_REQUEST = (HTTPStatus.BAD_REQUEST, StatusCode.INVALID_ARGUMENT)
    NOT_FOUND = (HTTPStatus.NOT_FOUND, StatusCode.NOT_FOUND)
    TOO_LARGE = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, StatusCode.RESOURCE_EXHAUSTED)
    MODEL_FAILED = (HTTPStatus.INTERNAL_SERVER_ERROR, StatusCode.INTERNAL)
    BUSY = (HTTPStatus.SERVICE_UNAVAILABLE, StatusCode.UNAVAILABLE)
    HUNG_UP = (HTTPStatus.BAD_REQUEST, StatusCode.CANCELLED)
    TOO_LATE = (HTTPStatus.GATEWAY_TIMEOUT, StatusCode.DEADLINE_EXCEEDED)

    @property
    def http(self) -> int:
        """The status code of HTTP."""
        return int(self.value[0])

    @property
    def grpc(self) -> StatusCode:
        """The status code of gRPC."""
        return self.value[1]


class RequestError(StagepackError):
    """A request that gets no answer.

    Attributes:
        reason: what kind of refusal it is.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        """`message` is for the client; what it echoes of the request is cut short, since gRPC carries errors in headers."""
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")
        self.reason = reason


class AddressError(StagepackError):
    """An address cannot be listened at: it is in use, or not of this machine. Choose another."""
