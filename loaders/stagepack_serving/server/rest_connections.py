"""Connections over HTTP: how many there are, and how they end."""

import asyncio
import contextlib
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stagepack_serving.server.errors import Reason
from stagepack_serving.server.models import Models

_LINGER: Final = 5  # seconds


class Connection(H11Protocol):
    """A connection. Those beyond the limit get one answer, and little time to ask.

    Uvicorn's own limit would refuse the requests of those that were there before, too.
    """

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        """At most `most` are kept."""
        super().__init__(*args, **kwargs)
        self._most = most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the class above
        """Begin."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self.app_state = {**self.app_state, "crowded": True}
            self.loop.call_later(_LINGER, transport.close)


class Ending:
    """An application that ends connections.

    With each answer once the server is told to stop, as the client is to look for another server; where a request is answered before
    it arrived whole; and where there are too many.
    """

    def __init__(self, application: ASGIApp, models: Models) -> None:
        """Around this application."""
        self._application = application
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        crowded = "crowded" in scope["state"]
        headers = {name for name, _ in scope["headers"]}
        arrived = not headers & {b"content-length", b"transfer-encoding"}

        async def receive_on() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = arrived or not message.get("more_body", False)
            return message

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                # One with both headers may be two requests to a proxy before this server: RFC 9112, 6.3.
                twofold = headers >= {b"content-length", b"transfer-encoding"}
                if crowded or twofold or not arrived or not self._models.ready:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            elif not arrived and not message.get("more_body", False):
                # A connection that is closed while its client still writes would lose the answer.
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LINGER):
                        while not arrived:
                            await receive_on()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        if crowded and not scope["path"].startswith("/v2/health/"):
            self._models.metrics.requests.labels("", "rest", Reason.BUSY.name).inc()
            most = self._models.limits.connections
            answer = JSONResponse({"error": f"{most} connections are open already: come again later"}, Reason.BUSY.http)
            await answer(scope, receive_on, send_on)
        else:
            await self._application(scope, receive_on, send_on)
