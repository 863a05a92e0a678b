"""A bundle as a whole: its bytes, what is read of it, and how it is called."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import torch
from safetensors import safe_open

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import Capture, capture_module, capture_program
from stagepack.errors import CaptureError, InputError, UnsupportedError
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import ModuleCall
from stagepack.format.graph_codec import encode_graph, read_graph
from stagepack.format.manifest_codec import encode_manifest
from stagepack.format.traversal import output_names
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests import plain_reader
from tests.modules import module_of
from tests.zoo.cases import named


@pytest.fixture(scope="module")
def tied_capture() -> Capture:
    """A Llama whose first and last layer share a weight."""
    return named("decoders-llama-tied")[0].capture()


@pytest.fixture(scope="module")
def tied_llama(tied_capture: Capture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama in three stages."""
    out = tmp_path_factory.mktemp("bundle") / "llama.stagepack"
    export_capture(tied_capture, out=out, cut_options=CutOptions(stages=3))
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.process
def test_exporting_again_and_in_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    code = (
        "import sys; from stagepack.roads.capture_writer import export_capture; from stagepack.partition.cut_options import CutOptions;"
        "from tests.zoo.rows.state import CASES;"
        "case = next(case for case in CASES if case.name == 'state-caches-of-several-layers');"
        "export_capture(case.capture(), out=sys.argv[1], cut_options=CutOptions(stages=3))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "again.stagepack")], check=True, cwd=Path(__file__).parents[2]
    )
    case = named("state-caches-of-several-layers")[0]
    for name in ("first", "second"):
        export_capture(case.capture(), out=tmp_path / name, cut_options=CutOptions(stages=3))
        assert contents(tmp_path / "again.stagepack") == contents(tmp_path / name)


def test_reading_and_writing_gives_the_same_bytes(tied_llama: Path) -> None:
    bundle = stagepack.open(tied_llama)
    assert encode_manifest(bundle.manifest) == (tied_llama / "manifest.json").read_bytes()
    for number, stage in enumerate(bundle.stages):
        assert encode_graph(bundle.graph_file(number).folded) == (tied_llama / stage.graph).read_bytes()


def test_plain_libraries_read_every_node_and_weight(tied_llama: Path, tied_capture: Capture) -> None:
    """What SPEC.md promises to readers in other languages: json, msgpack and safetensors are enough."""
    manifest = json.loads((tied_llama / "manifest.json").read_text())
    model = dict(tied_capture.model.named_parameters())  # type: ignore[union-attr]
    nodes, weights = [], {}
    for number, stage in enumerate(manifest["entry_points"][0]["stages"]):
        graph = msgpack.unpackb((tied_llama / stage["graph"]).read_bytes())
        found, held, calls = plain_reader.unfold(graph)
        ours = stagepack.open(tied_llama).graph(number).calls
        assert sorted(calls, key=lambda call: str(call["path"])) == sorted(
            map(plain_call, ours), key=lambda call: str(call["path"])
        )
        for node, path in found:
            outputs = [value["name"] for value in node.get("outputs", []) if value]
            nodes.append((graph["ops"][node["op"]]["name"], path, outputs))
        for weight in held:
            for file in stage["weights"]:
                with safe_open(tied_llama / file, framework="numpy") as opened:
                    if weight["names"][0] in opened.keys():  # noqa: SIM118 - not a dict
                        weights.update(dict.fromkeys(weight["names"], opened.get_tensor(weight["names"][0])))
    assert len(nodes) == sum(stage["nodes"] for stage in manifest["entry_points"][0]["stages"])
    assert [name for *_, outputs in nodes for name in outputs] == [
        name
        for number in range(len(manifest["entry_points"][0]["stages"]))
        for node in stagepack.open(tied_llama).graph(number).nodes
        for name in output_names(node)
    ]
    assert ("aten.linear.default", "model.layers.0.self_attn.q_proj") in [node[:2] for node in nodes]
    assert model.keys() <= weights.keys()
    for name, parameter in model.items():
        assert torch.equal(torch.from_numpy(weights[name]), parameter.detach())


