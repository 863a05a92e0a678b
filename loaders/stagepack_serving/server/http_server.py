"""HTTP servers: the server of REST in the event loop, and the server of the operator in a thread of its own, which no load reaches."""

import asyncio
import contextlib
import functools
import math
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from stagepack_serving.server.errors import AddressError
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.rest_connections import LimitedConnection

# Connections that wait to be accepted.
_BACKLOG: Final = 2048
# After the drain, the time for the answers to requests whose deadline was set to now.
REFUSAL_SECONDS: Final = 2
# Longer than clients and proxies keep an idle connection.
KEEP_ALIVE_SECONDS: Final = 75


class HttpServer(uvicorn.Server):
    """Uvicorn with a bound on the time of TLS handshakes, and without its signal handlers: signals stop gRPC too."""

    def __init__(self, config: uvicorn.Config, tls_context: ssl.SSLContext | None, handshake_seconds: float) -> None:
        super().__init__(config)
        # Without TLS there are no options: asyncio would refuse them.
        self._tls_options: dict[str, Any] = (
            {"ssl": tls_context, "ssl_handshake_timeout": handshake_seconds, "ssl_shutdown_timeout": handshake_seconds}
            if tls_context is not None
            else {}
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        connection_type: Any = self.config.http_protocol_class
        create_connection = functools.partial(
            connection_type, config=self.config, server_state=self.server_state, app_state={}
        )
        self.servers = [
            await loop.create_server(create_connection, sock=listener, backlog=_BACKLOG, **self._tls_options)
            for listener in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield


def create_http_server(
    application: ASGIApp, limits: ServerLimits, tls_context: ssl.SSLContext | None = None
) -> HttpServer:
    """Return an HTTP server that is not started yet."""
    config = uvicorn.Config(
        application,
        # Based on h11, which bounds the size of a request's head. Uvicorn prefers httptools where it is installed, which does not.
        http=functools.partial(LimitedConnection, limits=limits),  # type: ignore[arg-type]
        # A connection that becomes a WebSocket would have no limits.
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(limits.drain + REFUSAL_SECONDS),
    )
    return HttpServer(config, tls_context, limits.first_request)


@contextlib.contextmanager
def serving_in_thread(listener: socket.socket, application: ASGIApp, limits: ServerLimits) -> Iterator[None]:
    """Serve an application in a thread while the context lasts."""
    server = create_http_server(application, limits)

    def run() -> None:
        with contextlib.closing(uvloop.new_event_loop()) as loop:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(server.serve(sockets=[listener]))

    thread = threading.Thread(target=run, name="operator", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def listen(host: str, port: int, protocol: str = "HTTP") -> socket.socket:
    """A listening socket."""
    with contextlib.ExitStack() as failure:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port)[0]
            # The protocol is named because asyncio disables Nagle's algorithm, which delays answers by 40 ms, only where it is.
            listener = failure.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise AddressError(f"{host} port {port}: cannot listen for {protocol}: {error.strerror or error}") from None
        failure.pop_all()
    return listener
