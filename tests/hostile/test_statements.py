"""What the manifest states and the graphs imply: every road refuses a bundle in which the two differ, and diff sees each statement."""

import copy
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import DeviceError, FormatError, LimitError, StageFailedError, StagepackError
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.compare import compare_bundles
from stagepack.roads.recut import plan_bundle, whole_graph
from tests.bundle_editor import BundleEditor, sort_manifest
from tests.conformance.vectors import TINY, Case, cases, edit_bundle
from tests.hostile.test_growth import step_count
from tests.modules import module_of

ROADS: dict[str, Callable[[Path, Path], object]] = {
    "verify": lambda path, _: stagepack.open(path).verify(),
    "recut": lambda path, out: stagepack.recut(path, out=out, stages=1),
    "plan": lambda path, _: plan_bundle(stagepack.open(path), CutOptions(stages=1)),
    "diff": lambda path, _: compare_bundles(stagepack.open(path), stagepack.open(TINY)),
    "whole graph": lambda path, _: whole_graph(stagepack.open(path)),
    "load": lambda path, _: stagepack.load(path),
}
WRONG = [case for case in cases() if case.kind == "bundle" and case.fields.get("rule") in ("G14", "G17", "G18", "G19")]


# Loading needs no module calls.
PAIRS = [
    pytest.param(road, case, id=f"{road}-{case}")
    for road in ROADS
    for case in WRONG
    if road != "load" or "module call" not in case.fields["name"]
]


@pytest.mark.parametrize(("road", "case"), PAIRS)
def test_every_road_refuses_stages_that_do_not_agree(road: str, case: Case, tmp_path: Path) -> None:
    path = edit_bundle(case, tmp_path)
    with pytest.raises(FormatError, match=str(case.fields["rule"])):
        ROADS[road](path, tmp_path / "out.stagepack")


