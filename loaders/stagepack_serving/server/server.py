"""REST and gRPC on one event loop, from the first request to the last."""

import asyncio
import contextlib
import functools
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import uvicorn
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from stagepack_serving.server.errors import AddressError
from stagepack_serving.server.models import Models
from stagepack_serving.server.rest import RestServer
from stagepack_serving.server.rest_connections import Connection
from stagepack_serving.server.rpc import ParsesRequests, RpcServer

_BACKLOG = 2048
_ERRORS = 2  # seconds, for requests that were given up to say so
_KEEP_ALIVE = 75  # seconds, longer than clients and proxies keep a connection without a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server listens. Port 0 takes any that is free.

    Attributes:
        host: a name or number of this machine.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001


class _Uvicorn(uvicorn.Server):
    """Uvicorn, whose signals are handled here: for gRPC too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(models: Models, addresses: Addresses, listening: Callable[[Addresses], None]) -> bool:
    """Answer requests until SIGTERM, SIGHUP or SIGINT; then finish those that were accepted. `listening` is told where, once it does.

    Returns whether all is done; if not, threads still work on requests that were given up, and only the end of the process ends them.

    SIGTERM is what orchestrators send, SIGHUP what a terminal sends that closes: for a while more requests are taken, while clients
    hear that the server is not ready and get their connections closed with their answers. A second SIGTERM or SIGINT ends the process
    at once.

    Raises:
        AddressError: it cannot listen there.
    """
    limits = models.limits
    with _listen(addresses.host, addresses.http_port) as http:
        rpc, grpc_port = _rpc_server(models, addresses)
        config = uvicorn.Config(
            RestServer(models).application(),
            # On h11, which bounds what a request's head may take; httptools, which uvicorn would choose where it is, does not.
            http=functools.partial(Connection, most=limits.connections),  # type: ignore[arg-type]  # it makes them
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(limits.drain + _ERRORS),
        )
        rest = _Uvicorn(config)
        stop = _stop_signal()
        await rpc.start()
        running = asyncio.create_task(rest.serve(sockets=[http]))
        listening(Addresses(host=addresses.host, http_port=http.getsockname()[1], grpc_port=grpc_port))
        if await stop != signal.SIGINT:
            models.ready = False
            await asyncio.sleep(limits.linger)
        models.ready = False
        models.stopping.set()
        rest.should_exit = True
        until = time.monotonic() + limits.drain
        giving_up = asyncio.get_running_loop().call_later(limits.drain, models.give_up)
        await asyncio.gather(rpc.stop(limits.drain + _ERRORS), running)
        giving_up.cancel()
    return all([model.close(max(0.0, until - time.monotonic())) for model in models])


def _rpc_server(models: Models, addresses: Addresses) -> tuple[grpc.aio.Server, int]:
    """The gRPC server, which does not run yet, and its port."""
    options = [
        ("grpc.max_receive_message_length", models.limits.body),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # else a second server would share the port, and take its requests
    ]
    server = grpc.aio.server(
        options=options, interceptors=[ParsesRequests()], maximum_concurrent_rpcs=models.limits.connections
    )
    add_GRPCInferenceServiceServicer_to_server(RpcServer(models), server)
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    try:
        return server, server.add_insecure_port(f"{host}:{addresses.grpc_port}")
    except RuntimeError as error:
        raise AddressError(
            f"{addresses.host} port {addresses.grpc_port}: cannot listen there for gRPC: {error}"
        ) from None


def _stop_signal() -> asyncio.Future[signal.Signals]:
    """The first signal that stops the server, when it arrives.

    After SIGTERM or SIGINT, the next one of them has its default action, which ends the process at once. A hang-up never does: a shell
    and the kernel both send SIGHUP when a terminal closes, and systemd sends it right after SIGTERM (``SendSIGHUP=``). A server that
    was started with SIGHUP ignored, as by nohup, keeps ignoring it.
    """
    loop = asyncio.get_running_loop()
    first_signal: asyncio.Future[signal.Signals] = loop.create_future()
    ending = (signal.SIGTERM, signal.SIGINT)

    def stop(received: signal.Signals) -> None:
        if not first_signal.done():
            first_signal.set_result(received)
        if received in ending:
            for number in ending:
                loop.remove_signal_handler(number)

    for number in ending:
        loop.add_signal_handler(number, stop, number)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP)
    return first_signal


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Its protocol is named, else asyncio would leave Nagle's algorithm on, which delays answers by 40 ms."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise AddressError(f"{host} port {port}: cannot listen there for HTTP: {error.strerror or error}") from None
    return listener
