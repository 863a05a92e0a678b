"""A server of REST and gRPC on one event loop, from its start until its last answer.

- The signals that stop a server.
"""

import asyncio
import contextlib
import functools
import math
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import uvicorn
import uvloop
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from stagepack_serving.server.errors import AddressError
from stagepack_serving.server.generation.grpc_generation import check_text_size
from stagepack_serving.server.grpc_parsing import ParsedMethods
from stagepack_serving.server.grpc_service import INFERENCE_SERVICE, GrpcService, HealthService, OpenCalls
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.rest_connections import LimitedConnection
from stagepack_serving.server.rest_service import RestService
from stagepack_serving.server.security import ServerSecurity, TokenInterceptor, watch_files
from stagepack_serving.server.served_models import ServedModels

# Connections that wait to be accepted.
_BACKLOG: Final = 2048
# After the drain, the time for the answers to requests whose deadline was set to now.
_REFUSAL_SECONDS: Final = 2
# How often the models are looked at.
_WATCH_SECONDS: Final = 0.2
# Longer than clients and proxies keep an idle connection.
_KEEP_ALIVE_SECONDS: Final = 75


def watch_stop_signals() -> asyncio.Future[signal.Signals]:
    """Install handlers for SIGTERM, SIGINT and SIGHUP.

    After SIGTERM or SIGINT, the next one of them has its default action, which ends the process at once. A hang-up never does: a shell
    and the kernel both send SIGHUP when a terminal closes, and systemd sends it right after SIGTERM (``SendSIGHUP=``). A process that
    was started with SIGHUP ignored, as by nohup, keeps ignoring it.
    """
    loop = asyncio.get_running_loop()
    first_signal: asyncio.Future[signal.Signals] = loop.create_future()
    termination_signals = (signal.SIGTERM, signal.SIGINT)

    def stop(received_signal: signal.Signals) -> None:
        if not first_signal.done():
            first_signal.set_result(received_signal)
        if received_signal in termination_signals:
            for termination_signal in termination_signals:
                loop.remove_signal_handler(termination_signal)

    for termination_signal in termination_signals:
        loop.add_signal_handler(termination_signal, stop, termination_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP)
    return first_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddresses:
    """The addresses of a server.

    Attributes:
        host: a host name or IP address of this machine.
        http_port: the port for REST; 0 chooses a free one.
        grpc_port: the port for gRPC; 0 chooses a free one.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001


class _UvicornServer(uvicorn.Server):
    """Uvicorn with a bound on the time of TLS handshakes, and without its signal handlers: signals stop gRPC too."""

    def __init__(self, config: uvicorn.Config, tls_context: ssl.SSLContext | None, handshake_seconds: float) -> None:
        super().__init__(config)
        # None of them without TLS, or asyncio refuses them.
        self._tls_options: dict[str, Any] = (
            {"ssl": tls_context, "ssl_handshake_timeout": handshake_seconds, "ssl_shutdown_timeout": handshake_seconds}
            if tls_context is not None
            else {}
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        connection_type: Any = self.config.http_protocol_class
        create_connection = functools.partial(
            connection_type,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        self.servers = [
            await loop.create_server(create_connection, sock=listener, backlog=_BACKLOG, **self._tls_options)
            for listener in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    control: ModelControl,
    addresses: ServerAddresses,
    on_listening: Callable[[ServerAddresses], None],
    security: ServerSecurity,
) -> bool:
    """Answer requests until SIGTERM, SIGHUP or SIGINT, or until a model has ended; then finish those that were accepted.

    After SIGTERM, which orchestrators send, or SIGHUP, or when a model has ended, the server still accepts requests for
    `ServerLimits.linger` seconds, reports that it is not ready, and closes each HTTP connection with its answer. A second SIGTERM or SIGINT
    ends the process at once.
    """
    # For a request over gRPC, the event loop of asyncio makes some 200 calls of Python, that of uvloop none.
    return uvloop.run(_serve(control, addresses, on_listening, security))


async def _serve(
    control: ModelControl,
    addresses: ServerAddresses,
    on_listening: Callable[[ServerAddresses], None],
    security: ServerSecurity,
) -> bool:
    """Answer requests; see `serve`."""
    models, limits = control.models, control.models.limits
    with _listen(addresses.host, addresses.http_port) as http_socket:
        open_calls = OpenCalls()
        grpc_server, grpc_port = _create_grpc_server(control, addresses, open_calls, security)
        http_server = _create_http_server(control, security)
        stop_signal = watch_stop_signals()
        await grpc_server.start()
        http_task = asyncio.create_task(http_server.serve(sockets=[http_socket]))
        http_port = http_socket.getsockname()[1]
        on_listening(ServerAddresses(host=addresses.host, http_port=http_port, grpc_port=grpc_port))
        failure = asyncio.create_task(_wait_for_end(models))
        watching = [asyncio.create_task(control.watch()), asyncio.create_task(watch_files(security.watched_files))]
        stops: list[asyncio.Future[Any]] = [stop_signal, failure]
        await asyncio.wait(stops, return_when=asyncio.FIRST_COMPLETED)
        models.has_failed = failure.done()
        if models.has_failed or stop_signal.result() != signal.SIGINT:
            models.is_stopping = True
            await asyncio.sleep(limits.linger)
        models.is_stopping = True
        for task in watching:
            task.cancel()
        models.stopping.set()
        http_server.should_exit = True
        drain_end = time.monotonic() + limits.drain
        expiry = asyncio.get_running_loop().call_later(limits.drain, models.expire_requests)
        await asyncio.gather(open_calls.stop(grpc_server, limits.drain + _REFUSAL_SECONDS), http_task)
        expiry.cancel()
    return control.close(max(0.0, drain_end - time.monotonic()))


async def _wait_for_end(models: ServedModels) -> None:
    """Wait until a model will answer no requests any more."""
    while not any(model.has_ended() for model in models.serving):
        await asyncio.sleep(_WATCH_SECONDS)


def _create_http_server(control: ModelControl, security: ServerSecurity) -> uvicorn.Server:
    """The HTTP server, not started yet."""
    limits = control.models.limits
    config = uvicorn.Config(
        RestService(control, security.check_token).application(),
        # Based on h11, which bounds the size of a request's head. Uvicorn prefers httptools where it is installed, which does not.
        http=functools.partial(LimitedConnection, limits=limits),  # type: ignore[arg-type]
        # A connection that becomes a WebSocket would have no limits.
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(limits.drain + _REFUSAL_SECONDS),
    )
    tls_context = None if security.tls is None else security.tls.context
    return _UvicornServer(config, tls_context, limits.first_request)


def _create_grpc_server(
    control: ModelControl, addresses: ServerAddresses, open_calls: OpenCalls, security: ServerSecurity
) -> tuple[grpc.aio.Server, int]:
    """The gRPC server, not started yet, and its port."""
    models = control.models
    options = [
        ("grpc.max_receive_message_length", models.limits.max_request_bytes),
        ("grpc.max_send_message_length", -1),
        # With it, a second server could listen at the same port, and take some of the requests.
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", models.limits.max_connections),
        # Until TLS and the preface of HTTP/2 are done.
        ("grpc.server_handshake_timeout_ms", math.ceil(1000 * models.limits.first_request)),
        # The client connects again with its next call.
        ("grpc.max_connection_idle_ms", 1000 * _KEEP_ALIVE_SECONDS),
    ]
    interceptors = [] if security.check_token is None else [TokenInterceptor(security.check_token, models.metrics)]
    server = grpc.aio.server(
        options=options,
        interceptors=interceptors,
        maximum_concurrent_rpcs=models.limits.max_connections,
    )
    methods = ParsedMethods(server, open_calls, models.limits.deadline, functools.partial(check_text_size, models))
    add_GRPCInferenceServiceServicer_to_server(GrpcService(control), methods)
    add_HealthServicer_to_server(HealthService(models, security.check_token), methods)
    service_names = (INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(service_names), methods)
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    address = f"{host}:{addresses.grpc_port}"
    try:
        if security.tls is not None:
            return server, server.add_secure_port(address, security.tls.grpc_credentials())
        return server, server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressError(f"{addresses.host} port {addresses.grpc_port}: cannot listen for gRPC: {error}") from None


def check_addresses(addresses: ServerAddresses) -> None:
    """Refuse addresses at which the server cannot listen, before models are loaded."""
    with _listen(addresses.host, addresses.http_port), _listen(addresses.host, addresses.grpc_port, "gRPC"):
        pass


def _listen(host: str, port: int, protocol: str = "HTTP") -> socket.socket:
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
