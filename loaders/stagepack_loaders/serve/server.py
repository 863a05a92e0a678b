"""REST and gRPC on one event loop, from the first request to the last."""

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import uvicorn
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from stagepack_loaders.serve.errors import AddressError
from stagepack_loaders.serve.models import Models
from stagepack_loaders.serve.rest import RestServer
from stagepack_loaders.serve.rpc import ParsesRequests, RpcServer

_BACKLOG = 2048


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


async def serve(models: Models, addresses: Addresses, listening: Callable[[Addresses], None]) -> None:
    """Answer requests until SIGTERM or SIGINT; then finish those that were accepted. `listening` is told where, once it does.

    SIGTERM is what orchestrators send: for a while more requests are taken, while clients hear that the server is not ready and get
    their connections closed with their answers. A second signal ends the process at once.

    Raises:
        AddressError: it cannot listen there.
    """
    limits = models.limits
    with _listen(addresses.host, addresses.http_port) as http:
        rpc, grpc_port = _rpc_server(models, addresses)
        config = uvicorn.Config(
            RestServer(models).application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(limits.drain),
        )
        rest = _Uvicorn(config)
        stop = _signals()
        await rpc.start()
        running = asyncio.create_task(rest.serve(sockets=[http]))
        listening(Addresses(host=addresses.host, http_port=http.getsockname()[1], grpc_port=grpc_port))
        if await stop == signal.SIGTERM:
            models.ready = False
            await asyncio.sleep(limits.linger)
        models.ready = False
        rest.should_exit = True
        await asyncio.gather(rpc.stop(limits.drain), running)
    for model in models:
        model.close()


def _rpc_server(models: Models, addresses: Addresses) -> tuple[grpc.aio.Server, int]:
    """The gRPC server, which does not run yet, and its port."""
    options = [
        ("grpc.max_receive_message_length", models.limits.body),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # else a second server would share the port, and take its requests
    ]
    server = grpc.aio.server(options=options, interceptors=[ParsesRequests()])
    add_GRPCInferenceServiceServicer_to_server(RpcServer(models), server)
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    try:
        return server, server.add_insecure_port(f"{host}:{addresses.grpc_port}")
    except RuntimeError as error:
        raise AddressError(
            f"{addresses.host} port {addresses.grpc_port}: cannot listen there for gRPC: {error}"
        ) from None


def _signals() -> asyncio.Future[signal.Signals]:
    """The first signal to stop, when it comes; the next one does what signals do."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: signal.Signals) -> None:
        came.set_result(number)
        for one in numbers:
            loop.remove_signal_handler(one)

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    return came


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
