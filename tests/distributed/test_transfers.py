"""What goes from process to process: tensors of every dtype and layout, memory that is used again, words of another program."""

import contextlib
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stagepack.errors import InputError
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.local_links import LinkReceiver, LinkSender, LocalLinks
from stagepack_loaders.distributed.packing import (
    PackedValues,
    ReceiveMemory,
    pack_command,
    pack_failure,
    pack_values,
)
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, Transfer, open_store
from stagepack_loaders.distributed.routes import (
    ConnectionLostError,
    ControlKind,
    ControlMessage,
    RequestLayouts,
    Route,
    encode_sizes,
    head_capacity,
)
from stagepack_loaders.distributed.shared_blocks import LARGEST_KEPT_BYTES, UnusedBytes
from stagepack_loaders.distributed.transfers import RouteReceivers, RouteSenders

ROWS = Symbol(name="rows", min=0, max=2**20)
FOUND = Symbol(name="found", min=0, max=8)  # depends on data
SYMBOLS = (ROWS, FOUND)
COMPLEX_OR_FLOAT = (torch.complex64, torch.complex128, torch.float64, torch.float32, torch.float16, torch.bfloat16)
Connect = Callable[..., "Connection"]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


@pytest.fixture(scope="module")
def groups() -> tuple[ProcessGroup, ProcessGroup]:
    """Two ends of one connection."""
    store = open_store(LOOPBACK)
    found: list[ProcessGroup] = []
    other_store = open_store(LOOPBACK, store.port)  # a client of its own: one that waits lets no other thread in
    other_end = threading.Thread(target=lambda: found.append(ProcessGroup(other_store, 1, 2, address=LOOPBACK)))
    other_end.start()
    first = ProcessGroup(store, 0, 2, address=LOOPBACK)
    other_end.join()
    return first, found[0]


@contextlib.contextmanager
def connecting(groups: tuple[ProcessGroup, ProcessGroup], *, is_local: bool) -> Iterator[Connect]:
    """Connect routes; close them at the end."""
    connections: list[Connection] = []

    def connect_route(edges: Sequence[Edge] = ()) -> Connection:
        connections.append(Connection(groups, edges or [edge_of("x", "float32", ["rows"])], is_local=is_local))
        return connections[-1]

    yield connect_route
    for connection in connections:
        for end in connection.sockets:
            end.close()


@pytest.fixture(params=[False, True], ids=["gloo", "link"])
def connect(request: pytest.FixtureRequest, groups: tuple[ProcessGroup, ProcessGroup]) -> Iterator[Connect]:
    """Connects routes, between machines or on one."""
    with connecting(groups, is_local=request.param) as connect_route:
        yield connect_route


@pytest.fixture
def link(groups: tuple[ProcessGroup, ProcessGroup]) -> Iterator[Connect]:
    """Connects routes on one machine."""
    with connecting(groups, is_local=True) as connect_route:
        yield connect_route


