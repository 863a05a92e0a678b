"""What goes from process to process: tensors of every dtype and layout, memory that is used again, words of another program."""

import struct
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stagepack.errors import InputError
from stagepack.format.manifest import Edge
from stagepack.format.shapes import Symbol
from stagepack_loaders.distributed.control import ControlKind, ControlMessage, encode_sizes
from stagepack_loaders.distributed.process_group import LOOPBACK, ConnectionLostError, ProcessGroup, open_store
from stagepack_loaders.distributed.route_layout import RequestLayouts
from stagepack_loaders.distributed.routes import Route
from stagepack_loaders.distributed.tensor_memory import ReceiveMemory
from stagepack_loaders.distributed.transfers import (
    PackedValues,
    RouteReceivers,
    pack_command,
    pack_failure,
    pack_values,
    send_values,
)

ROWS = Symbol(name="rows", min=0, max=2**20)
FOUND = Symbol(name="found", min=0, max=8)  # depends on data
SYMBOLS = (ROWS, FOUND)
COMPLEX_OR_FLOAT = (torch.complex64, torch.complex128, torch.float64, torch.float32, torch.float16, torch.bfloat16)
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


def edge_of(name: str, dtype: str, shape: Sequence[Any]) -> Edge:
    return Edge(name=name, dtype=dtype, shape=tuple(shape), producer=None, consumers=(0,))


class Link:
    """A route from rank 0 to rank 1, and its receiver there."""

    tags = iter(range(0, 10_000))

    def __init__(self, groups: tuple[ProcessGroup, ProcessGroup], edges: Sequence[Edge]) -> None:
        self.sender = groups[0]
        self.route = Route(source_stage=next(self.tags), source_rank=0, target_rank=1, edges=tuple(edges))
        self.layouts = RequestLayouts([self.route], SYMBOLS)
        self.receivers = RouteReceivers(groups[1], [self.route], SYMBOLS)
        self.number = 0

    def message(self, rows: int = 0) -> ControlMessage:
        self.number += 1
        size_words = encode_sizes({"rows": rows}, SYMBOLS)
        return ControlMessage(kind=ControlKind.RUN, number=self.number, size_words=size_words)

    def pass_on(self, values: dict[str, Any], rows: int = 0) -> dict[str, Any]:
        message = self.message(rows)
        layout = self.layouts.find(message.size_words)
        packed_values = pack_values(layout.of_route[self.route], values, SYMBOLS, copies=False)
        self.receivers.post_bodies(layout)
        transfers = send_values(self.sender, self.route, message, packed_values)
        assert self.receivers.next_message() == message
        received = self.receivers.values(layout)
        for transfer in transfers:
            transfer.wait()
        return received


def assert_same(found: Any, expected: Any) -> None:
    if not isinstance(expected, torch.Tensor):
        assert (type(found), found) == (type(expected), expected)
        return
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [*COMPLEX_OR_FLOAT, *INTEGERS], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 40_000])
def test_each_dtype_at_each_size(groups: tuple[ProcessGroup, ProcessGroup], dtype: torch.dtype, rows: int) -> None:
    name = str(dtype).removeprefix("torch.")
    link = Link(groups, [edge_of("x", name, ["rows", 3]), edge_of("scalar", name, [])])
    x = torch.arange(rows * 3).reshape(rows, 3).to(dtype)
    received = link.pass_on({"x": x, "scalar": torch.ones((), dtype=dtype)}, rows)
    assert_same(received["x"], x)
    assert_same(received["scalar"], torch.ones((), dtype=dtype))


def test_strides_conjugates_and_numbers(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
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
    received = Link(groups, edges).pass_on(values)
    for name, value in values.items():
        if name in ("conjugate", "negative"):
            assert torch.equal(received[name], value)
        else:
            assert_same(received[name], value)


def test_sizes_that_depend_on_data(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    link = Link(groups, [edge_of("found", "int64", ["found", 2]), edge_of("x", "float32", ["rows"])])
    for count in (3, 0, 8):
        values = {"found": torch.arange(2 * count).reshape(count, 2), "x": torch.ones(50_000)}
        received = link.pass_on(values, 50_000)
        assert_same(received["found"], values["found"])
        assert_same(received["x"], values["x"])
    with pytest.raises(InputError, match="found"):
        link.pass_on({"found": torch.zeros(9, 2, dtype=torch.int64), "x": torch.ones(1)}, 1)


def test_a_failed_request_and_a_command_keep_the_order(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    link = Link(groups, [edge_of("x", "float32", ["rows"])])
    for rows in (5, 100_000):
        message = link.message(rows).failed()
        layout = link.layouts.find(message.size_words)
        link.receivers.post_bodies(layout)
        transfers = send_values(link.sender, link.route, message, pack_failure(layout.of_route[link.route]))
        assert link.receivers.next_message() == message
        assert link.receivers.values(layout) == {}
        link.number += 1
        seed = ControlMessage(kind=ControlKind.SEED, number=link.number, seed=-3)
        transfers += send_values(link.sender, link.route, seed, pack_command(SYMBOLS))
        assert link.receivers.next_message() == seed
        for transfer in transfers:
            transfer.wait()
        assert_same(link.pass_on({"x": torch.ones(rows)}, rows)["x"], torch.ones(rows))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((99, 1, 0, 0, 1, 5, 0, 0), "expected a control message, found the kind 99"),
        ((1, 2, 0, 0, 1, 5, 0, 0), "expected message 1, found"),
        ((1, 1, 0, 0, 1, 2**40, 0, 0), "for 'rows', found 1099511627776"),
        ((1, 1, 0, 0, 1, -1, 0, 0), "for 'rows', found -1"),
    ],
)
def test_words_of_another_program_are_refused(
    groups: tuple[ProcessGroup, ProcessGroup], words: tuple[int, ...], error: str
) -> None:
    link = Link(groups, [edge_of("x", "float32", ["rows"])])
    memory = torch.frombuffer(bytearray(struct.pack("<8q", *words)), dtype=torch.uint8)
    link.sender.send(memory, 1, link.route.head_tag).wait()

    def receive() -> None:
        message = link.receivers.next_message()
        assert message is not None
        link.layouts.find(message.size_words)

    with pytest.raises(ConnectionLostError, match=error):
        receive()


def test_a_size_that_data_decide_is_checked_before_memory_is_taken(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    link = Link(groups, [edge_of("found", "int64", ["found", 2])])
    message = link.message()
    layout = link.layouts.find(message.size_words)
    packed_values: PackedValues = pack_values(
        layout.of_route[link.route], {"found": torch.zeros(3, 2, dtype=torch.int64)}, SYMBOLS, copies=False
    )
    (value_layout,) = layout.of_route[link.route].values
    packed_values.head.write(value_layout.strides_offset + 16, [2**50, 2])
    send_values(link.sender, link.route, message, packed_values)[0].wait()
    assert link.receivers.next_message() == message
    with pytest.raises(ConnectionLostError, match=r"the data of another program: .*found"):
        link.receivers.values(layout)


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
