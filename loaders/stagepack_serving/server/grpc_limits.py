"""What clients over gRPC may hold: calls, of which those that wait for their clients make place for others, and connections."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from stagepack_serving.server.errors import RequestError, RequestStatus

_LOG: Final = logging.getLogger("stagepack.serve")
Result = TypeVar("Result")
# Calls on one connection; a client keeps further ones back. Without a limit, 1,100 streams of one connection took all places.
MAX_CONNECTION_CALLS: Final = 512
# Calls that grpc has received and Python has not begun. Beyond them, grpc cancels calls of any client. Its default of 1,000 is full after
# a tenth of a second of a rapid reset, which cancelled 150 of 160 calls of another client.
MAX_RECEIVED_CALLS: Final = 16 * MAX_CONNECTION_CALLS
# A call that its client ends within this time is taken back, not given up.
_TAKEN_BACK_SECONDS: Final = 0.1
# How many calls a host may take back at once, and in each second: they cost the server a tenth of its time.
_TAKEN_BACK_CALLS: Final = 500
_TAKEN_BACK_RATE: Final = 500
_MAX_HOSTS: Final = 1024
_RECEIVED_BYTES: Final = 1_048_576
_SOCKETS: Final = "/proc/self/fd"
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


class OpenCall:
    """A call, from its start until its answer is sent. It is idle while it waits for its client, and no request of it is being answered.

    Attributes:
        is_open: whether its answer is not sent yet, and its client is there.
    """

    def __init__(self, *, is_watch: bool, idle_seconds: float, count_refusal: Callable[[], None]) -> None:
        self.is_open = True
        self.start_time = time.monotonic()
        self._idle_start = self.start_time
        # A stream that only reports changes is idle all the time.
        self._is_watch = is_watch
        self._idle_seconds = None if is_watch else idle_seconds
        self._timer: asyncio.Timeout | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._work_count = 0
        self._is_ended = False
        self._count_refusal = count_refusal

    @property
    def is_idle(self) -> bool:
        """Whether the call waits for its client."""
        return self._timer is not None and not self._work_count and not self._is_ended

    @property
    def place_order(self) -> tuple[bool, float]:
        """The order in which idle calls make place for others: the longest idle first, and those that watch the server last."""
        return self._is_watch, self._idle_start

    def end_idle(self) -> None:
        """End the call, which is idle, for another one."""
        self._set_timer(0)
        self._is_ended = True

    async def wait(self, client: Awaitable[Result]) -> Result:
        """Wait for the client, while the call is idle no longer than the limit."""
        try:
            async with asyncio.timeout(None) as self._timer:
                self._begin_idle()
                return await client
        except TimeoutError:
            if self._is_ended:
                self._count_refusal()
                message = "the call was idle, and its place is needed for another one: ask again"
                raise RequestError(RequestStatus.BUSY, message) from None
            raise RequestError(RequestStatus.TOO_LATE, "the request was not complete before the deadline") from None
        finally:
            self._timer = None
            self._is_ended = False  # its message may have come at the moment at which it was ended, and is answered

    def bound_reading(self, peer: str, seconds: float) -> None:
        """End the connection of a client that does not read the answer in time: grpc can end no call whose method has ended."""
        # A small answer waits too: a client may have said that it reads nothing (SETTINGS_INITIAL_WINDOW_SIZE of HTTP/2).
        self._reading_timer = asyncio.get_running_loop().call_later(seconds, end_connection, peer)

    def end(self) -> None:
        """Take note that the answer is sent, or the client gone."""
        self.is_open = False
        if self._reading_timer is not None:
            self._reading_timer.cancel()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work on a request of a stream, or send a part of its answer."""
        self._work_count += 1
        self._set_timer(None)
        try:
            yield
        finally:
            self._work_count -= 1
            self._begin_idle()

    def _begin_idle(self) -> None:
        if not self._work_count:
            self._idle_start = time.monotonic()
            self._set_timer(self._idle_seconds)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None and not self._is_ended:
            end_time = None if seconds is None else asyncio.get_running_loop().time() + seconds
            with contextlib.suppress(RuntimeError):  # it has gone off
                self._timer.reschedule(end_time)


class OpenCalls:
    """The calls of a server: at most so many, besides calls for its health, which take no longer than their messages."""

    def __init__(self, most_calls: int) -> None:
        self._most_calls = most_calls
        self._calls: dict[OpenCall, None] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def add(self, call: OpenCall, *, is_health: bool) -> None:
        """Give a call a place, if need be the place of the longest idle call, which ends."""
        if len(self._calls) >= self._most_calls:
            idle_call = min(
                (each for each in self._calls if each.is_idle), key=lambda each: each.place_order, default=None
            )
            if idle_call is not None:
                idle_call.end_idle()
            elif not is_health:
                raise RequestError(RequestStatus.BUSY, f"{len(self._calls)} calls are open already: try again later")
        self._calls[call] = None
        self._is_empty.clear()

    def remove(self, call: OpenCall) -> None:
        """Free the place of a call that has ended."""
        call.end()
        self._calls.pop(call, None)
        if not self._calls:
            self._is_empty.set()

    def __len__(self) -> int:
        return len(self._calls)

    async def wait_until_empty(self) -> None:
        """Wait until all calls have ended."""
        await self._is_empty.wait()


@dataclass(slots=True)
class _TakenBack:
    """How many calls a host has taken back, less those that it may."""

    count: float
    time: float
    ended_peer: str = ""


class ResetGuard:
    """Ends connections on which calls are begun and taken back without end: HTTP/2 rapid reset, CVE-2023-44487.

    Envoy has this limit by connection. This one is by host: a client that connects again would have as many calls again. What grpc has
    received of a connection when it is closed, some 500 calls, still reaches the server.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, _TakenBack] = {}

    def count(self, call: OpenCall, peer: str) -> None:
        """Count a call that its client has ended."""
        now = time.monotonic()
        if now - call.start_time > _TAKEN_BACK_SECONDS:
            return
        host = peer.rpartition(":")[0]
        if len(self._hosts) >= _MAX_HOSTS:
            self._hosts = {other: state for other, state in self._hosts.items() if now - state.time < 1}
        state = self._hosts.setdefault(host, _TakenBack(0, now))
        state.count = min(max(0.0, state.count - _TAKEN_BACK_RATE * (now - state.time)) + 1, 2 * _TAKEN_BACK_CALLS)
        state.time = now
        if state.count > _TAKEN_BACK_CALLS and peer != state.ended_peer:
            state.ended_peer = peer
            _LOG.warning("%s: the connection is closed: its client takes calls back without end", peer)
            end_connection(peer)


def end_connection(peer: str) -> None:
    """Close a connection, named as grpc names it, such as ``ipv4:10.0.0.1:50000``. grpc itself has no way to."""
    address = _address(*urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[::2])
    for descriptor in map(int, os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else ()):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family in _FAMILIES and _address(*connection.getpeername()[:2]) == address:
                        connection.shutdown(socket.SHUT_RDWR)
                        # grpc would go on with what the kernel has received already.
                        while connection.recv(_RECEIVED_BYTES, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                            pass


def _address(host: str, port: int | str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """An address whose form does not depend on whether the socket takes both versions of IP."""
    address = ipaddress.ip_address(host.strip("[]"))
    return getattr(address, "ipv4_mapped", None) or address, int(port)
