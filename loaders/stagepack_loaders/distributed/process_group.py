"""A group of processes that exchange bytes: gloo of torch.distributed, without its default group.

An application may have a process group of its own, and several pipelines; no group sees the others.
"""

import contextlib
import ctypes
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, and not in its type hints
from torch.distributed.distributed_c10d import PrefixStore, Store

from stagepack.errors import GroupError, first_line
from stagepack.format.threads import start_in_thread
from stagepack.torch_internals import gloo_process_group
from stagepack_loaders.distributed.routes import ConnectionLostError, ValueLayout

# Gloo closes all connections of a process when one wait of it times out, so waits do not; lost processes are found by their heartbeats.
NO_TIMEOUT = timedelta(days=365)
_CONNECT_TIMEOUT = timedelta(seconds=60)
# Gloo waits five times as long for a connection.
_GLOO_TIMEOUT = _CONNECT_TIMEOUT / 5
_CHECK_SECONDS = 0.1
_SHORTEST_TIMEOUT = timedelta(milliseconds=1)
_ABORT_TAG = 2**30  # of messages that are never sent
LOOPBACK = "127.0.0.1"
Result = TypeVar("Result")


def allocate(byte_count: int) -> torch.Tensor:
    """Return memory for bytes, aligned for every dtype."""
    return torch.empty(byte_count, dtype=torch.uint8)


class MessageHead:
    """What goes first on a route for a request or command: words, and the data of small values. `view` is its `memory`."""

    def __init__(self, byte_count: int) -> None:
        self.memory = allocate(byte_count)
        self.view = memoryview(self.memory.numpy())  # type: ignore[arg-type] # numpy arrays are buffers
        self._address = self.memory.data_ptr()

    def write(self, offset: int, words: Sequence[int]) -> None:
        """Write words at an offset in bytes."""
        struct.pack_into(f"<{len(words)}q", self.view, offset, *words)

    def read(self, offset: int, count: int) -> tuple[int, ...]:
        """Return the words at an offset in bytes."""
        return struct.unpack_from(f"<{count}q", self.view, offset)

    def write_data(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy the bytes of a contiguous tensor to an offset in bytes."""
        ctypes.memmove(self._address + offset, tensor.data_ptr(), tensor.nbytes)

    def data(self, layout: ValueLayout) -> torch.Tensor:
        """The data of a value; empty for a value without elements that is not there."""
        if layout.data_offset is None or not layout.byte_count:
            return allocate(0)
        # Its storage is its own bytes alone, which is what is written when a caller saves it.
        return torch.frombuffer(self.view, dtype=torch.uint8, count=layout.byte_count, offset=layout.data_offset)


def open_store(host: str = LOOPBACK, port: int | None = None) -> Any:
    """Return a store for the processes of a group.

    host: the address of the machine that has the store, by which the others reach it; only there, the store accepts connections.
    port: the port of the store that another process has opened; None to open one. Its ``port`` is then a free one.
    """
    if port is not None:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
    # By itself, the store would listen on all interfaces.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        free_port = listener.getsockname()[1]
        return TCPStore(
            host,
            free_port,
            is_master=True,
            wait_for_workers=False,
            timeout=_CONNECT_TIMEOUT,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def finished(function: Callable[[], Result], check: Callable[[], None]) -> Result:
    """Return the result of a function that waits for other processes where nothing wakes it: in a thread that may outlive this call.

    check: called meanwhile; raises when there is no use in waiting.
    """
    result = start_in_thread(function, "connect")
    while not wait([result], _CHECK_SECONDS).done:
        check()
    return result.result()


def close_connections(ranks: Iterable[int], receive: Callable[[int, int], Any]) -> None:
    """Close the connections of gloo to some processes. It has no call for that, but does so when a wait times out.

    receive: posts a receive from a rank with a tag; returns its work.
    """
    for rank in ranks:
        with contextlib.suppress(RuntimeError):
            receive(rank, _ABORT_TAG).wait(_SHORTEST_TIMEOUT)


class Transfer:
    """A receive or send of gloo that is under way, with the memory that it uses."""

    def __init__(self, work: Any, memory: torch.Tensor) -> None:
        self._work = work
        self._memory = memory

    def wait(self) -> None:
        """Return when the bytes have arrived."""
        try:
            self._work.wait(NO_TIMEOUT)
        except RuntimeError as error:
            raise ConnectionLostError(gloo_reason(error)) from None


class SentMessages:
    """Messages under way, which keep the memory that they are sent from, by the request that they belong to.

    Gloo says of a send that it is finished only to who waits for it. So a message is waited for when its request is known to be answered.
    Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[int, Transfer]] = deque()
        self._lock = threading.Lock()

    def add(self, request_number: int, transfers: Sequence[Transfer]) -> None:
        """Keep messages of a request; requests come in the order of their numbers."""
        if transfers:
            with self._lock:
                self._messages.extend((request_number, transfer) for transfer in transfers)

    def finish(self, request_number: int | None = None) -> None:
        """Wait for the messages of all requests up to one, or of all requests."""
        while True:
            with self._lock:
                if not self._messages or (request_number is not None and self._messages[0][0] > request_number):
                    return
                _, transfer = self._messages.popleft()
            transfer.wait()


