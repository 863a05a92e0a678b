"""What goes from process to process: tensors of every dtype and layout, and words of another program."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.packing import PackedValues, pack_command, pack_failure, pack_values
from stagepack_loaders.distributed.routes import ConnectionLostError, ControlKind, ControlMessage
from tests.distributed.connections import SYMBOLS, Connect, edge_of, wait_for
from tests.hostile.attack import run

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
    wait_for(transfers[:1])
    with pytest.raises(ConnectionLostError, match=r"the data of another program: .*found"):
        connection.receivers.values(layout)


@pytest.mark.slow  # 5 s: starts a process
def test_links_are_measured(layers: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    result = run("profile", str(layers.path), "-o", str(path), "--runs", "1", "--links")
    assert result.exit_code == 0, result.output
    assert "measured between two processes: links of " in result.stdout
    link = json.loads(path.read_text())["link"]
    assert 1e-6 < link["seconds_per_value"] < 0.1
    assert 0 < link["seconds_per_byte"] < 1e-6
