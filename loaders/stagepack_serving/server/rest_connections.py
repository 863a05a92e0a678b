"""HTTP connections: how many may be open, and when the server closes them."""

import asyncio
import contextlib
from typing import Any, Final

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stagepack_serving.server.errors import RequestError, RequestStatus, is_openai_path, refusal_fields, refusal_headers
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.model_registry import ModelRegistry

_GRACE_SECONDS: Final = 5
# After that time, and then twice as long each time, a client that sends nothing more is probed again.
_PROBE_SECONDS: Final = 0.05


class LimitedConnection(H11Protocol):
    """A connection. Each one beyond the limit receives 503 and is closed after 5 s; each one that sends no request in time is closed.

    Uvicorn's own limit would also refuse the requests of the connections that were there before, and it lets a connection wait for ever
    for its first request, or for the end of the head of a later one.
    """

    def __init__(self, *args: Any, limits: ServerLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_sent_all = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's class
        """Start the connection, and mark it if it exceeds the limit."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort_connection": transport.abort}
        if len(self.connections) > self._limits.max_connections:
            self.app_state["exceeds_limit"] = True
            self.loop.call_later(_GRACE_SECONDS, transport.close)
        self._head_timer = self.loop.call_later(self._limits.first_request, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sent."""
        super().data_received(data)
        self._bound_head()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes the connection
        """Keep the connection of a client that has sent all it will until its last answer is sent."""
        has_request = not self._is_answered and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        if not has_request or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self._has_sent_all = True
        self._probe_client(_PROBE_SECONDS)
        return True

    def _probe_client(self, seconds: float) -> None:
        """Find out whether the client has closed its connection: of one that has, too, nothing is seen but the end of what it sends.

        Its kernel answers this by a reset, which the next write meets. All others pass over it: RFC 9110, section 15.2.1.
        """
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(seconds, self._probe_client, 2 * seconds)

    @property
    def _is_answered(self) -> bool:
        """Whether no request has come that is not answered yet."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived already."""
        super().on_response_complete()
        self._bound_head()
        if self._has_sent_all and self._is_answered:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection after it was idle; a client that does not read what was sent may not keep it open."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(_GRACE_SECONDS, self.transport.abort)

    def _bound_head(self) -> None:
        """Start or stop the timer of the head of a request, as a part of it, or all of it, has arrived."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._head_timer = self.loop.call_later(self._limits.first_request, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ConnectionCloser:
    """An ASGI application that wraps another one, and decides when a connection is closed after an answer.

    It is closed when the server is stopping, so that the client connects to another server; when the answer precedes the end of the
    request; when the request could be understood in two ways; and when the connection exceeds the limit.
    """

    def __init__(self, application: ASGIApp, models: ModelRegistry) -> None:
        self._application = application
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        exceeds_limit = "exceeds_limit" in scope.get("state", ())
        exchange = _Exchange(scope, receive, send, self._models, exceeds_limit=exceeds_limit)
        if exceeds_limit and not scope["path"].startswith("/v2/health/"):
            protocol = "openai" if is_openai_path(scope["path"]) else "rest"
            self._models.metrics.count_answer("", "", protocol, RequestStatus.BUSY.name)
            message = f"{self._models.limits.max_connections} connections are open already: try again later"
            http_code = RequestStatus.BUSY.http_code
            fields = refusal_fields(scope["path"], message, http_code)
            refusal = JSONResponse(fields, http_code, refusal_headers(http_code))
            await refusal(scope, exchange.receive, exchange.send)
        else:
            await self._application(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer: bounds their times, and adds ``connection: close`` to the answer where needed."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, models: ModelRegistry, *, exceeds_limit: bool
    ) -> None:
        self._receive = receive
        self._send = send
        self._models = models
        # Without `LimitedConnection`, what calls the application ends its connections itself.
        self._abort_connection = scope.get("state", {}).get("abort_connection", lambda: None)
        self._body_end_time = asyncio.get_running_loop().time() + models.limits.deadline
        body_headers = {header_name for header_name, _ in scope["headers"]} & {b"content-length", b"transfer-encoding"}
        self._is_received = not body_headers
        # Uvicorn tells a client with this header to send the body when the body is first asked for.
        self._awaits_continue = (b"expect", b"100-continue") in [
            (key, value.lower()) for key, value in scope["headers"]
        ]
        # A request with both headers may be two requests to a proxy before this server: RFC 9112, section 6.3.
        self._must_close = exceeds_limit or len(body_headers) == 2

    async def receive(self) -> Message:
        if self._is_received:
            return await self._receive()
        self._awaits_continue = False
        try:
            async with asyncio.timeout_at(self._body_end_time):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(RequestStatus.TOO_LATE, "the request was not complete before the deadline") from None
        self._is_received = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._must_close or not self._is_received or self._models.is_stopping:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif not self._is_received and not message.get("more_body", False):
            await self._send_in_time({**message, "more_body": True})
            if not self._awaits_continue:  # else it sends no body after a refusal
                await self._discard_request()
            message = {"type": "http.response.body", "body": b""}
        await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        """Send a part of the answer. If the client does not read it in time, end the connection: it would wait for the client to read."""
        try:
            async with asyncio.timeout(self._models.limits.sending):
                await self._send(message)
        except TimeoutError:
            self._abort_connection()
        except asyncio.CancelledError:
            self._abort_connection()
            raise

    async def _discard_request(self) -> None:
        """Read the rest of the request: a client may lose an answer if the connection closes while it still writes."""
        with contextlib.suppress(TimeoutError, RequestError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while not self._is_received:
                    await self.receive()
