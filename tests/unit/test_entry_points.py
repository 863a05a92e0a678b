"""Bundles with several entry points: functions of one module, with cuts of their own, over shared weights."""

from pathlib import Path

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import CaptureError, DeviceError, EntryPointError, OptionError
from stagepack.roads.compare import compare_bundles
from stagepack.roads.replace import replace_weights
from tests.distributed.forked_processes import forked_launches


class Autoencoder(torch.nn.Module):
    """Two functions that share a weight, have constants of their own, and count their calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.norm = torch.nn.LayerNorm(8)
        self.unused = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, ids: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids) * scale + torch.tensor([1.0, 2.0]).sum()
        for layer in self.layers[:2]:
            hidden = layer(hidden).relu()
        self.calls.add_(1)
        return {"hidden": self.norm(hidden), "calls": self.calls + 0}

    def decode(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers[2:]:
            hidden = layer(hidden).relu() + torch.tensor([3.0, 4.0]).sum()
        self.calls.add_(10)
        return hidden @ self.embed.weight.T, self.calls + 0


@pytest.fixture(scope="module")
def model() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder().eval()


@pytest.fixture(scope="module")
def bundle(model: Autoencoder, tmp_path_factory: pytest.TempPathFactory) -> stagepack.Bundle:
    rows = torch.export.Dim("rows", min=1, max=64)
    entry_points = {
        "encode": stagepack.Inputs(args=(torch.arange(6).reshape(2, 3),), dynamic_shapes={"ids": {0: rows}}),
        "decode": stagepack.Inputs(kwargs={"hidden": torch.randn(2, 3, 8)}, dynamic_shapes={"hidden": {0: rows}}),
    }
    out = tmp_path_factory.mktemp("entry_points") / "m.stagepack"
    return stagepack.export(model, entry_points=entry_points, out=out, stages={"decode": 2})


def test_each_entry_point_has_its_cut_and_shared_weights_are_stored_once(
    bundle: stagepack.Bundle, model: Autoencoder
) -> None:
    assert [entry_point.name for entry_point in bundle.entry_points] == ["encode", "decode"]
    assert [len(bundle.select(name).stages) for name in ("encode", "decode")] == [1, 2]
    assert {file_name for file_name in bundle.files if file_name.endswith(".safetensors")} == {
        "encode-stage-0.safetensors",
        "decode-stage-0.safetensors",
        "decode-stage-1.safetensors",
        "shared-0.safetensors",  # the embedding, of both entry points
        "encode-example.safetensors",
        "decode-example.safetensors",
    }
    bundle.verify()
    layers = [
        {
            weight.names[0].rpartition(".")[0]
            for stage in range(count)
            for weight in bundle.select(name).graph(stage).weights
        }
        for name, count in (("encode", 1), ("decode", 2))
    ]
    assert layers == [
        {"embed", "encode", "layers.0", "layers.1", "norm", ""},
        {"embed", "decode", "layers.2", "layers.3", ""},
    ]
    stored_bytes = sum(file.size for name, file in bundle.files.items() if "stage-" in name or "shared" in name)
    assert stored_bytes < 2 * sum(parameter.nbytes for parameter in model.parameters()) + 20_000
    assert model.calls == 0


def test_entry_points_answer_as_the_functions_do(bundle: stagepack.Bundle, model: Autoencoder) -> None:
    pipelines = stagepack.load_entry_points(bundle)
    ids = torch.randint(11, (5, 3))
    with torch.no_grad():
        encoded = pipelines.encode(ids)
        expected = model.encode(ids)
        assert torch.equal(encoded["hidden"], expected["hidden"])
        logits, _ = pipelines["decode"](hidden=encoded["hidden"])
        assert torch.equal(logits, model.decode(expected["hidden"])[0])
    model.calls.zero_()
    assert [*pipelines] == ["encode", "decode"]
    assert "encode" in dir(pipelines)
    with pytest.raises(AttributeError, match="encode, decode"):
        _ = pipelines.forward


def test_entry_points_that_are_loaded_together_share_weights_and_state(bundle: stagepack.Bundle) -> None:
    pipelines = stagepack.load_entry_points(bundle)
    ids = torch.randint(11, (5, 3))
    counts = [pipelines.encode(ids)["calls"], pipelines.decode(torch.randn(1, 3, 8))[1], pipelines.encode(ids)["calls"]]
    assert [int(count) for count in counts] == [1, 11, 12]
    parameters = [
        {name: weight for stage in pipeline.stages for name, weight in stage.state_dict().items()}
        for pipeline in pipelines.values()
    ]
    assert parameters[0]["embed.weight"].data_ptr() == parameters[1]["embed.weight"].data_ptr()
    apart = [stagepack.load(bundle.select(name)) for name in ("encode", "decode")]
    assert int(apart[0](ids)["calls"]) == 1
    assert int(apart[1](torch.randn(1, 3, 8))[1]) == 10


def test_an_entry_point_is_selected_by_name(bundle: stagepack.Bundle, model: Autoencoder) -> None:
    path = f"{bundle.path}#decode"
    selected = stagepack.open(path)
    assert (selected.location, len(selected.stages)) == (path, 2)
    hidden = torch.randn(2, 3, 8)
    with torch.no_grad():
        assert torch.equal(stagepack.load(path)(hidden)[0], model.decode(hidden)[0])
    model.calls.zero_()
    assert len(list(stagepack.load_stage(path, 1).parameters())) > 0
    for call in (lambda: stagepack.load(bundle.path), lambda: bundle.stages, lambda: bundle.graph(0)):
        with pytest.raises(EntryPointError, match=r"encode, decode: choose one, as in .*#encode"):
            call()
    with pytest.raises(EntryPointError, match="expected one of the entry points encode, decode, found 'forward'"):
        stagepack.open(f"{bundle.path}#forward")
    with pytest.raises(EntryPointError, match="found other"):
        stagepack.load_entry_points(bundle, devices={"other": ["cpu"]})


def test_recut_cuts_the_selected_entry_point_alone(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    recut = stagepack.recut(bundle.select("encode"), out=tmp_path / "again.stagepack", stages=2)
    assert [len(entry_point.stages) for entry_point in recut.entry_points] == [2, 2]
    assert recut.select("decode").entry_point.edges == bundle.select("decode").entry_point.edges
    recut.verify()
    back = stagepack.recut(recut.select("encode"), out=tmp_path / "back.stagepack", stages=1)
    assert back.digest == bundle.digest
    with pytest.raises(EntryPointError):
        stagepack.recut(bundle, out=tmp_path / "none.stagepack", stages=2)


def test_selected_entry_points_are_compared_alone(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    recut = stagepack.recut(bundle.select("encode"), out=tmp_path / "m.stagepack", stages=2)
    assert not compare_bundles(bundle.select("decode"), recut.select("decode"))
    found = compare_bundles(bundle.select("encode"), recut.select("encode"))
    assert found.plan[0] == "stages: 1 and 2"
    assert not found.graph
    assert not found.files
    assert compare_bundles(bundle, recut).plan[0] == "encode: stages: 1 and 2"
    assert compare_bundles(bundle.select("encode"), bundle.select("decode")).graph
    with pytest.raises(EntryPointError, match="choose one"):
        compare_bundles(bundle.select("encode"), recut)


def test_weights_are_replaced_in_all_entry_points(bundle: stagepack.Bundle, model: Autoencoder, tmp_path: Path) -> None:
    tuned = Autoencoder().eval()
    torch.save({name: tensor for name, tensor in tuned.state_dict().items()}, tmp_path / "tuned.pt")
    replaced = replace_weights(bundle, tmp_path / "tuned.pt", out=tmp_path / "tuned.stagepack")
    pipelines = stagepack.load_entry_points(replaced)
    hidden = torch.randn(2, 3, 8)
    with torch.no_grad():
        assert torch.equal(pipelines.decode(hidden)[0], tuned.decode(hidden)[0])
    for name in ("encode", "decode"):
        assert stagepack.open(replaced.path).select(name).example is not None


def test_onnx_models_are_added_to_each_entry_point(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    path = stagepack.recut(bundle.select("encode"), out=tmp_path / "m.stagepack", stages=1).path
    for name in ("encode", "decode"):
        assert not stagepack.add_onnx(stagepack.open(path).select(name)).torch_only
    with_onnx = stagepack.open(path)
    with_onnx.verify()
    wanted = {"encode-stage-0.onnx", "decode-stage-0.onnx", "decode-stage-1.onnx"}
    assert {name for name in with_onnx.files if name.endswith(".onnx")} == wanted
    pipelines = stagepack.load_entry_points(with_onnx, runtime="onnxruntime")
    hidden = numpy.ones((2, 3, 8), dtype=numpy.float32)
    expected, _ = stagepack.load_entry_points(bundle).decode(hidden)
    assert numpy.allclose(pipelines.decode(hidden)[0], expected, atol=1e-5)


@pytest.mark.process
def test_entry_points_run_in_processes(bundle: stagepack.Bundle, model: Autoencoder) -> None:
    hidden = torch.randn(2, 3, 8)
    with forked_launches(), stagepack.load(bundle.select("decode"), processes=True) as pipeline, torch.no_grad():
        assert torch.equal(pipeline(hidden)[0], model.decode(hidden)[0])
    model.calls.zero_()


class Parts(torch.nn.Module):
    """A model with methods of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.text = torch.nn.Linear(4, 4)
        self.vae = Autoencoder()


