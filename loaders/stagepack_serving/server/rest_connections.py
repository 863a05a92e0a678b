"""HTTP connections: how many may be open, and when the server closes them."""

import asyncio
import contextlib
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stagepack_serving.server.errors import RequestStatus
from stagepack_serving.server.served_models import ServedModels

_GRACE_SECONDS: Final = 5


class LimitedConnection(H11Protocol):
    """A connection. Each one beyond the limit receives 503 and is closed after 5 s.

    Uvicorn's own limit would also refuse the requests of the connections that were there before.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        """Create the connection.

        Args:
            args: as for uvicorn's class.
            max_connections: the number of connections that may be open.
            kwargs: as for uvicorn's class.
        """
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's class
        """Start the connection, and mark it if it exceeds the limit.

        Args:
            transport: the transport of the connection.
        """
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self.app_state = {**self.app_state, "exceeds_limit": True}
            self.loop.call_later(_GRACE_SECONDS, transport.close)


class ConnectionCloser:
    """An ASGI application that wraps another one, and decides when a connection is closed after an answer.

    It is closed when the server is stopping, so that the client connects to another server; when the answer precedes the end of the
    request; when the request could be understood in two ways; and when the connection exceeds the limit.
    """

    def __init__(self, application: ASGIApp, models: ServedModels) -> None:
        """Wrap an application.

        Args:
            application: the application.
            models: tells whether the server is ready, and its limits.
        """
        self._application = application
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Args:
            scope: the ASGI scope.
            receive: the ASGI channel of the request.
            send: the ASGI channel of the answer.
        """
        exceeds_limit = "exceeds_limit" in scope["state"]
        exchange = _Exchange(scope, receive, send, self._models, exceeds_limit=exceeds_limit)
        if exceeds_limit and not scope["path"].startswith("/v2/health/"):
            self._models.metrics.count_answer("", "", "rest", RequestStatus.BUSY.name)
            message = f"{self._models.limits.max_connections} connections are open already: try again later"
            refusal = JSONResponse({"error": message}, RequestStatus.BUSY.http_code)
            await refusal(scope, exchange.receive, exchange.send)
        else:
            await self._application(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer: adds ``connection: close`` to the answer where needed."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, models: ServedModels, *, exceeds_limit: bool
    ) -> None:
        self._receive = receive
        self._send = send
        self._models = models
        body_headers = {header_name for header_name, _ in scope["headers"]} & {b"content-length", b"transfer-encoding"}
        self._is_received = not body_headers
        # A request with both headers may be two requests to a proxy before this server: RFC 9112, section 6.3.
        self._must_close = exceeds_limit or len(body_headers) == 2

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_received = self._is_received or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._must_close or not self._is_received or not self._models.is_ready:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif not self._is_received and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._discard_request()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _discard_request(self) -> None:
        """Read the rest of the request: a client may lose an answer if the connection closes while it still writes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while not self._is_received:
                    await self.receive()
