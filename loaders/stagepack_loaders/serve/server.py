"""REST and gRPC on one event loop, from the first request to the last."""

import asyncio
import contextlib
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

    Raises:
        AddressError: it cannot listen there.
    """
    http = _listen(addresses.host, addresses.http_port)
    options = [
        ("grpc.max_receive_message_length", models.limits.body),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    rpc = grpc.aio.server(options=options, interceptors=[ParsesRequests()])
    add_GRPCInferenceServiceServicer_to_server(RpcServer(models), rpc)
    try:
        grpc_port = rpc.add_insecure_port(f"{_bracketed(addresses.host)}:{addresses.grpc_port}")
    except RuntimeError as error:
        http.close()
        raise AddressError(f"{addresses.host} port {addresses.grpc_port}: {error}") from None
    rest = _Uvicorn(
        uvicorn.Config(
            RestServer(models).application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=round(models.limits.drain),
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await rpc.start()
    running = asyncio.create_task(rest.serve(sockets=[http]))
    listening(Addresses(host=addresses.host, http_port=http.getsockname()[1], grpc_port=grpc_port))
    await stop.wait()
    models.ready = False
    rest.should_exit = True
    await asyncio.gather(rpc.stop(models.limits.drain), running)
    for model in models:
        model.close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Its protocol is named, else asyncio would leave Nagle's algorithm on, which delays answers by 40 ms."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise AddressError(f"{host} port {port}: {error.strerror or error}") from None
    return listener


def _bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host