def scalars(fields: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each scalar in plain containers."""
    if isinstance(fields, dict | list):
        items = fields.items() if isinstance(fields, dict) else enumerate(fields)
        for key, value in items:
            yield from scalars(value, (*path, key))
    else:
        yield path


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}x"


def test_diff_sees_each_statement_of_a_manifest(sound: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(sound, tmp_path / "b.stagepack")
    original = editor.manifest()
    seen = 0
    for path in scalars(original):
        fields = copy.deepcopy(original)
        container = fields
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = changed(container[path[-1]])
        editor.write_manifest(fields)
        try:
            differences = compare_bundles(stagepack.open(sound), stagepack.open(editor.path))
        except StagepackError:
            continue  # refused
        assert differences or path == ("sha256",), path
        seen += bool(differences)
    assert seen > 20


def test_diff_sees_defaults_that_become_other_values(sound: Path, tmp_path: Path) -> None:
    original = BundleEditor(sound).manifest()
    [entry] = original["entry_points"]
    first_stage = entry["stages"][1] | {"state": ["first.bias"]}
    others: list[dict[str, Any]] = [
        entry | {"seed": 7},
        {key: value for key, value in entry.items() if key != "example"},
        {key: value for key, value in entry.items() if key != "plan"},
        entry | {"stages": [entry["stages"][0], first_stage, entry["stages"][2]]},
        entry | {"symbols": [*entry["symbols"], {"name": "free"}]},
    ]
    for number, other in enumerate(others):
        editor = BundleEditor.copy(sound, tmp_path / f"{number}.stagepack")
        editor.write_manifest(sort_manifest(original | {"entry_points": [other]}))
        assert compare_bundles(stagepack.open(sound), stagepack.open(editor.path)), number


def with_zeros(editor: BundleEditor, size: int, **more: Any) -> None:
    """Let stage 1 have a buffer of zeros that its nodes write."""

    def change(graph: Any) -> None:
        weight = {
            "value": "zeros_1",
            "names": ["zeros"],
            "kind": "buffer",
            "dtype": "float32",
            "shape": [size],
            "zeros": True,
        }
        graph["weights"].append(weight | more)
        op: dict[str, Any] = {"name": "aten.relu_.default", "schema": "aten::relu_(Tensor(a!) self) -> Tensor(a!)"}
        op |= {"parameters": ["self"], "mutates": ["self"], "aliases": [[0, "self"]]}
        graph["ops"].append(op)
        graph["nodes"].append({"op": len(graph["ops"]) - 1, "args": [["value", "zeros_1"]], "outputs": [None]})

    def state(fields: Any) -> None:
        [entry] = fields["entry_points"]
        del entry["plan"]
        for stage in entry["stages"]:
            stage.pop("places", None)
        stage = entry["stages"][1]
        stage |= {"nodes": stage["nodes"] + 1, "weight_bytes": stage["weight_bytes"] + 4 * size, "state": ["zeros"]}

    editor.edit_graph(1, change)
    editor.edit_manifest(state)


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"stream": True}, {"device_memory": "1MiB"}], ids=str)
def test_zeros_that_no_host_has_are_refused_before_they_are_allocated(
    options: dict[str, Any], editor: BundleEditor
) -> None:
    with_zeros(editor, 2**37)
    stagepack.open(editor.path).verify()
    with pytest.raises(DeviceError, match="zeros do not fit"):
        stagepack.load(editor.path, **options)


def test_eight_terabytes_of_zeros_break_a_limit(editor: BundleEditor) -> None:
    with_zeros(editor, 2**41)
    for road in (stagepack.open(editor.path).verify, lambda: stagepack.load(editor.path)):
        with pytest.raises(LimitError, match="L1"):
            road()


def resident_bytes() -> int:
    """The memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_zeros_take_no_memory_before_they_are_written(editor: BundleEditor) -> None:
    with_zeros(editor, 2**28)
    before = resident_bytes()
    pipe = stagepack.load(editor.path)
    assert resident_bytes() - before < 2**28
    assert pipe.stages[1].state_dict()["zeros"].shape == (2**28,)


def test_zeros_with_strides_have_them(editor: BundleEditor) -> None:
    with_zeros(editor, 6, shape=[2, 3], strides=[1, 2])
    state = stagepack.load(editor.path).state_dict()
    assert torch.equal(state["zeros"], torch.zeros(2, 3))
    assert state["zeros"].stride() == (1, 2)


def test_written_zeros_answer_as_stored_zeros(editor: BundleEditor) -> None:
    with_zeros(editor, 6)
    pipe = stagepack.load(editor.path)
    ids = torch.arange(6).reshape(2, 3)
    first, second = pipe(ids), pipe(ids)
    assert [answer["calls"].item() for answer in (first, second)] == [1.0, 2.0]


def test_recut_reads_each_file_once_however_many_entry_points_have_it(sound: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(sound, tmp_path / "m.stagepack")

    def work(count: int) -> int:
        def change(fields: Any) -> None:
            first = fields["entry_points"][0]
            fields["entry_points"] = [copy.deepcopy(first) | {"name": f"e{number}"} for number in range(count)]

        editor.edit_manifest(change)
        bundle = stagepack.open(f"{editor.path}#e0") if count > 1 else stagepack.open(editor.path)
        return step_count(lambda: stagepack.recut(bundle, out=tmp_path / f"{count}.stagepack", stages=2))

    # What grows is the manifest, and the names of files.
    assert work(16) < 12 * work(1)


def run_dropped_out(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes a buffer through what `dropout` returns when it does not train: the buffer itself, which no schema says."""
    return torch.nn.functional.dropout(self.kept, 0.5, training=False).add_(x) * 2


def test_memory_that_a_call_shares_and_no_schema_states_is_compared_where_it_is_written(tmp_path: Path) -> None:
    bundle = stagepack.export(
        module_of(run_dropped_out, kept=torch.ones(3)).eval(), (torch.ones(3),), out=tmp_path / "m.stagepack"
    )
    assert bundle.stages[0].state == ("kept",)
    pipe = stagepack.load(bundle)
    assert [pipe(torch.ones(3))[0].item() for _ in range(2)] == [4.0, 6.0]
    editor = BundleEditor.copy(bundle.path, tmp_path / "changed.stagepack")

    def hide(graph: Any) -> None:
        [op] = [op for op in graph["ops"] if op["name"] == "aten.dropout.default"]
        del op["aliases"]

    editor.edit_graph(0, hide)
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][0].pop("state"))
    with pytest.raises(FormatError, match=r"aten\.dropout\.default: it returns the memory of .*G16"):
        stagepack.load(editor.path)


def run_places(_: Any, x: torch.Tensor) -> torch.Tensor:
    """The places of what is not zero: the data says how many."""
    return torch.nonzero(x) * 2


def test_every_road_refuses_a_size_of_the_data_that_is_out_of_its_range(tmp_path: Path) -> None:
    bundle = stagepack.export(module_of(run_places), (torch.ones(4),), out=tmp_path / "m.stagepack")
    editor = BundleEditor.copy(bundle.path, tmp_path / "changed.stagepack")

    def narrow(fields: Any) -> None:
        [symbol] = fields["symbols"]
        symbol["max"] = 3

    editor.edit_graph(0, narrow)
    editor.edit_manifest(lambda fields: narrow(fields["entry_points"][0]))
    for run in (stagepack.load(editor.path), stagepack.load_stage(editor.path, 0)):
        run(torch.tensor([1.0, 1, 1, 0]))
        with pytest.raises(StageFailedError, match=r"expected 0 to 3 .*found 4"):
            run(torch.ones(4))
