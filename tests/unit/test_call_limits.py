"""Limits of calls: inputs at which a value would be too large are refused before anything is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import InputError, OptionError, ValueSizeError
from stagepack.format.reader import Bundle

ROWS = torch.export.Dim("rows", min=1, max=1 << 20)


class Distances(torch.nn.Module):
    """The largest value, [rows, rows, 4] of float32, is inside: the result has one element for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.scale(x)
        return (scaled[:, None] - x[None]).abs().sum(dim=(1, 2))


@pytest.fixture(scope="module")
def distances(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("limits") / "distances.stagepack"
    dynamic_shapes = {"x": {0: ROWS}}
    return stagepack.export(
        Distances(), (torch.ones(3, 4),), dynamic_shapes=dynamic_shapes, stages=2, out=out, onnx=True
    )


def largest(rows: int) -> int:
    return rows * rows * 4 * 4


@pytest.mark.parametrize(
    "options",
    [{}, {"runtime": "onnxruntime"}, {"processes": True}, {"stream": True}],
    ids=["torch", "onnx", "processes", "stream"],
)
def test_a_call_with_a_larger_value_is_refused(options: dict[str, Any], distances: Bundle) -> None:
    x = torch.rand(100, 4)
    expected = stagepack.load(distances)(x)
    pipeline = stagepack.load(distances, limits=stagepack.Limits(value_bytes=largest(100)), **options)
    try:
        torch.testing.assert_close(pipeline(x), expected)
        for rows in (101, 1 << 20):
            with pytest.raises(
                ValueSizeError, match=rf"expected at most 160,000 bytes .* found {largest(rows):,}: .* rows = {rows}"
            ):
                pipeline(torch.ones(1, 4).expand(rows, 4))
        torch.testing.assert_close(pipeline(x), expected)
    finally:
        getattr(pipeline, "close", lambda: None)()


def test_the_state_of_a_sequence_has_the_same_limit(distances: Bundle) -> None:
    sequence = stagepack.load(distances, limits=stagepack.Limits(value_bytes="1kB")).sequence()
    assert sequence(torch.ones(7, 4)).shape == (7,)
    with pytest.raises(InputError):
        sequence(torch.ones(8, 4))


def test_a_bundle_with_a_larger_value_at_any_sizes_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    bundle = stagepack.export(Distances(), (torch.ones(32, 4),), stages=2, out=tmp_path / "b.stagepack")
    for weight_file in {file_name for stage in bundle.stages for file_name in stage.weights}:
        (bundle.path / weight_file).unlink()
    for load in (stagepack.load, stagepack.load_entry_points):
        with pytest.raises(
            ValueSizeError,
            match=r"expected at most 16,383 bytes .* found 16,384: float32 \[32, 32, 4\]: raise value_bytes",
        ):
            load(bundle.path, limits=stagepack.Limits(value_bytes=largest(32) - 1))


@pytest.mark.parametrize(
    "options",
    [
        {"value_bytes": "much"},
        {"value_bytes": -1},
        {"stall_seconds": 0},
        {"stall_seconds": "x"},
        {"stall_seconds": float("nan")},
    ],
)
def test_limits_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}: expected"):
        stagepack.Limits(**options)
    with pytest.raises(OptionError, match="limits: expected"):
        stagepack.load("unread.stagepack", limits=options)  # type: ignore[call-overload]
