"""Limits of calls: inputs at which a value would be too large are refused before anything is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import InputError, OptionError, ValueSizeError
from stagepack.format.reader import Bundle
from tests.bundle_editor import BundleEditor
from tests.distributed.forked_processes import forked_launches
from tests.modules import module_of

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
    [
        pytest.param({}, id="torch"),
        pytest.param({"runtime": "onnxruntime"}, id="onnx"),
        pytest.param({"processes": True}, id="processes", marks=pytest.mark.process),
        pytest.param({"stream": True}, id="stream", marks=pytest.mark.process),
    ],
)
def test_a_call_with_a_larger_value_is_refused(options: dict[str, Any], distances: Bundle) -> None:
    x = torch.rand(100, 4)
    expected = stagepack.load(distances)(x)
    with forked_launches():
        pipeline = stagepack.load(distances, limits=stagepack.Limits(value_bytes=largest(100)), **options)
    try:
        torch.testing.assert_close(pipeline(x), expected)
        for rows in (101, 1 << 20):
            says = rf"expected at most 160,000 bytes .* found {largest(rows):,}: .* rows = {rows}"
            with pytest.raises(ValueSizeError, match=says):
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
        says = r"expected at most 16,383 bytes .* found 16,384: float32 \[32, 32, 4\]: allow larger values"
        with pytest.raises(ValueSizeError, match=says):
            load(bundle.path, limits=stagepack.Limits(value_bytes=largest(32) - 1))


@pytest.mark.parametrize(
    "options",
    [
        {"value_bytes": "much"},
        {"value_bytes": -1},
        {"value_bytes": 0},
        {"value_bytes": 1.5},
        {"value_bytes": True},
        {"stall_seconds": True},
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


def test_views_do_not_count(tmp_path: Path) -> None:
    """The transposed weight and the rows that are expanded take no memory; the logits are [rows, 1000]."""
    x, weight = torch.rand(5, 8), torch.nn.Parameter(torch.randn(1000, 8))
    model = module_of(lambda self, x: x @ self.weight.t() + x[:, None].expand(-1, 1000, -1)[:, 0, :1], weight=weight)
    bundle = stagepack.export(model, (x,), dynamic_shapes={"x": {0: ROWS}}, stages=1, out=tmp_path / "v.stagepack")
    pipeline = stagepack.load(bundle, limits=stagepack.Limits(value_bytes=5 * 1000 * 4))
    torch.testing.assert_close(pipeline(x), stagepack.load(bundle)(x))
    with pytest.raises(ValueSizeError, match="rows = 6"):
        pipeline(torch.rand(6, 8))


@pytest.mark.parametrize(
    "dim",
    [
        {"op": "add", "args": [6, {"op": "mul", "args": [-1, "rows"]}]},
        {"op": "floordiv", "args": [9, {"op": "add", "args": [6, {"op": "mul", "args": [-1, "rows"]}]}]},
        "unknown",
    ],
    ids=["negative", "divided by zero", "a symbol of its own"],
)
def test_sizes_that_cannot_be_computed_are_too_large(dim: Any, tmp_path: Path) -> None:
    """The sizes are right at that of the example, 3."""
    out = tmp_path / "distances.stagepack"
    stagepack.export(Distances(), (torch.ones(3, 4),), dynamic_shapes={"x": {0: ROWS}}, stages=1, out=out)

    def change(fields: dict[str, Any]) -> None:
        outputs = [node["outputs"][0] for node in fields["nodes"]]
        next(value for value in outputs if value["shape"] == ["rows", "rows", 4])["shape"][1] = dim
        if dim == "unknown":
            fields["symbols"].append(unknown)

    unknown = {"name": "unknown", "min": 3, "max": 3, "example": 3}
    editor = BundleEditor(out)
    editor.edit_graph(0, change)
    if dim == "unknown":
        editor.edit_manifest(lambda fields: fields["entry_points"][0]["symbols"].append(unknown))
    pipeline = stagepack.load(out, limits=stagepack.Limits(value_bytes="100MB"))
    with pytest.raises(ValueSizeError, match="more than any memory has"):
        pipeline(torch.ones(6, 4) if isinstance(dim, dict) and dim["op"] == "floordiv" else torch.ones(7, 4))
