"""ONNX files added to a bundle: what they say, that no weight is copied, and what happens to stages that have none."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto

import stagepack
from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack.format.weights import read_index
from tests.zoo.rows.zoolib import smooth as smooth  # registers the custom operators


class Layers(torch.nn.Module):
    """Three layers, with weights of all kinds between them."""

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
        name: list(read_index(bundle.path / name))
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


class Smooth(torch.nn.Module):
    """A module with an operator that only its library knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests.smooth(x, None, 0.25)


def test_an_operator_without_onnx_form_is_named_and_leaves_its_stage_in_torch(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), Smooth(), torch.nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match=r"stage 1 runs in torch only: no ONNX form of tests\.smooth\.default in 1$"):
        bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack", split_at=["1", "2"], onnx=True)
    assert [stage.onnx is not None for stage in bundle.stages] == [True, False, True]
    pipe = stagepack.load(bundle, runtime=["onnxruntime", "torch", "onnxruntime"], allow_ops=["tests"])
    with torch.no_grad():
        assert torch.allclose(pipe(x), net(x), atol=1e-5)


class Cancelling(torch.nn.Module):
    """Large numbers whose sum is small: it depends on the order in which they are added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x * 1e9
        return torch.cat([large, -large.flip(0)]).sum()


def test_a_stage_that_answers_otherwise_runs_in_torch_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.ReLU(), Cancelling())
    with pytest.warns(UserWarning, match="stage 1 runs in torch only: its answer differs by "):
        bundle = stagepack.export(net, (torch.randn(5000),), out=tmp_path / "m.stagepack", split_at=["1"], onnx=True)
    assert [stage.onnx is not None for stage in bundle.stages] == [True, False]
    assert not (tmp_path / "m.stagepack" / "stage-1.onnx").exists()
    bundle.verify()


def test_bfloat16_is_kept_and_said_not_to_be_compared_where_no_kernel_is(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 4).to(torch.bfloat16)
    bundle = stagepack.export(net, (torch.ones(2, 4, dtype=torch.bfloat16),), out=tmp_path / "m.stagepack")
    added = stagepack.add_onnx(bundle)
    graph = model(added.bundle, 0).graph
    types = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert types == {TensorProto.BFLOAT16}
    assert "cannot run it" in added.checked[0].reason
    assert added.torch_only == {}


def test_what_it_says_is_json(added: tuple[Bundle, Path]) -> None:
    from click.testing import CliRunner

    from stagepack.cli import main

    done = CliRunner().invoke(main, ["inspect", "--json", str(added[0].path)])
    facts = [stage["onnx"] for stage in json.loads(done.stdout)["stages"]]
    assert [fact["files"][0] for fact in facts] == ["stage-0.onnx", "stage-1.onnx", "stage-2.onnx"]
    assert sum(fact["own_bytes"] for fact in facts) > 4096


class Corners(torch.nn.Module):
    """What stands at the edges of what ONNX can say."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.zeros(1000))
        self.register_buffer("whole", torch.arange(12).reshape(3, 4))
        self.register_buffer("nobody", torch.zeros(0, 3))
        self.register_buffer("x", torch.ones(3))  # named like an edge

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + self.x, self.zeros, y @ self.whole.t(), self.x, self.nobody, x, x


def test_results_may_be_weights_inputs_zeros_and_integers(tmp_path: Path) -> None:
    net, args = Corners(), (torch.randn(2, 3), torch.arange(8).reshape(2, 4))
    bundle = stagepack.export(net, args, out=tmp_path / "m.stagepack", stages=2)
    added = stagepack.add_onnx(bundle)
    assert added.torch_only == {}
    pipe = stagepack.load(added.bundle, runtime="onnxruntime")
    found, wanted = pipe(*(one.numpy() for one in args)), net(*args)
    assert all(numpy.array_equal(mine, theirs.numpy()) for mine, theirs in zip(found, wanted, strict=True))
    assert [array.dtype.name for array in found] == [str(one.dtype).removeprefix("torch.") for one in wanted]


