"""What goes from process to process: tensors of every dtype and layout, and words of another program."""

from typing import Any

import pytest
import torch

from stagepack.errors import InputError
from stagepack_loaders.distributed.packing import PackedValues, pack_command, pack_failure, pack_values
from stagepack_loaders.distributed.routes import ConnectionLostError, ControlKind, ControlMessage
from tests.distributed.connections import SYMBOLS, Connect, edge_of, wait_for

COMPLEX_OR_FLOAT = (torch.complex64, torch.complex128, torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


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


_NUMBERS = {"symint": -(2**62), "symfloat": float("inf"), "symbool": True}


@pytest.mark.parametrize("byte_count", [0, 2**16 - 8, 2**16 - 4, 2**16, 2**16 + 4, 2**20])
@pytest.mark.parametrize("has_late_value", [False, True])
def test_numbers_beside_a_tensor_of_each_size(connect: Connect, byte_count: int, has_late_value: bool) -> None:
    edges = [edge_of(dtype, dtype, []) for dtype in _NUMBERS]
    late_edges = [edge_of("found", "int64", ["found", 2])] if has_late_value else []
    x = torch.arange(byte_count // 4, dtype=torch.float32)
    values = {"x": x, "found": torch.arange(6).reshape(3, 2)} | _NUMBERS
    connection = connect([edges[0], edge_of("x", "float32", ["rows"]), *edges[1:], *late_edges])
    for copies in (False, True):
        received = connection.pass_on(values, len(x), copies=copies)
        for edge in connection.route.edges:
            assert_same(received[edge.name], values[edge.name])


def test_a_head_has_room_for_any_number_of_numbers(connect: Connect) -> None:
    edges = [edge_of(str(number), "symint", []) for number in range(2000)]
    values: dict[str, Any] = {edge.name: int(edge.name) for edge in edges}
    values |= {"x": torch.ones(2**14), "found": torch.ones(1, 2, dtype=torch.int64)}
    connection = connect([edge_of("x", "float32", ["rows"]), *edges, edge_of("found", "int64", ["found", 2])])
    received = connection.pass_on(values, 2**14)
    assert {name: received[name] for name in values if name.isdigit()} == {edge.name: int(edge.name) for edge in edges}
    assert torch.equal(received["found"], values["found"])


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


def test_numbers_behind_values_that_fill_the_head(connect: Connect) -> None:
    edges = [edge_of("x", "float32", ["rows"]), edge_of("count", "symint", []), edge_of("flag", "symbool", [])]
    values = {"x": torch.arange(16_384.0), "count": 7, "flag": True}
    received = connect(edges).pass_on(values, 16_384)
    for name, value in values.items():
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


# Words of a request that has no identity.
TRACE_WORDS = (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((99, 1, 0, 0, 0, *TRACE_WORDS, 1, 5, 0, 0), "expected a control message, found the kind 99"),
        ((1, 2, 0, 0, 0, *TRACE_WORDS, 1, 5, 0, 0), "expected message 1, found"),
        ((1, 1, 0, 0, 0, *TRACE_WORDS, 1, 2**40, 0, 0), "for 'rows', found 1099511627776"),
        ((1, 1, 0, 0, 0, *TRACE_WORDS, 1, -1, 0, 0), "for 'rows', found -1"),
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
    if not connection.sockets:  # then the head comes first
        wait_for(transfers[:1])
    with pytest.raises(ConnectionLostError, match=r"the data of another program: .*found"):
        connection.receivers.values(layout)
