"""Names and shapes that clients see, and which rows may run together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import InputError, UnsupportedError
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.graph.rows.row_analysis import mixed_rows
from stagepack_loaders.batching import batch_limit
from stagepack_serving.protocol.interface import Interface
from tests.bundle_editor import BundleEditor
from tests.conformance.vectors import TINY
from tests.modules import module_of
from tests.serve.bundles import Bundles


def output_names(result: Any, tmp_path: Path) -> Any:
    bundle = stagepack.export(module_of(lambda self, x: result(x)), (torch.ones(2, 3),), out=tmp_path / "m", stages=1)
    return list(Interface(bundle.entry_point).outputs)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda x: x + 1, ["output"]),
        (lambda x: (x + 1, [x + 2]), ["output.0", "output.1.0"]),
        (lambda x: {"y": x + 1, "deep": {"z": x + 2}, "none": None}, ["y", "deep.z"]),
        (lambda x: {"x": x + 1}, ["output.x"]),
        (lambda x: {3: x + 1}, ["output.3"]),
        (lambda x: {"a.b": x + 1, "a": {"b": x + 2}}, ["a.b", "output.a.b"]),
    ],
)
def test_outputs_are_named_by_their_place(result: Any, expected: Any, tmp_path: Path) -> None:
    assert output_names(result, tmp_path) == expected


def test_what_clients_state_is_checked(bundles: Bundles) -> None:
    interface = Interface(stagepack.open(bundles["kinds"]).entry_point)
    assert interface.check_input("factor", "FP32", (1,)) == interface.check_input("factor", "FP32", ()) == ()
    with pytest.raises(InputError, match="one number"):
        interface.check_input("factor", "FP32", (2,))
    with pytest.raises(InputError, match="INT8"):
        interface.check_input("count", "INT16", (2,))
    with pytest.raises(InputError, match="unknown input 'y'"):
        interface.check_input("y", "FP32", (1,))
    with pytest.raises(InputError, match="'flag' is missing"):
        interface.check_inputs({"x": (2, 4), "count": (2,), "factor": ()}, {})
    with pytest.raises(InputError, match="rows"):
        interface.check_inputs({"x": (65, 4), "count": (2,), "factor": (), "flag": (2,)}, {})


def ends(bundle: Bundle) -> list[Edge]:
    return Interface(bundle.entry_point).edges


@pytest.mark.parametrize(
    ("bundle_name", "rows", "reason"),
    [
        ("skips", 8, ""),
        ("minilm", 8, ""),
        ("half", 8, ""),
        ("kinds", 1, "flag has no dynamic first dimension"),
        ("counting", 1, "the model keeps state between calls"),
        ("together", 1, "aten.mean.dim computes one result from several rows"),
    ],
)
def test_rows_run_together_where_they_keep_apart(
    bundles: Bundles, pipes: Mapping[str, Any], bundle_name: str, rows: int, reason: str
) -> None:
    bundle = stagepack.open(bundles[bundle_name])
    assert batch_limit(bundle, ends(bundle), 8, pipes[bundle_name]) == (rows, reason)
    assert batch_limit(bundle, ends(bundle), 1, pipes[bundle_name])[0] == 1


@pytest.mark.parametrize(
    ("together", "operator"),
    [
        (lambda x: x + x.sum(0), "aten.sum"),
        (lambda x: x.cumsum(0), "aten.cumsum"),
        (lambda x: x.flip(0), "aten.flip"),
        (lambda x: x / x.norm(dim=0), "norm"),
        (lambda x: torch.round(x / x.abs().amax() * 127), "aten.amax"),
    ],
)
@pytest.mark.parametrize("rows", [2, 3])
def test_rows_that_meet_are_seen(together: Any, operator: str, rows: int, tmp_path: Path) -> None:
    bundle = batched_bundle(together, tmp_path / "m.stagepack", rows)
    limit = batch_limit(bundle, ends(bundle), 8, stagepack.load(bundle))
    assert limit.max_batch_size == 1
    assert operator in limit.reason


@pytest.mark.parametrize(
    ("together", "rows"),
    [
        (lambda x: x - x.mean(0), 2),  # seen among the rows of the example
        (lambda x: x / x.abs().amax(), 2),  # seen beside rows of another scale alone
        (lambda x: x + 0 * x.sum(0), 2),  # seen beside NaN alone
    ],
)
def test_runs_have_the_last_word(together: Any, rows: int, tmp_path: Path) -> None:
    apart = batched_bundle(lambda x: x * 2, tmp_path / "apart.stagepack", rows)
    pipe = stagepack.load(batched_bundle(together, tmp_path / "together.stagepack", rows))
    expected = (1, "the answer to the recorded example depends on the rest of its batch")
    assert batch_limit(apart, ends(apart), 8, pipe) == expected


def batched_bundle(function: Any, path: Path, rows: int) -> Bundle:
    """A bundle of a function of rows of 4 numbers."""
    shapes = {"x": {0: torch.export.Dim("rows", min=1)}}
    example_input = torch.arange(1.0, rows * 4 + 1).reshape(rows, 4)
    model = module_of(lambda self, x: function(x))
    return stagepack.export(model, (example_input,), out=path, stages=1, dynamic_shapes=shapes)


def test_a_number_that_depends_on_the_rows_is_seen(tmp_path: Path) -> None:
    graph = batched_bundle(lambda x: (x * 1, x.shape[0] * 2), tmp_path / "m.stagepack", 3).graph(0)
    assert "depends on the number of rows" in str(mixed_rows([graph], {graph.inputs[0].name: 0}, graph.outputs))


def test_requests_of_at_least_two_rows_are_batched(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("rows", min=2, max=16)},)
    model, example_input = torch.nn.Linear(4, 4), torch.ones(3, 4)
    bundle = stagepack.export(model, (example_input,), out=tmp_path / "m.stagepack", dynamic_shapes=shapes)
    assert batch_limit(bundle, ends(bundle), 8, stagepack.load(bundle)) == (8, "")


def test_rows_are_no_more_than_the_bundle_allows(bundles: Bundles, pipes: Mapping[str, Any]) -> None:
    bundle = stagepack.open(bundles["skips"])
    assert batch_limit(bundle, ends(bundle), 1000, pipes["skips"])[0] == 64
    together = stagepack.open(bundles["together"])
    assert batch_limit(together, ends(together), 8, None) == (1, "aten.mean.dim computes one result from several rows")


def test_state_takes_turns_in_a_stage(bundles: Bundles) -> None:
    stage = stagepack.load_stage(bundles["counting"], 0)
    ones = torch.ones(3)
    begin = stage.fresh_state()
    assert stage(ones)[1].tolist() == [1.0] * 3
    own_state = stage.swap_state(begin)
    assert [stage(ones)[1].tolist()[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    other_state = stage.swap_state(own_state)
    assert stage(ones)[1].tolist() == [2.0] * 3
    stage.swap_state(other_state)
    assert stage(ones)[1].tolist() == [4.0] * 3
    assert stage.state_dict()["first"].tolist() == [4.0] * 3
    stage.reset_state()
    assert stage(ones)[1].tolist() == [1.0] * 3


def test_a_dtype_that_the_protocol_lacks_is_refused(tmp_path: Path) -> None:
    editor = BundleEditor.copy(TINY, tmp_path / "tiny.stagepack")
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["edges"][0].update(dtype="quint8"))
    with pytest.raises(UnsupportedError, match="no datatype for quint8"):
        Interface(stagepack.open(editor.path).entry_point)
