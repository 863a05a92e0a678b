"""Links are routes between two processes of one machine: heads go by a socket, bodies through memory that both share.

Gloo would send bodies through sockets too, in turns of its own threads; when all cores compute, each turn waits for a core.
"""

import contextlib
import ctypes
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.process_group import MessageHead, machine_id
from stagepack_loaders.distributed.routes import ConnectionLostError, Route, aligned, head_capacity
from stagepack_loaders.distributed.shared_blocks import ReadBlocks, UnusedBytes, WrittenBlocks

# The block with the bodies of a message: its number, the bytes that they take, its size if it is new; then the number of a block that
# is dropped. 0 for none.
_BLOCK_WORDS: Final = struct.Struct("<4q")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(array("i").itemsize)
# As integers: operators of the enumerations are Python functions, which take as long as all else that a message needs.
_MESSAGE_CUT: Final = int(socket.MSG_TRUNC)
_ANCILLARY_CUT: Final = int(socket.MSG_CTRUNC)
# Messages may be as large as half of the memory that the system gives a socket by default.
LARGEST_HEAD: Final = 2**16 + 2**15
# Blocks of one route with tensors on them.
_MOST_BLOCKS: Final = 64
# How many messages with bodies are taken, then the numbers of the blocks that are returned.
_ACKNOWLEDGEMENT_WORDS: Final = 1 + 2 * _MOST_BLOCKS
_ROUTE_WORD: Final = struct.Struct("<q")
_CONNECT_SECONDS: Final = 60.0
_ACCEPT_SECONDS: Final = 0.1
_FIRST_MESSAGE_SECONDS: Final = 5.0  # it is sent right after the connection
_PEER_CREDENTIALS: Final = struct.Struct("3i")


