"""The memory in which tensors go from process to process is used again, bounded and given back."""

import contextlib
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stagepack_loaders.distributed.packing import ReceiveMemory, pack_command
from stagepack_loaders.distributed.routes import ConnectionLostError, ControlKind, ControlMessage, encode_sizes
from stagepack_loaders.distributed.shared_blocks import LARGEST_KEPT_BYTES
from tests.distributed.connections import SYMBOLS, Connect, edge_of


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