@pytest.mark.process
def test_entry_points_are_modules_and_methods_of_modules(tmp_path: Path) -> None:
    parts = Parts().eval()
    entry_points = {
        "text": stagepack.Inputs(args=(torch.ones(2, 4),)),
        "vae.decode": stagepack.Inputs(args=(torch.ones(1, 3, 8),)),
    }
    bundle = stagepack.export(parts, entry_points=entry_points, out=tmp_path / "m.stagepack")
    assert [entry_point.name for entry_point in bundle.entry_points] == ["text", "vae_decode"]
    graph = bundle.select("vae_decode").graph(0)
    assert {name for weight in graph.weights for name in weight.names if "embed" in name} == {"vae.embed.weight"}
    pipelines = stagepack.load_entry_points(bundle.path)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(pipelines.text(x), parts.text(x))


class Remembering(torch.nn.Module):
    """A function that assigns an attribute of the model, as it must not after the export."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.ones(4)
        self.calls: list[torch.Tensor] = []

    def remember(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        self.calls.append(self.last)
        return x + 1

    def recall(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.last


def test_the_model_is_unchanged(tmp_path: Path) -> None:
    model = Remembering()
    last = model.last
    inputs = stagepack.Inputs(args=(torch.ones(4),))
    bundle = stagepack.export(model, entry_points={"remember": inputs, "recall": inputs}, out=tmp_path / "m.stagepack")
    assert model.last is last
    assert model.calls == []
    x = torch.rand(4)
    assert torch.equal(stagepack.load_entry_points(bundle).recall(x), model.recall(x))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"entry_points": {}}, OptionError, "at least one function"),
        ({"entry_points": {"missing": stagepack.Inputs()}}, OptionError, "Autoencoder has no 'missing'"),
        ({"entry_points": {"training": stagepack.Inputs()}}, OptionError, "'training' is not a function"),
        (
            {"entry_points": dict.fromkeys(["norm.forward", "norm_forward"], stagepack.Inputs())},
            OptionError,
            "'norm.forward' and 'norm_forward' give one name",
        ),
        ({"entry_points": {"encode#2": stagepack.Inputs()}}, OptionError, "'encode#2', which is no ASCII identifier"),
        ({"entry_points": {"encode": (1,)}}, OptionError, "expected stagepack.Inputs for 'encode', found tuple"),
        (
            {"entry_points": {"encode": stagepack.Inputs()}},
            CaptureError,
            "encode: .*example inputs for ids, found none",
        ),
        ({"entry_points": {"encode": stagepack.Inputs()}, "args": (1,)}, OptionError, "each has its own inputs"),
        ({"args": (1,), "generate_batch": 3}, OptionError, "for a model that generates"),
        ({"args": (1,), "stages": {"encode": 2}}, OptionError, "a dict is for entry_points"),
        (
            {"entry_points": {"decode": stagepack.Inputs(args=(torch.ones(1, 3, 8),))}, "stages": {"other": 2}},
            OptionError,
            "stages, split_at: expected names among decode, found 'other'",
        ),
    ],
)
def test_wrong_options_are_refused(
    model: Autoencoder, tmp_path: Path, options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        stagepack.export(model, out=tmp_path / "m.stagepack", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "m.stagepack").exists()


class Painter(torch.nn.Module):
    """Calls a module twice, one in another one by keyword, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.text_model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8))
        self.unet = torch.nn.Linear(8, 8)
        self.unused = torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.text_model(ids)
        for _ in range(2):
            hidden = self.unet(input=hidden * 2)
        return hidden


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_modules_become_entry_points_with_the_inputs_of_the_example(is_dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    painter, ids = Painter().eval(), torch.arange(6).reshape(2, 3)
    dynamic_shapes = {"ids": {0: torch.export.Dim("rows", min=1, max=64)}} if is_dynamic else None
    bundle = stagepack.export(
        painter,
        (ids,),
        out=tmp_path / "m.stagepack",
        modules=["text_model", "unet"],
        dynamic_shapes=dynamic_shapes,
        stages={"text_model": 2},
    )
    pipelines = stagepack.load_entry_points(bundle)
    other_ids = torch.arange(10).reshape(5, 2) if is_dynamic else ids + 1
    with torch.no_grad():
        hidden = painter.text_model(other_ids)
        assert torch.equal(pipelines.text_model(other_ids), hidden)
        assert torch.equal(pipelines.unet(input=hidden), painter.unet(hidden))
    names = {weight.names[0] for weight in bundle.select("text_model").graph(0).weights}
    assert names <= {"text_model.0.weight", "text_model.1.weight", "text_model.1.bias"}
    assert [len(bundle.select(name).stages) for name in ("text_model", "unet")] == [2, 1]
    bundle.verify()


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([""], OptionError, "modules: expected the path of a module, found '': there are text_m"),
        (["text_modle"], OptionError, "modules: expected the path of a module, found 'text_modle': there are text_m"),
        (["forward"], OptionError, "found 'forward': there are .*unused"),
        ("unet", OptionError, "modules: expected a list of paths, found 'unet'"),
        (["unused"], CaptureError, "unused: the model does not call this module .*; it calls text_model, unet"),
    ],
)
def test_a_module_that_is_no_part(modules: list[str], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        stagepack.export(Painter(), (torch.arange(3),), out=tmp_path / "m.stagepack", modules=modules)
    assert not (tmp_path / "m.stagepack").exists()


class Outer(torch.nn.Module):
    """Its module has the name ``model``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(3, 3)

    def enlarge(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * 2


def test_a_module_may_be_called_model(tmp_path: Path) -> None:
    inputs = {"enlarge": stagepack.Inputs(args=(torch.ones(1, 3),))}
    bundle = stagepack.export(Outer(), entry_points=inputs, out=tmp_path / "m.stagepack")
    assert [entry_point.name for entry_point in bundle.entry_points] == ["enlarge"]


def test_entry_points_are_counted_together_in_the_memory_of_a_device(bundle: stagepack.Bundle) -> None:
    names = [entry_point.name for entry_point in bundle.entry_points]
    alone = [stagepack.load(bundle.select(name), memory=["1GB"]).placement.parts[0].memory for name in names]
    with pytest.raises(DeviceError, match=r"memory: the entry points .* together, and cpu has .*: give it more memory"):
        stagepack.load_entry_points(bundle, memory=[max(alone)])
    pipelines = stagepack.load_entry_points(bundle, memory=[sum(alone)])
    assert [len(pipelines[name].stages) for name in names] == [1] * len(names)
