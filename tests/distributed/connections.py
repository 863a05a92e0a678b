"""Routes between two ends in one process, between machines or on one."""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol
from stagepack.torch_internals import gloo_process_group
from stagepack_loaders.distributed.device_groups import Connections, DeviceChannel
from stagepack_loaders.distributed.local_links import LinkReceiver, LinkSender, LocalLinks
from stagepack_loaders.distributed.packing import PackedValues, pack_values
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, Transfer
from stagepack_loaders.distributed.routes import (
    ControlKind,
    ControlMessage,
    RequestLayouts,
    Route,
    encode_sizes,
    head_capacity,
)
from stagepack_loaders.distributed.shared_blocks import UnusedBytes
from stagepack_loaders.distributed.transfers import RouteReceivers, RouteSenders

ROWS = Symbol(name="rows", min=0, max=2**20)
FOUND = Symbol(name="found", min=0, max=8)  # depends on data
SYMBOLS = (ROWS, FOUND)
Connect = Callable[..., "Connection"]


def edge_of(name: str, dtype: str, shape: Sequence[Any]) -> Edge:
    return Edge(name=name, dtype=dtype, shape=tuple(shape), producer=None, consumers=(0,))


class Connection:
    """A route from rank 0 to rank 1."""

    tags = iter(range(0, 10_000))

    def __init__(
        self,
        groups: tuple[ProcessGroup, ProcessGroup],
        edges: Sequence[Edge],
        *,
        is_local: bool,
        channels: Sequence[DeviceChannel] = (),
    ) -> None:
        self.route = Route(
            source_stage=next(self.tags),
            source_rank=0,
            target_rank=1,
            edges=tuple(edges),
            joins_devices=bool(channels),
        )
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if is_local else ()
        self.sockets: tuple[socket.socket, ...] = pair
        senders, receivers = {}, {}
        if self.sockets:
            capacity = head_capacity(edges, SYMBOLS)
            senders[self.route] = LinkSender(self.sockets[0], UnusedBytes())
            receivers[self.route] = LinkReceiver(self.sockets[1], capacity)
        self.links = links = LocalLinks(senders=senders, receivers=receivers)
        self.group = groups[0]
        self.layouts = RequestLayouts([self.route], SYMBOLS, set(senders))
        ends = [
            Connections(group=group, links=links, channels={self.route: channels[rank]} if channels else {})
            for rank, group in enumerate(groups)
        ]
        self.senders = RouteSenders(ends[0], [self.route])
        self.receivers = RouteReceivers(ends[1], [self.route], SYMBOLS)
        self.number = 0

    def send(self, message: ControlMessage, packed_values: PackedValues) -> list[Transfer]:
        return self.senders.send(self.route, message, packed_values)

    def send_words(self, words: Sequence[int]) -> None:
        """Send the words of another program."""
        memory = torch.frombuffer(bytearray(struct.pack(f"<{len(words)}q", *words)), dtype=torch.uint8)
        if self.sockets:
            self.sockets[0].sendmsg([bytes(32), memory.numpy().tobytes()])
        else:
            self.group.send(memory, 1, self.route.head_tag).wait()

    def message(self, rows: int = 0) -> ControlMessage:
        self.number += 1
        size_words = encode_sizes({"rows": rows}, SYMBOLS)
        return ControlMessage(kind=ControlKind.RUN, number=self.number, size_words=size_words)

    def pass_on(self, values: dict[str, Any], rows: int = 0, *, copies: bool = False) -> dict[str, Any]:
        message = self.message(rows)
        layout = self.layouts.find(message.size_words)
        packed_values = pack_values(layout.of_route[self.route], values, SYMBOLS, copies=False)
        self.receivers.post_bodies(layout)
        transfers = self.send(message, packed_values)
        assert self.receivers.next_message() == message
        received = self.receivers.values(layout, copies=copies)
        wait_for(transfers)
        return received

    def pass_x(self, x: torch.Tensor, *, copies: bool = False) -> torch.Tensor:
        received: torch.Tensor = self.pass_on({"x": x}, len(x), copies=copies)["x"]
        return received

    def send_x(self, x: torch.Tensor) -> None:
        message = self.message(len(x))
        layout = self.layouts.find(message.size_words).of_route[self.route]
        self.send(message, pack_values(layout, {"x": x}, SYMBOLS, copies=False))


def wait_for(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def gloo_channels() -> list[DeviceChannel]:
    """The two ends of a channel between devices, over gloo."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined] # public, and not in its type hints

    def connect_end(rank: int) -> DeviceChannel:
        backend = gloo_process_group(store, rank, 2, timedelta(seconds=12), LOOPBACK)
        channel = DeviceChannel(backend, rank, torch.device("cpu"))
        channel.connect()
        return channel

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(connect_end, range(2)))


@contextlib.contextmanager
def connecting(
    groups: tuple[ProcessGroup, ProcessGroup], *, is_local: bool, joins_devices: bool = False
) -> Iterator[Connect]:
    """Connect routes; close them at the end."""
    connections: list[Connection] = []

    def connect_route(edges: Sequence[Edge] = ()) -> Connection:
        channels = gloo_channels() if joins_devices else []
        edges = edges or [edge_of("x", "float32", ["rows"])]
        connections.append(Connection(groups, edges, is_local=is_local, channels=channels))
        return connections[-1]

    yield connect_route
    for connection in connections:
        for end in connection.sockets:
            end.close()