def plain_call(call: ModuleCall) -> dict[str, Any]:
    """The call of a module as plain containers."""
    fields: dict[str, Any] = msgpack.unpackb(msgspec.msgpack.encode(call))
    return fields


def test_weights_of_several_stages_are_stored_once_and_shared(tied_llama: Path, tied_capture: Capture) -> None:
    bundle = stagepack.open(tied_llama)
    assert [stage.weights for stage in bundle.stages] == [
        ("stage-0.safetensors", "shared-0.safetensors", "shared-1.safetensors"),
        ("stage-1.safetensors", "shared-1.safetensors"),  # of the rotary tables, which every stage computes
        ("stage-2.safetensors", "shared-0.safetensors", "shared-1.safetensors"),
    ]
    pipe = stagepack.load(tied_llama)
    state = pipe.state_dict()
    assert state["model.embed_tokens.weight"] is not None
    assert state["model.embed_tokens.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
    model = tied_capture.model
    assert model is not None
    assert state.keys() == model.state_dict().keys()
    assert sum(p.numel() for p in pipe.parameters()) == sum(p.numel() for p in model.parameters())


def test_weights_lie_in_the_order_of_their_first_use(tied_llama: Path) -> None:
    bundle = stagepack.open(tied_llama)
    places = bundle.tensors(1, bundle.graph(1))
    used = [weight.stored for weight in bundle.graph(1).weights]
    assert [name for name in used if places[name][0].name == "stage-1.safetensors"] == list(places)[:-1]
    assert all(place.start % 64 == 0 for _, place in places.values())


def test_stages_run_one_by_one_as_the_pipeline_does(tied_llama: Path) -> None:
    bundle = stagepack.open(tied_llama)
    ids = torch.randint(0, 128, (3, 5))
    values: dict[str, Any] = {"input_ids": ids}
    for number, entry in enumerate(bundle.stages):
        stage = stagepack.load_stage(bundle, number)
        results = stage(**{name: values[name] for name in entry.inputs})
        values.update(zip(entry.outputs, results, strict=True))
        assert all(
            torch.equal(a, b) for a, b in zip(stage(*(values[name] for name in entry.inputs)), results, strict=True)
        )
    assert torch.equal(values[entry.outputs[-1]], stagepack.load(bundle)(input_ids=ids)["logits"])


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "the argument 'input_ids' is missing"),
        ((torch.ones(2, 8),), {}, "input_ids: expected dtype int64, found float32"),
        ((torch.ones(8).long(),), {}, r"input_ids: expected 2 dimensions \[batch, sequence\], found the shape \[8\]"),
        ((torch.ones(2, 200).long(),), {}, r"input_ids: dimension 1: expected 3 to 100 \('sequence'\), found 200"),
        ((torch.ones(65, 8).long(),), {}, r"input_ids: dimension 0: expected 1 to 64 \('batch'\), found 65"),
        (([1, 2],), {}, r"input_ids: expected a tensor of int64 \[batch, sequence\], found list"),
        ((torch.ones(2, 8).long(),), {"use_cache": True}, "use_cache was fixed to False at export, found True"),
        ((torch.ones(2, 8).long(),), {"input_ids": 1}, "'input_ids' is given by position and by name"),
        ((torch.ones(2, 8).long(),), {"inputs": 1}, "there is no argument 'inputs'"),
    ],
)
def test_calls_that_do_not_fit_say_what_is_allowed(
    tied_llama: Path, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        stagepack.load(tied_llama)(*args, **kwargs)


def test_two_inputs_must_agree_on_a_size(tmp_path: Path) -> None:
    rows = {0: torch.export.Dim("rows", min=1, max=9)}
    added = module_of(lambda self, x, y: x + y)
    bundle = stagepack.export(added, (torch.ones(3), torch.ones(3)), out=tmp_path / "m", dynamic_shapes=(rows, rows))
    says = "y: dimension 0: expected 4, the size of 'rows' in x: dimension 0, found 5"
    with pytest.raises(InputError, match=says):
        stagepack.load(bundle)(torch.ones(4), torch.ones(5))


def test_a_call_takes_what_the_model_takes(tied_llama: Path) -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    ids = torch.randint(0, 128, (1, 4))
    pipe = stagepack.load(tied_llama, types=[CausalLMOutputWithPast])
    by_name, by_position = pipe(input_ids=ids), pipe(ids)
    assert isinstance(by_name, CausalLMOutputWithPast)
    assert by_name.logits is not None
    assert torch.equal(by_name.logits, by_position.logits)
    assert torch.equal(pipe(ids, None, use_cache=False, labels=None).logits, by_name.logits)


def test_the_users_model_comes_back_unchanged(tmp_path: Path) -> None:
    capture = named("state-batch-norm-that-trains")[0].capture()
    model = capture.model
    assert model is not None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    random = torch.get_rng_state()
    stagepack.export(model, capture.inputs.args, out=tmp_path / "m.stagepack", stages=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        n: held.keys() for n, held in attributes.items()
    }


def test_programs_and_their_files_are_sources_too(tmp_path: Path) -> None:
    capture = named("values-skip-over-stages")[0].capture()
    from_program = stagepack.export(capture.program, out=tmp_path / "program.stagepack", stages=2)
    torch.export.save(capture.program, tmp_path / "model.pt2")
    from_file = stagepack.export(tmp_path / "model.pt2", out=tmp_path / "file.stagepack", stages=2)
    (x,) = capture.inputs.args
    expected = capture.program.module()(x)
    assert torch.equal(stagepack.load(from_program)(x), expected)
    assert torch.equal(stagepack.load(from_file)(x), expected)


def test_what_a_bundle_cannot_hold_is_named(tmp_path: Path) -> None:
    sparse = module_of(lambda self, x: torch.sparse.mm(self.table, x), table=torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match=r"'table' cannot be stored: layout torch\.sparse_coo"):
        stagepack.export(sparse, (torch.randn(3, 3),), out=tmp_path / "m.stagepack")


def test_a_model_that_cannot_be_captured_says_why(tmp_path: Path) -> None:
    def branches(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="branches cannot be captured: Could not guard on data-dependent expression"):
        stagepack.export(module_of(branches), (torch.randn(3),), out=tmp_path / "m.stagepack")
    with pytest.raises(CaptureError, match="expected example inputs for x, found none"):
        stagepack.export(module_of(branches), out=tmp_path / "m.stagepack")


def test_devices_named_by_the_author_stay(tmp_path: Path) -> None:
    """A program captured elsewhere than on the CPU names the CPU on purpose; its own device follows the loader."""
    from stagepack.linearize import linearize_program
    from stagepack_loaders.torch.build import build_graph_module
    from stagepack_loaders.torch.resolved_operators import resolve_operators

    to_cpu = module_of(lambda self, x: (x + torch.arange(3, device=x.device)).to("cpu", copy=True))
    with torch.device("meta"):
        program = torch.export.export(to_cpu, (torch.empty(3),))
    file = read_graph(encode_graph(trivially_folded(linearize_program(capture_program(program, Inputs())).graph)), "")
    graph = file.graph
    module = build_graph_module(*file, resolve_operators(graph.ops, (), ""), torch.device("cpu"))
    devices = [node.kwargs["device"].type for node in module.graph.nodes if "device" in node.kwargs]
    assert devices == ["cpu"] * len(devices)
    on_meta = build_graph_module(*file, resolve_operators(graph.ops, (), ""), torch.device("meta"))
    given = [(str(node.target), (*node.args, *node.kwargs.values())) for node in on_meta.graph.nodes]
    named = [(target, [each.type for each in args if isinstance(each, torch.device)]) for target, args in given]
    assert {("aten.arange.default", "meta"), ("aten.to.dtype_layout", "cpu")} <= {
        (target, *types) for target, types in named
    }


def test_capture_names_dimensions_by_the_callers_names(tied_capture: Capture) -> None:
    assert tied_capture.inputs.dynamic_shapes
    batch = torch.export.Dim("rows", min=2, max=9)
    capture = capture_module(torch.nn.Linear(4, 4), Inputs(args=(torch.randn(3, 4),), dynamic_shapes=({0: batch},)))
    from stagepack.linearize.declared_sizes import declared_sizes

    assert list(declared_sizes(capture).names.values()) == ["rows"]
