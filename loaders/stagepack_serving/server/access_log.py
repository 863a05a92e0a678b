"""One record for each request: what was asked, by whom, what came of it, and how long it took."""

import logging
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagepack_loaders.logs import RequestTrace, begin_trace, current_trace
from stagepack_loaders.versions import StageVersion
from stagepack_serving.server.errors import is_openai_path
from stagepack_serving.server.metrics import Timeline

# This logger has the records, with the fields of `RequestRecord` and the ids of `RequestTrace`.
ACCESS_LOGGER: Final = logging.getLogger("stagepack.access")
# Orchestrators ask for them every few seconds.
_HEALTH_PATHS: Final = "/v2/health/"
_HTTP_OK: Final = 200
# The header of answers that names the version of the weights. What is no plain character is written as in URLs.
VERSION_HEADER: Final = b"x-model-version"
_PLAIN: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"
# A client may name the server in the target of a request: RFC 9112, section 3.2.2.
_ORIGIN: Final = re.compile("^https?://[^/]*", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request and its answer.

    Attributes:
        client: the address that it came from.
        sender: who clients are told apart by: the token of the request, once it was accepted, or else its host.
        operation: the method and the path of HTTP, or the method of gRPC. The query of a path, which may have secrets, is left out.
        protocol: rest, openai or grpc.
        model: the name of the model, if the server has it.
        version: the version that has run the request, if one has.
        status: what the metrics count; empty for a request that they do not count.
        code: the status of HTTP; None over gRPC, and if nothing was sent.
        start: when it came, in seconds of `time.monotonic`.
        timeline: how long its parts and its runs take; None if it asks for no model.
        weights: the version of the weights that its calls run on; None before its first call.
    """

    trace: RequestTrace
    client: str
    operation: str
    protocol: str
    sender: str = field(repr=False)
    model: str = ""
    version: str = ""
    status: str = ""
    code: int | None = None
    request_bytes: int = 0
    answer_bytes: int = 0
    start: float = field(default_factory=time.monotonic)
    timeline: Timeline | None = None
    weights: StageVersion | None = None

    def write(self, status: str) -> None:
        """Write the record, if anybody reads it; with this status if the metrics do not count the request."""
        if not ACCESS_LOGGER.isEnabledFor(logging.INFO):
            return
        seconds = time.monotonic() - self.start
        queue_seconds, run_seconds, times = None, None, ""
        if self.timeline is not None and self.timeline.run_seconds is not None:
            queue_seconds, run_seconds = round(self.timeline.queue_seconds, 6), round(self.timeline.run_seconds, 6)
            times = f" (queue {1e3 * queue_seconds:.1f}, run {1e3 * run_seconds:.1f})"
        fields: dict[str, Any] = {
            "protocol": self.protocol,
            "model": self.model,
            "version": self.version,
            "weight_version": None if self.weights is None else self.weights.name,
            "status": self.status or status,
            "seconds": round(seconds, 6),
            "queue_seconds": queue_seconds,
            "run_seconds": run_seconds,
            "client": self.client,
            "operation": self.operation,
            "code": self.code,
            "request_bytes": self.request_bytes,
            "answer_bytes": self.answer_bytes,
            "parent_id": self.trace.parent_id,
        }
        ACCESS_LOGGER.info(
            "%s %s %s %s %.1f ms%s %s %s %d B in %d B out",
            *(self.protocol, self.model or "-", self.version or "-", fields["status"], 1e3 * seconds, times),
            *(self.client, self.operation, self.request_bytes, self.answer_bytes),
            extra=fields,
        )


# That of the request that a task works on.
current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


def weight_fields() -> dict[str, str]:
    """Return the field of an answer that names the version of the weights of the request that a task works on; none for no call."""
    record = current_record.get()
    return {} if record is None or record.weights is None else {"weight_version": record.weights.name}


def current_sender() -> str:
    """Return the sender of the request that a task works on; empty for none."""
    record = current_record.get()
    return "" if record is None else record.sender


def begin_record(traceparent: str | None, client: str, operation: str, protocol: str) -> RequestRecord:
    """Begin the record of a request, on which this task works from now on."""
    call = current_record.get()  # of a message in a stream
    sender = client.rpartition(":")[0] if call is None else call.sender
    trace = begin_trace(traceparent)
    record = RequestRecord(trace=trace, client=client, operation=operation, protocol=protocol, sender=sender)
    current_trace.set(record.trace)
    current_record.set(record)
    return record


class RecordedRequests:
    """An ASGI application that wraps another one: it records each request, and tells the client the identity of it."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope["path"] = _ORIGIN.sub("", scope["path"]) or "/"
        operation = f"{scope['method']} {scope['raw_path'].decode('latin-1')}"
        protocol = "openai" if is_openai_path(path) else "rest"
        record = begin_record(_traceparent(scope["headers"]), _address(scope.get("client")), operation, protocol)

        async def counting_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                record.request_bytes += len(message.get("body", b""))
            return message

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.code = message["status"]
                message["headers"] = [*message["headers"], (b"traceparent", record.trace.traceparent.encode())]
                if record.weights is not None:
                    message["headers"].append((VERSION_HEADER, quote(record.weights.name, _PLAIN).encode()))
            else:
                record.answer_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._application(scope, counting_receive, counting_send)
        finally:
            if record.code != _HTTP_OK or not path.startswith(_HEALTH_PATHS):
                record.write(str(record.code or "HUNG_UP"))


def _traceparent(headers: Any) -> str | None:
    """The header that says who a request belongs to; None if there is none, or several."""
    values = [value for header_name, value in headers if header_name == b"traceparent"]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _address(client: tuple[str, int] | None) -> str:
    if client is None:
        return "-"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def begin_call_record(context: Any, method: str) -> RequestRecord:
    """Begin the record of a call of gRPC, or of a message of its stream."""
    values = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    traceparent = values[0] if len(values) == 1 and isinstance(values[0], str) else None
    # A peer is a text such as ipv4:127.0.0.1:40000 or ipv6:%5B::1%5D:40000.
    client = unquote(context.peer()).partition(":")[2]
    record = begin_record(traceparent, client, method, "grpc")
    context.set_trailing_metadata((("traceparent", record.trace.traceparent),))
    return record
