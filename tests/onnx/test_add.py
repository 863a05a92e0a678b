"""ONNX files added to a bundle: what they say, that no weight is copied, and what happens to stages that have none."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto

import stagepack
from stagepack.errors import OperatorError, OptionError
from stagepack.format.reader import Bundle
from stagepack.format.weights import read_weight_header
from stagepack.roads.onnx import check
from tests.bundle_editor import BundleEditor
from tests.modules import module_of
from tests.zoo.rows.zoolib import smooth as smooth  # registers the custom operators


class Layers(torch.nn.Module):
    """Three layers, with weights of all kinds between them."""

    even: torch.Tensor
    table: torch.Tensor
    later: torch.Tensor
    nothing: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 32)
        self.first = torch.nn.Linear(32, 32)
        self.second = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        table = torch.randn(64, 32)
        self.register_buffer("even", table[::2])  # elements with gaps between them
        self.register_buffer("table", table)
        self.register_buffer("later", table[32:])
        self.register_buffer("nothing", torch.zeros(40, 32), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.first(self.embed(ids)).relu() + self.even[0] + self.nothing[3] * self.calls
        x = self.second(x).relu() + self.even[1] + self.later[0] + torch.arange(1024.0).sqrt()[:32]
        return self.head(x + self.table[0])


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    """A bundle with ONNX files, and its folder before they were there."""
    folder = tmp_path_factory.mktemp("added")
    rows = torch.export.Dim("rows", min=1, max=64)
    ids = torch.arange(12).reshape(3, 4)
    args: dict[str, Any] = {"stages": 3, "dynamic_shapes": {"ids": {0: rows}}}
    before = stagepack.export(Layers().eval(), (ids,), out=folder / "before.stagepack", **args)
    after = stagepack.export(Layers().eval(), (ids,), out=folder / "after.stagepack", onnx=True, **args)
    return after, before.path


def model(bundle: Bundle, number: int) -> onnx.ModelProto:
    stage = bundle.stages[number]
    assert stage.onnx is not None
    return onnx.load(bundle.path / stage.onnx.model, load_external_data=False)


def external(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def test_weights_lie_in_the_weight_files_alone(added: tuple[Bundle, Path]) -> None:
    bundle, before = added
    names = {file.name for file in Bundle(before).manifest.files}
    files = {file.name: file for file in bundle.manifest.files}
    assert all(files[name] == file for name, file in Bundle(before).files.items())
    more = {name: file.size for name, file in files.items() if name not in names}
    assert set(more) <= {f"stage-{n}.onnx" for n in range(3)} | {f"stage-{n}.onnx.safetensors" for n in range(3)}
    for number in range(3):
        found = model(bundle, number)
        places = bundle.tensors(number, bundle.graph(number))
        for tensor in found.graph.initializer:
            if tensor.name in places:
                path, place = places[tensor.name]
                assert external(tensor) == {
                    "location": path.name,
                    "offset": str(place.start),
                    "length": str(place.end - place.start),
                }
            else:
                assert tensor.external_data or len(tensor.SerializeToString()) < 1200
        onnx.checker.check_model(bundle.path / f"stage-{number}.onnx", full_check=True)
        assert all(os.stat(bundle.path / name).st_nlink == 1 for name in files)


def test_only_what_was_changed_has_a_file_of_its_own(added: tuple[Bundle, Path]) -> None:
    bundle, _ = added
    own = {
        name: list(read_weight_header(bundle.path / name))
        for stage in bundle.stages
        for name in (() if stage.onnx is None else stage.onnx.weights)
    }
    # A view with gaps has no place in a weight file; a view without has one.
    assert {tensor for tensors in own.values() for tensor in tensors} >= {
        weight.value for number in range(3) for weight in bundle.graph(number).weights if weight.names[0] == "even"
    }
    initializers = [tensor for number in range(3) for tensor in model(bundle, number).graph.initializer]
    later = next(tensor for tensor in initializers if tensor.name == "later")
    assert external(later)["location"].startswith(("stage-", "shared-"))
    assert not external(later)["location"].endswith(".onnx.safetensors")
    assert "nothing" not in {tensor.name for tensor in initializers}
    assert any(node.op_type == "ConstantOfShape" for number in range(3) for node in model(bundle, number).graph.node)


def test_the_boundary_is_that_of_the_stage(added: tuple[Bundle, Path]) -> None:
    bundle, _ = added
    edges = {edge.name: edge for edge in bundle.edges}
    for number, stage in enumerate(bundle.stages):
        graph = model(bundle, number).graph
        state = [f"state.{name}" for name in stage.state]
        assert [value.name for value in graph.input] == [*stage.inputs, *state]
        assert [value.name for value in graph.output] == [*stage.outputs, *(f"next.{name}" for name in stage.state)]
        for value in (*graph.input, *graph.output):
            if value.name in edges:
                dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
                assert dims == list(edges[value.name].shape)
    assert "state.calls" in {value.name for number in range(3) for value in model(bundle, number).graph.input}


def test_it_says_where_it_belongs(added: tuple[Bundle, Path]) -> None:
    bundle, _ = added
    modules = set()
    for number in range(3):
        found = model(bundle, number)
        told = {entry.key.removeprefix("pkg.stagepack."): entry.value for entry in found.metadata_props}
        assert told == {"format_version": "1.0", "stages": "3"}
        assert found.graph.name == f"stage_{number}"
        assert {entry.key: entry.value for entry in found.graph.metadata_props} == {"pkg.stagepack.stage": str(number)}
        assert found.ir_version == 11
        assert {one.pipeline_stage for node in found.graph.node for one in node.device_configurations} == {number}
        modules |= {entry.value for node in found.graph.node for entry in node.metadata_props}
        assert all(entry.key == "pkg.stagepack.module" for node in found.graph.node for entry in node.metadata_props)
        text = found.SerializeToString()
        assert b"/site-packages/" not in text
        assert str(Path(__file__).parent).encode() not in text
    assert {"embed", "first", "second", "head"} <= modules


def test_it_answers_and_counts(added: tuple[Bundle, Path]) -> None:
    bundle, _ = added
    pipe, other = stagepack.load(bundle, runtime="onnxruntime"), stagepack.load(bundle)
    for rows in (3, 5, 1):
        ids = numpy.arange(rows * 4).reshape(rows, 4) % 50
        with torch.no_grad():
            wanted = other(torch.from_numpy(ids)).numpy()
        assert numpy.allclose(pipe(ids), wanted, rtol=1e-4, atol=1e-5)
    assert pipe.state_dict()["calls"] == 3


def test_adding_again_gives_the_same_bytes(added: tuple[Bundle, Path]) -> None:
    bundle, _ = added
    again = stagepack.add_onnx(bundle.path)
    assert again.bundle.digest == bundle.digest
    assert again.torch_only == {}
    assert all(checked.within and checked.difference is not None for checked in again.checked.values())


def test_cutting_again_leaves_the_onnx_files_out(added: tuple[Bundle, Path], tmp_path: Path) -> None:
    bundle, before = added
    cut = {
        name: stagepack.recut(path, out=tmp_path / name, stages=2) for name, path in (("a", bundle.path), ("b", before))
    }
    assert cut["a"].digest == cut["b"].digest


def test_an_operator_without_onnx_form_is_named_and_leaves_its_stage_in_torch(tmp_path: Path) -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4), module_of(lambda self, x: torch.ops.tests.smooth(x, None, 0.25)), torch.nn.Linear(4, 4)
    )
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match=r"stage 1 runs in torch only: no ONNX form of tests\.smooth\.default in 1$"):
        bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack", split_at=["1", "2"], onnx=True)
    assert [stage.onnx is not None for stage in bundle.stages] == [True, False, True]
    pipe = stagepack.load(bundle, runtime=["onnxruntime", "torch", "onnxruntime"], allow_ops=["tests"])
    with torch.no_grad():
        assert torch.allclose(pipe(x), net(x), atol=1e-5)


def test_a_graph_whose_calls_do_not_fit_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    editor = BundleEditor(stagepack.export(net, (torch.ones(2, 4),), out=tmp_path / "m.stagepack").path)
    editor.edit_graph(0, lambda graph: graph["nodes"][1].pop("args"))
    with pytest.raises(OperatorError, match=r"the operator aten.relu.default takes self; a node passes 0 arguments"):
        stagepack.add_onnx(editor.path)


def test_a_stage_that_answers_otherwise_runs_in_torch_only(tmp_path: Path) -> None:
    """Large numbers whose sum is small: it depends on the order in which they are added."""
    torch.manual_seed(0)
    cancelling = module_of(lambda self, x: torch.cat([x * 1e9, -(x * 1e9).flip(0)]).sum())
    net = torch.nn.Sequential(torch.nn.ReLU(), cancelling)
    with pytest.warns(UserWarning, match="stage 1 runs in torch only: its answer differs by "):
        bundle = stagepack.export(net, (torch.randn(5000),), out=tmp_path / "m.stagepack", split_at=["1"], onnx=True)
    assert [stage.onnx is not None for stage in bundle.stages] == [True, False]
    assert not (tmp_path / "m.stagepack" / "stage-1.onnx").exists()
    bundle.verify()


def large_and_small() -> tuple[torch.nn.Module, torch.Tensor]:
    """A module with values of many thousand and values near 0 in one answer, which float32 cannot compute to 1e-4."""
    torch.manual_seed(0)
    last = torch.nn.Linear(256, 512)
    with torch.no_grad():
        last.weight.mul_(50000)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), last), torch.randn(64, 256)


def test_a_difference_of_rounding_is_allowed_by_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = large_and_small()
    # In one stage: the last layer makes the rounding of tanh large, which differs on every processor.
    bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack")
    added = stagepack.add_onnx(bundle)
    assert added.torch_only == {}
    checked = added.checked[0]
    assert checked.difference is not None
    assert checked.rounding is not None
    assert 1e-4 < checked.difference <= 8 * checked.rounding < 1
    # By the tolerance alone it would be refused, as it was before.
    refused = stagepack.add_onnx(bundle.path, rtol=1e-3, atol=1e-4).torch_only[0]
    assert re.search(r"^its answer differs by \S+ in the output linear\S*, beyond rtol 0.001 and atol 0.0001$", refused)
    assert stagepack.add_onnx(bundle.path, atol=1.0).torch_only == {}
    # An answer that is wrong by a thousandth of the largest value is no rounding.
    monkeypatch.setattr(
        check,
        "to_array",
        lambda value, *_: value if isinstance(value, torch.Tensor) else torch.from_numpy(numpy.asarray(value) + 100.0),
    )
    refused = stagepack.add_onnx(bundle.path).torch_only[0]
    assert re.search(r"torch itself differs by \S+ from float64, of which 8 times is allowed", refused)


def test_a_tolerance_is_not_negative(added: tuple[Bundle, Path]) -> None:
    with pytest.raises(OptionError, match="rtol, atol: expected numbers that are not negative, found -1 and None"):
        stagepack.add_onnx(added[0], rtol=-1)


def test_a_stage_without_a_kernel_stays_in_torch_and_is_named(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 4).to(torch.bfloat16)
    bundle = stagepack.export(net, (torch.ones(2, 4, dtype=torch.bfloat16),), out=tmp_path / "m.stagepack")
    added = stagepack.add_onnx(bundle)
    assert re.search(r"ONNX Runtime \S+ cannot run it: .*NOT_IMPLEMENTED", added.torch_only[0])
    assert added.bundle.stages[0].onnx is None
    assert added.checked == {}


def test_what_it_says_is_json(added: tuple[Bundle, Path]) -> None:
    from click.testing import CliRunner

    from stagepack.cli import main

    done = CliRunner().invoke(main, ["inspect", "--json", str(added[0].path)])
    facts = [stage["onnx"] for stage in json.loads(done.stdout)["stages"]]
    assert [fact["files"][0] for fact in facts] == ["stage-0.onnx", "stage-1.onnx", "stage-2.onnx"]
    assert sum(fact["own_bytes"] for fact in facts) > 4096