class LinkSender:
    """Sends what one route brings. One thread at a time uses it."""

    def __init__(self, connection: socket.socket, unused_bytes: UnusedBytes) -> None:
        self.connection = connection
        self.blocks = WrittenBlocks(unused_bytes)
        self._untaken_count = 0  # of messages with bodies
        self._is_ended = False
        self._acknowledgement = array("q", [0] * _ACKNOWLEDGEMENT_WORDS)
        self._writable_poll = select.poll()
        self._writable_poll.register(connection, select.POLLOUT)

    def has_room(self) -> bool:
        """Whether the other process has taken so many messages that `send` would not wait."""
        while self._read_acknowledgement():
            pass
        return self.blocks.used_count < _MOST_BLOCKS and bool(self._writable_poll.poll(0))

    def send(self, head: memoryview, bodies: Sequence[torch.Tensor]) -> None:
        """Send a head and bodies, which are copied before this returns."""
        block_number = byte_count = new_bytes = 0
        descriptor = None
        if bodies or self.blocks.used_count:
            while self._read_acknowledgement():
                pass
        if bodies:
            byte_count = sum(aligned(body.nbytes) for body in bodies)
            block_number, address, descriptor = self._take_block(byte_count)
            new_bytes = 0 if descriptor is None else os.fstat(descriptor).st_size
        for body in bodies:
            ctypes.memmove(address, body.data_ptr(), body.nbytes)
            address += aligned(body.nbytes)
        dropped_number = self.blocks.drop_surplus()
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        try:
            self.connection.sendmsg(
                [_BLOCK_WORDS.pack(block_number, byte_count, new_bytes, dropped_number), head], rights
            )
        except OSError as error:
            raise ConnectionLostError(str(error)) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if bodies:
            self._untaken_count += 1

    def limit_untaken(self, message_count: int) -> None:
        """Wait until the other process has taken all messages with bodies but so many. Those without take no memory worth a wait."""
        self._wait_until(lambda: self._untaken_count <= message_count)

    def finish(self) -> None:
        """Return when the other process has taken all messages and ended the route, or has gone.

        If this process closed the connection before, with acknowledgements that it has not read, the other one would lose messages.
        """
        self._wait_until(lambda: self._is_ended)

    def _take_block(self, byte_count: int) -> tuple[int, int, int | None]:
        """Take a block; if there are too many, or the system has no more files or memory, wait for one that the receiver returns."""
        most_blocks = _MOST_BLOCKS
        while True:
            self._wait_until(lambda limit=most_blocks: self.blocks.used_count < limit)  # type: ignore[misc]
            try:
                return self.blocks.take(byte_count)
            except OSError as error:
                most_blocks = self.blocks.used_count
                if not most_blocks:
                    raise ConnectionLostError(f"no memory can be shared with the other process: {error}") from None

    def _wait_until(self, has_come: Callable[[], bool]) -> None:
        """Read acknowledgements until they have brought something."""
        poll = None
        while not has_come():
            if self._is_ended:
                raise ConnectionLostError("the connection is closed")
            if self._read_acknowledgement() or self._is_ended:
                continue
            if poll is None:
                poll = select.poll()
                poll.register(self.connection, select.POLLIN)
            poll.poll()

    def _read_acknowledgement(self) -> bool:
        """Read what the receiver has taken and which blocks it has returned, if that has come."""
        try:
            byte_count = self.connection.recv_into(self._acknowledgement, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            byte_count = 0
        if not byte_count:
            self._is_ended = True
            return False
        self._untaken_count -= self._acknowledgement[0]
        try:
            for block_number in self._acknowledgement[1 : byte_count // self._acknowledgement.itemsize]:
                self.blocks.take_back(block_number)
        except ValueError as error:
            raise ConnectionLostError(str(error)) from None
        return True


class LinkReceiver:
    """Receives what one route brings. One thread uses it."""

    def __init__(self, connection: socket.socket, capacity: int) -> None:
        self.connection = connection
        self._capacity = capacity
        self.blocks = ReadBlocks()
        self._words = bytearray(_BLOCK_WORDS.size)
        self._taken_count = 0  # of messages with bodies that are not acknowledged yet

    def receive(self) -> tuple[MessageHead, torch.Tensor | None]:
        """Wait for the next message; return its head, and its bodies as one tensor of bytes, or None if it has none."""
        head = MessageHead(self._capacity)
        try:
            self._acknowledge()
            size, ancillary, flags, _ = self.connection.recvmsg_into([self._words, head.view], _ANCILLARY_BYTES)
            if not size:
                raise ConnectionLostError("the connection is closed")
            if flags & _MESSAGE_CUT:
                raise ConnectionLostError(
                    f"expected a head of at most {self._capacity} bytes: another program has connected"
                )
            if flags & _ANCILLARY_CUT:
                raise ConnectionLostError("this process has too many open files to share memory with another one")
            block_number, byte_count, new_bytes, dropped_number = _BLOCK_WORDS.unpack(self._words)
            for _, _, content in ancillary:
                descriptor = array("i", content)[0]
                try:
                    self.blocks.add(block_number, descriptor, new_bytes)
                finally:
                    os.close(descriptor)
            if dropped_number:
                self.blocks.drop(dropped_number)
            bodies = self._bodies(block_number, byte_count) if block_number else None
            self._taken_count = int(bodies is not None)
        except (OSError, ValueError) as error:
            raise ConnectionLostError(str(error)) from None
        return head, bodies

    def _bodies(self, block_number: int, byte_count: int) -> torch.Tensor:
        bodies = self.blocks.tensor(block_number)[:byte_count]
        # The caller may keep what it gets, and a sender without blocks waits.
        return bodies.clone() if self.blocks.used_count > _MOST_BLOCKS // 2 else bodies

    def end(self) -> None:
        """Tell the sender that no more messages are expected: the last one is taken."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def _acknowledge(self) -> None:
        """Tell the sender that a message with bodies is taken, and which blocks no tensor is on any more."""
        unused_numbers = self.blocks.find_unused()
        if self._taken_count or unused_numbers:
            self.connection.send(array("q", [self._taken_count, *unused_numbers]))
            self._taken_count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLinks:
    """The routes of one process to and from others of its machine."""

    senders: dict[Route, LinkSender]
    receivers: dict[Route, LinkReceiver]

    def abort(self) -> None:
        """End all connections. Whatever waits for them, here or there, ends with `ConnectionLostError`."""
        for link in self._all():
            with contextlib.suppress(OSError):
                link.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, when no thread uses them, and give back memory that no tensor is on."""
        for link in self._all():
            link.connection.close()
            link.blocks.clear()

    def _all(self) -> Sequence[LinkSender | LinkReceiver]:
        return [*self.senders.values(), *self.receivers.values()]


class LinkListener:
    """Where other processes of this machine connect, by the name of its socket; without a name where none can."""

    def __init__(self) -> None:
        self.name = ""
        if machine_id():
            self.name = f"stagepack-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind(f"\0{self.name}")  # no file
            self._socket.listen()
            self._socket.settimeout(_ACCEPT_SECONDS)

    def accept(self) -> tuple[int, socket.socket] | None:
        """Accept a connection; return the number of its route with it, or None if there was none for a moment."""
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