class Writes(torch.nn.Module):
    """Writes into its first input."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y


@pytest.mark.parametrize("as_torch", [True, False])
def test_what_is_written_into_an_input_is_there_after_the_call(as_torch: bool, tmp_path: Path) -> None:
    args = (torch.ones(2, 3), torch.ones(2, 3))
    bundle = stagepack.export(Writes(), args, out=tmp_path / "m.stagepack", onnx=True)
    pipe = stagepack.load(bundle, runtime="onnxruntime")

    def given(tensor: torch.Tensor) -> Any:
        return tensor if as_torch else tensor.numpy()

    x, y = torch.full((2, 3), 3.0), torch.ones(2, 3)
    assert float(pipe(given(x), given(y))[0, 0]) == 7.0
    assert torch.equal(x, torch.full((2, 3), 6.0))
    both = torch.ones(4, 3)
    with pytest.raises(InputError, match="share memory"):
        pipe(given(both[:2]), given(both[1:3]))
    fixed = torch.ones(3).expand(2, 3)
    with pytest.raises(InputError, match="x: the model writes into this input, and it cannot be written: give a copy"):
        pipe(given(fixed), given(y))
    assert torch.equal(both, torch.ones(4, 3))


def test_a_loaded_stage_stays_what_it_is_when_its_bundle_is_replaced(tower: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tower, tmp_path / "t.stagepack"))
    x = numpy.arange(12, dtype="float32").reshape(1, 3, 4)
    pipe = stagepack.load(path, runtime="onnxruntime")
    answer, weights = pipe(x), pipe.state_dict()
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    stagepack.export(other, (torch.ones(1, 4),), out=path, overwrite=True)
    for removed in (False, True):
        if removed:
            shutil.rmtree(path)
        pipe.reset_state()
        assert all(numpy.array_equal(mine, first) for mine, first in zip(pipe(x), answer, strict=True))
        assert all(numpy.array_equal(array, weights[name]) for name, array in pipe.state_dict().items())


class Named(torch.nn.Module):
    """Modules and weights with the names that the exporter gives to values."""

    def __init__(self) -> None:
        super().__init__()
        self.s0 = torch.nn.Module()
        for name in ("val_0", "add", "relu", "linear"):
            self.s0.register_parameter(name, torch.nn.Parameter(torch.rand(3)))
        self.w3, self.w0, self.linear = (torch.nn.Parameter(torch.rand(3)) for _ in range(3))
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).relu() * self.s0.val_0 + self.s0.add
        return (x * self.w3 + self.s0.relu).relu() * self.w0 + self.s0.linear * self.linear


def test_names_do_not_meet(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    net = Named()
    bundle = stagepack.export(net, (x,), out=tmp_path / "m.stagepack", onnx=True)
    assert {tensor.name for tensor in model(bundle, 0).graph.initializer} == set(net.state_dict())
    with torch.no_grad():
        assert numpy.allclose(stagepack.load(bundle, runtime="onnxruntime")(x.numpy()), net(x).numpy(), atol=1e-5)


class Attends(torch.nn.Module):
    """Attention with a mask that may hide everything."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_sees_nothing_is_zero_as_in_torch(kind: str, tmp_path: Path) -> None:
    x, mask = torch.randn(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool)

    def given(mask: torch.Tensor) -> torch.Tensor:
        return mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    bundle = stagepack.export(Attends(), (x, given(mask)), out=tmp_path / "m.stagepack", onnx=True)
    mask[..., 1, :] = False
    mask[..., 2, 0] = False
    found = stagepack.load(bundle, runtime="onnxruntime")(x.numpy(), given(mask).numpy())
    assert numpy.allclose(found, Attends()(x, given(mask)).numpy(), atol=1e-5)
    assert not found[:, :, 1].any()


def test_what_is_stopped_midway_leaves_the_bundle_as_it_was(tower: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tower, tmp_path / "t.stagepack"))
    before = Bundle(path).digest

    def stop(what: str) -> None:
        if what == "run the example":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stagepack.add_onnx(path, progress=stop)
    assert Bundle(path).digest == before
    Bundle(path).verify()
    assert [one.name for one in tmp_path.iterdir()] == ["t.stagepack"]


def test_a_link_stands_for_the_bundle(tower: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tower, tmp_path / "t.stagepack"))
    (tmp_path / "link").symlink_to(path)
    added = stagepack.add_onnx(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert added.torch_only == {}
    Bundle(path).verify()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "t.stagepack"]


class Doubles(torch.nn.Module):
    """Writes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1


@pytest.mark.parametrize("first", ["torch", "onnxruntime"])
def test_what_a_stage_of_either_runtime_writes_the_caller_sees(first: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(Doubles(), torch.nn.Linear(3, 3))
    bundle = stagepack.export(net, (torch.ones(2, 3),), out=tmp_path / "m.stagepack", split_at=["1"], onnx=True)
    pipe = stagepack.load(bundle, runtime=[first, "onnxruntime"])
    for order in ("C", "F"):
        x = numpy.asarray(numpy.arange(6.0, dtype="float32").reshape(2, 3), order=order)
        given = torch.from_numpy(x.copy())
        with torch.no_grad():
            wanted, found = net(given).numpy(), pipe(x)
        assert numpy.allclose(found, wanted, atol=1e-6)
        assert numpy.array_equal(x, given.numpy())
    fixed = numpy.ones((2, 3), "float32")
    fixed.flags.writeable = False
    if first == "onnxruntime":
        with pytest.raises(InputError, match="cannot be written"):
            pipe(fixed)
    else:
        with torch.no_grad():
            pipe(fixed)
    assert (fixed == 1).all()


def test_calls_from_several_threads_lose_nothing(tower: Path) -> None:
    stage = stagepack.load_stage(tower, 2, runtime="onnxruntime")
    ones = numpy.ones((1, 2, 4), "float32")
    (_, once) = stage(ones)
    stage.reset_state()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: stage(ones), range(400)))
    assert numpy.array_equal(stage(ones)[1], once * 401)