class ProcessGroup:
    """The connections of one process to all others of the group. Its methods may be called from any thread.

    `sent_bytes` counts what this process has sent.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, address: str | None, check: Callable[[], None] = lambda: None
    ) -> None:
        self.rank = rank
        self.size = size
        self.sent_bytes = 0
        # Gloo waits a minute for a process that has ended.
        self._backend: Any = finished(
            lambda: _connect(store, rank, size, address), check
        )  # closes connections when deleted

    def send(self, memory: torch.Tensor, target_rank: int, tag: int) -> Transfer:
        """Send bytes, without waiting until they arrive. The memory must not change before, and the message must be kept.

        Messages with one tag arrive in the order in which they were sent; the receiver knows their sizes.

        memory: a contiguous tensor with at least one element, on the host.
        """
        try:
            transfer = Transfer(self._backend.send([memory], target_rank, tag), memory)
        except RuntimeError as error:
            raise ConnectionLostError(gloo_reason(error)) from None
        self.sent_bytes += memory.nbytes
        return transfer

    def receive(self, memory: torch.Tensor, source_rank: int, tag: int) -> Transfer:
        """Post a receive of as many bytes as the memory has."""
        try:
            return Transfer(self._backend.recv([memory], source_rank, tag), memory)
        except RuntimeError as error:
            raise ConnectionLostError(gloo_reason(error)) from None

    def close(self) -> None:
        """Close all connections, when no thread uses them."""
        self._backend = None

    def abort(self) -> None:
        """Close all connections. Whatever waits for another process, here or there, ends with `ConnectionLostError`."""
        close_connections(
            set(range(self.size)) - {self.rank},
            lambda rank, tag: self._backend.recv([torch.empty(1, dtype=torch.uint8)], rank, tag),
        )


def _connect(store: Store, rank: int, size: int, address: str | None) -> Any:
    try:
        # Another connection: one on which a thread waits lets no other one in.
        own_store = store.clone()  # type: ignore[attr-defined] # public, and not in its type hints
        return gloo_process_group(PrefixStore("gloo", own_store), rank, size, _GLOO_TIMEOUT, address)
    except RuntimeError as error:
        reason = gloo_reason(error)
        if address == LOOPBACK:  # a process has ended
            raise ConnectionLostError(reason) from None
        raise GroupError(
            f"process {rank} on {host_name()} has no connection with all others, which look for it at "
            f"{address or 'the address of its name'}: {reason}; look for processes that have ended and for firewalls, or name the "
            "interface by GLOO_SOCKET_IFNAME"
        ) from None


def gloo_reason(error: object) -> str:
    """The first line of an error of gloo, which begins with the line of its code, and ends with advice."""
    return re.sub(r"^\[\S+\] |\. This is typically caused.*", "", first_line(error))


def host_name() -> str:
    """The name of this machine, for messages."""
    return socket.gethostname()


def machine_id() -> str:
    """Return what is alike in processes that can share memory by sockets: machine, network namespace and user; empty if none can."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
        os.close(os.memfd_create("stagepack"))
    except (OSError, AttributeError):  # no Linux, or forbidden
        return ""
    return f"{boot_id} {network} {os.getuid()}"
