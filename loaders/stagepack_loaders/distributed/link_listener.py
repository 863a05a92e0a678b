"""How processes of one machine find and connect to each other."""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.local_links import LARGEST_HEAD, LinkReceiver, LinkSender, LocalLinks
from stagepack_loaders.distributed.process_group import ConnectionLostError
from stagepack_loaders.distributed.route_layout import head_capacity
from stagepack_loaders.distributed.routes import Route
from stagepack_loaders.distributed.shared_blocks import UnusedBytes

_ROUTE_WORD: Final = struct.Struct("<q")
_CONNECT_SECONDS: Final = 60.0
_ACCEPT_SECONDS: Final = 0.1
_FIRST_MESSAGE_SECONDS: Final = 5.0  # it is sent right after the connection
_PEER_CREDENTIALS: Final = struct.Struct("3i")


def machine_id() -> str:
    """Return what is alike in processes that can share memory by sockets: machine, network namespace and user; empty if none can."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
        os.close(os.memfd_create("stagepack"))
    except (OSError, AttributeError):  # no Linux, or forbidden
        return ""
    return f"{boot_id} {network} {os.getuid()}"


class LinkListener:
    """Where other processes of this machine connect.

    Attributes:
        name: the name of its socket.
    """

    def __init__(self) -> None:
        self.name = ""
        if machine_id():
            self.name = f"stagepack-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind(f"\0{self.name}")  # no file
            self._socket.listen()
            self._socket.settimeout(_ACCEPT_SECONDS)

    def accept(self) -> tuple[int, socket.socket] | None:
        """Accept a connection.

        The result is the number of its route, and the connection; None if there was none for a moment.
        """
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        except OSError as error:
            raise ConnectionLostError(f"no connection of another process can be accepted: {error}") from None
        connection.settimeout(_FIRST_MESSAGE_SECONDS)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, user_id, _ = _PEER_CREDENTIALS.unpack(credentials)
        try:
            first_message = connection.recv(_ROUTE_WORD.size) if user_id == os.getuid() else b""
        except OSError:
            first_message = b""
        if len(first_message) != _ROUTE_WORD.size:
            connection.close()
            return None
        connection.settimeout(None)
        return _ROUTE_WORD.unpack(first_message)[0], connection

    def close(self) -> None:
        """Accept no more connections."""
        if self.name:
            self._socket.close()


def connect_link(name: str, route_number: int) -> socket.socket:
    """Connect to the listener of another process, for a route."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{name}")
        connection.send(_ROUTE_WORD.pack(route_number))
    except OSError as error:
        connection.close()
        raise ConnectionLostError(str(error)) from None
    return connection


def find_local_routes(routes: Sequence[Route], machines: Sequence[str], symbols: Sequence[Symbol]) -> frozenset[Route]:
    """Return the routes between processes of one machine. Computed alike by every process."""
    return frozenset(
        route
        for route in routes
        if machines[route.source_rank]
        and machines[route.source_rank] == machines[route.target_rank]
        and head_capacity(route.edges, symbols) <= LARGEST_HEAD
    )


def connect_links(
    listener: LinkListener,
    listener_names: Sequence[str],
    rank: int,
    routes: Sequence[Route],
    local_routes: frozenset[Route],
    symbols: Sequence[Symbol],
    check: Callable[[], None],
) -> LocalLinks:
    """Connect the local routes of a process."""
    links = LocalLinks(senders={}, receivers={})
    with contextlib.ExitStack() as failure:
        failure.callback(links.close)
        expected_routes, unused_bytes = {}, UnusedBytes()
        for route_number, route in enumerate(routes):
            if route in local_routes and route.source_rank == rank:
                connection = connect_link(listener_names[route.target_rank], route_number)
                links.senders[route] = LinkSender(connection, unused_bytes)
            elif route in local_routes and route.target_rank == rank:
                expected_routes[route_number] = route
        deadline = time.monotonic() + _CONNECT_SECONDS
        while expected_routes:
            check()
            if time.monotonic() > deadline:
                raise ConnectionLostError("a process of this machine has not connected")
            if (accepted := listener.accept()) is None:
                continue
            route_number, connection = accepted
            if (accepted_route := expected_routes.pop(route_number, None)) is None:
                connection.close()
                continue
            capacity = head_capacity(accepted_route.edges, symbols)
            links.receivers[accepted_route] = LinkReceiver(connection, capacity)
        failure.pop_all()
    return links