@contextlib.contextmanager
def waiting(function: Callable[[], None], seconds: float) -> Iterator[None]:
    """Assert that a call waits until the context has ended."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(seconds)
    assert thread.is_alive()
    yield
    thread.join(5)
    assert not thread.is_alive()


def edge_of(name: str, dtype: str, shape: Sequence[Any]) -> Edge:
    return Edge(name=name, dtype=dtype, shape=tuple(shape), producer=None, consumers=(0,))


class Connection:
    """A route from rank 0 to rank 1."""

    tags = iter(range(0, 10_000))

    def __init__(self, groups: tuple[ProcessGroup, ProcessGroup], edges: Sequence[Edge], *, is_local: bool) -> None:
        self.route = Route(source_stage=next(self.tags), source_rank=0, target_rank=1, edges=tuple(edges))
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
        self.senders = RouteSenders(groups[0], links, [self.route])
        self.receivers = RouteReceivers(groups[1], links, [self.route], SYMBOLS)
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
    """Wait until messages have arrived."""
    for transfer in transfers:
        transfer.wait()


def assert_same(found: Any, expected: Any) -> None:
    if not isinstance(expected, torch.Tensor):
        assert (type(found), found) == (type(expected), expected)
        return
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [*COMPLEX_OR_FLOAT, *INTEGERS], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 40_000])
def test_each_dtype_at_each_size(connect: Connect, dtype: torch.dtype, rows: int) -> None:
    name = str(dtype).removeprefix("torch.")
    connection = connect([edge_of("x", name, ["rows", 3]), edge_of("scalar", name, [])])
    x = torch.arange(rows * 3).reshape(rows, 3).to(dtype)
    received = connection.pass_on({"x": x, "scalar": torch.ones((), dtype=dtype)}, rows)
    assert_same(received["x"], x)
    assert_same(received["scalar"], torch.ones((), dtype=dtype))


def test_strides_conjugates_and_numbers(connect: Connect) -> None:
    values: dict[str, Any] = {
        "transposed": torch.arange(12.0).reshape(4, 3).T,
        "repeated": torch.arange(3.0).expand(4, 3),
        "conjugate": torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj(),
        "negative": torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj().imag,
        "steps": torch.arange(16.0)[::4],
        "count": 7,
        "factor": -0.5,
        "flag": True,
    }
    edges = [
        edge_of("transposed", "float32", [3, 4]),
        edge_of("repeated", "float32", [4, 3]),
        edge_of("conjugate", "complex64", [4]),
        edge_of("negative", "float32", [4]),
        edge_of("steps", "float32", [4]),
        edge_of("count", "symint", []),
        edge_of("factor", "symfloat", []),
        edge_of("flag", "symbool", []),
    ]
    received = connect(edges).pass_on(values)
    for name, value in values.items():
        if name in ("conjugate", "negative"):
            assert torch.equal(received[name], value)
        else:
            assert_same(received[name], value)


def test_sizes_that_depend_on_data(connect: Connect) -> None:
    connection = connect([edge_of("found", "int64", ["found", 2]), edge_of("x", "float32", ["rows"])])
    for count in (3, 0, 8):
        values = {"found": torch.arange(2 * count).reshape(count, 2), "x": torch.ones(50_000)}
        received = connection.pass_on(values, 50_000)
        assert_same(received["found"], values["found"])
        assert_same(received["x"], values["x"])
    with pytest.raises(InputError, match="found"):
        connection.pass_on({"found": torch.zeros(9, 2, dtype=torch.int64), "x": torch.ones(1)}, 1)


def test_a_failed_request_and_a_command_keep_the_order(connect: Connect) -> None:
    connection = connect()
    for rows in (5, 100_000):
        message = connection.message(rows).failed()
        layout = connection.layouts.find(message.size_words)
        connection.receivers.post_bodies(layout)
        transfers = connection.send(message, pack_failure(layout.of_route[connection.route]))
        assert connection.receivers.next_message() == message
        assert connection.receivers.values(layout) == {}
        connection.number += 1
        seed = ControlMessage(kind=ControlKind.SEED, number=connection.number, seed=-3)
        transfers += connection.send(seed, pack_command(SYMBOLS))
        assert connection.receivers.next_message() == seed
        wait_for(transfers)
        assert_same(connection.pass_x(torch.ones(rows)), torch.ones(rows))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((99, 1, 0, 0, 1, 5, 0, 0), "expected a control message, found the kind 99"),
        ((1, 2, 0, 0, 1, 5, 0, 0), "expected message 1, found"),
        ((1, 1, 0, 0, 1, 2**40, 0, 0), "for 'rows', found 1099511627776"),
        ((1, 1, 0, 0, 1, -1, 0, 0), "for 'rows', found -1"),
    ],
)
def test_words_of_another_program_are_refused(connect: Connect, words: tuple[int, ...], error: str) -> None:
    connection = connect()
    connection.send_words(words)

    def receive() -> None:
        message = connection.receivers.next_message()
        assert message is not None
        connection.layouts.find(message.size_words)

    with pytest.raises(ConnectionLostError, match=error):
        receive()


def test_a_size_that_data_decide_is_checked_before_memory_is_taken(connect: Connect) -> None:
    connection = connect([edge_of("found", "int64", ["found", 2])])
    message = connection.message()
    layout = connection.layouts.find(message.size_words)
    packed_values: PackedValues = pack_values(
        layout.of_route[connection.route], {"found": torch.zeros(3, 2, dtype=torch.int64)}, SYMBOLS, copies=False
    )
    (value_layout,) = layout.of_route[connection.route].values
    packed_values.head.write(value_layout.strides_offset + 16, [2**50, 2])
    transfers = connection.send(message, packed_values)
    assert connection.receivers.next_message() == message
    wait_for(transfers[:1])
    with pytest.raises(ConnectionLostError, match=r"the data of another program: .*found"):
        connection.receivers.values(layout)


def test_the_memory_that_was_used_first_is_given_back_first() -> None:
    memory = ReceiveMemory()
    kept = [memory.take(LARGEST_KEPT_BYTES // 4) for _ in range(4)]
    addresses = [tensor.data_ptr() for tensor in kept]
    del kept
    memory.take(LARGEST_KEPT_BYTES // 2 + 1)  # three of four have to go
    assert memory.take(LARGEST_KEPT_BYTES // 4).data_ptr() == addresses[3]


def test_memory_is_used_again_when_no_tensor_is_on_it() -> None:
    memory, byte_count = ReceiveMemory(), 2**20
    first = memory.take(byte_count)
    address = first.data_ptr()
    view = first.view(torch.float32)[5:]
    del first
    second = memory.take(byte_count)
    assert second.data_ptr() != address
    del view
    assert memory.take(byte_count).data_ptr() == address
    assert memory.take(2 * byte_count).numel() == 2 * byte_count
    kept = [memory.take(2**26) for _ in range(8)]  # more than is kept
    assert len({tensor.data_ptr() for tensor in kept}) == 8


def count_blocks() -> int:
    """The number of blocks that this process has mapped, as sender and as receiver."""
    return Path("/proc/self/maps").read_text().count("memfd:stagepack")


def test_results_that_a_caller_keeps_do_not_change_and_keep_few_blocks_and_no_files(link: Connect) -> None:
    connection = link()
    rows, block_count, file_count = 70_000, count_blocks(), len(os.listdir("/proc/self/fd"))
    kept = [connection.pass_x(torch.full((rows,), float(number))) for number in range(200)]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))
    assert len(os.listdir("/proc/self/fd")) <= file_count
    assert count_blocks() - block_count <= 2 * 34  # both ends are in this process
    del kept
    addresses = {connection.pass_x(torch.ones(rows)).data_ptr() for _ in range(50)}
    assert len(addresses) <= 34


def test_copies_leave_the_shared_memory_to_the_sender(link: Connect) -> None:
    connection = link()
    (receiver,) = connection.links.receivers.values()
    x = torch.arange(70_000.0)
    for copies, used_count in ((True, 1), (False, 2)):
        kept = connection.pass_x(x, copies=copies)
        connection.pass_x(x + 1, copies=True)
        assert receiver.blocks.used_count == used_count  # that of the last message is in use until the next one
        assert torch.equal(kept, x)


def test_large_memory_is_given_back_with_the_next_small_message(link: Connect) -> None:
    columns = LARGEST_KEPT_BYTES // 2**22 + 1
    connection = link([edge_of("x", "float32", ["rows", columns])])
    first_count = count_blocks()
    connection.pass_x(torch.ones(2**20, columns))
    assert count_blocks() == first_count + 2  # both ends are in this process
    for _ in range(2):
        connection.pass_x(torch.ones(1, columns))
    assert count_blocks() == first_count


def test_the_smallest_memory_that_is_large_enough_is_used_again(link: Connect) -> None:
    connection = link()

    def address(rows: int) -> int:
        connection.pass_x(torch.ones(1))  # memory is returned with the next message
        return connection.pass_x(torch.ones(rows)).data_ptr()

    kept = [connection.pass_x(torch.ones(rows)) for rows in (2**18, 2**16, 2**20)]
    expected = {rows: tensor.data_ptr() for rows, tensor in zip((2**18, 2**16, 2**20), kept, strict=True)}
    del kept
    assert [address(rows) for rows in (2**16, 2**15, 2**17, 2**19)] == [
        expected[rows] for rows in (2**16, 2**16, 2**18, 2**20)
    ]


def test_memory_of_earlier_sizes_makes_room_for_that_of_later_ones(link: Connect) -> None:
    columns = LARGEST_KEPT_BYTES // 2**22
    connection = link([edge_of("x", "float32", ["rows", columns])])
    first_count = count_blocks()

    def address(rows: int) -> int:
        connection.pass_x(torch.ones(1, columns))
        return connection.pass_x(torch.ones(rows, columns)).data_ptr()

    rows = 2**18  # four of these blocks are as much as is kept
    kept = [connection.pass_x(torch.ones(rows, columns)) for _ in range(4)]
    del kept
    addresses = {address(rows + 1) for _ in range(6)}
    assert len(addresses) <= 2
    assert count_blocks() <= first_count + 2 * 5  # both ends are in this process


def test_a_sender_waits_for_a_receiver_that_takes_nothing(link: Connect) -> None:
    connection, rows = link(), 70_000

    def send_all() -> None:
        for number in range(100):
            connection.send_x(torch.full((rows,), float(number)))

    layout = connection.layouts.find(encode_sizes({"rows": rows}, SYMBOLS))
    with waiting(send_all, 1):
        for number in range(100):
            assert connection.receivers.next_message() is not None
            assert bool((connection.receivers.values(layout)["x"] == number).all())


def test_a_sender_waits_until_all_but_some_large_messages_are_taken(link: Connect) -> None:
    connection = link()
    for rows in (70_000, 1, 70_000, 1, 70_000):
        connection.send_x(torch.ones(rows))
    connection.senders.limit_untaken(3)
    with waiting(lambda: connection.senders.limit_untaken(2), 0.2):
        for _ in range(2):  # the first one is acknowledged when the second one is expected
            connection.receivers.next_message()


def test_a_sender_that_finishes_waits_until_the_last_message_is_taken(link: Connect) -> None:
    connection = link()
    for number in range(3):  # returns blocks that nobody takes back
        connection.pass_x(torch.full((70_000,), float(number)))
    connection.number += 1
    last_message = ControlMessage(kind=ControlKind.CLOSE, number=connection.number)
    connection.send(last_message, pack_command(SYMBOLS))
    with waiting(connection.senders.finish, 0.2):
        assert connection.receivers.next_message() == last_message


def test_memory_smaller_than_it_is_said_to_be_is_refused(link: Connect) -> None:
    connection = link()
    descriptor = os.memfd_create("small")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    connection.sockets[0].sendmsg([struct.pack("<4q", 1, 4096, 4096, 0), bytes(64)], [rights])
    os.close(descriptor)
    with pytest.raises(ConnectionLostError, match="expected a block of at most 0 bytes, found 4096"):
        connection.receivers.next_message()
    connection.sockets[0].sendmsg([struct.pack("<4q", 7, 4096, 0, 0), bytes(64)])
    with pytest.raises(ConnectionLostError, match="7"):
        connection.receivers.next_message()
