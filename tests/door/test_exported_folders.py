"""The folder that transformers' exporters write is a source: an entry point of each component, and each weight once."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter

import stagepack
from stagepack.errors import CaptureError, OptionError
from tests.door.test_folders import hub_cache
from tests.hostile.attack import run
from tests.made_once import made_once

# The exporter warns of this torch, and of sizes that it marks as dynamic.
pytestmark = pytest.mark.filterwarnings("ignore")
_TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64},
    "num_hidden_layers": 2,
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_PICTURES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    **{"image_size": 16, "patch_size": 8},
    "projection_dim": 16,
}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT)).eval()


def llava() -> Any:
    """A model of pictures and text with tied embeddings, of which the exporter makes programs of parts."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=transformers.CLIPVisionConfig(**_PICTURES),
        image_token_index=99,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def prompt(*, pictures: bool = False) -> dict[str, Any]:
    input_ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if pictures:
        input_ids[:, 1:5] = 99
        inputs["pixel_values"] = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    return inputs


def _write(make: Callable[[], Any], *, pictures: bool = False) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        exporter, config = DynamoExporter(), DynamoConfig(dynamic=True)
        exporter.export_for_generation(make(), prompt(pictures=pictures), config).save_pretrained(folder / "x")

    return write


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "exported-llama", _write(llama)) / "x"


@pytest.fixture(scope="module")
def text_bundle(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> stagepack.Bundle:
    """The programs of `text_folder`, of which each is cut otherwise."""
    out = tmp_path_factory.mktemp("bundles") / "m.stagepack"
    return stagepack.export(text_folder, out=out, stages={"prefill": 2, "decode": 3})


@pytest.fixture(scope="module")
def parts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "exported-llava", _write(llava, pictures=True)) / "x"


@pytest.fixture
def own_folder(text_folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may change."""
    return Path(shutil.copytree(text_folder, tmp_path / "x"))


def weight_names(bundle: stagepack.Bundle) -> set[str]:
    """The names of the tensors in the index, which other libraries read the bundle by."""
    index = json.loads((Path(bundle.path) / "model.safetensors.index.json").read_bytes())
    return set(index["weight_map"])


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if "example" not in path.name)


def test_text_is_generated_as_by_the_model(text_bundle: stagepack.Bundle) -> None:
    assert [entry_point.name for entry_point in text_bundle.entry_points] == ["prefill", "decode"]
    pipes = stagepack.load_entry_points(text_bundle, types=[transformers.DynamicCache])
    model = llama()
    # Another batch and another length than those of the export.
    tokens = torch.randint(3, 90, (3, 5))
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None)
    positions = torch.arange(5).repeat(3, 1)
    cache = transformers.DynamicCache(config=model.config)
    answer = pipes["prefill"](input_ids=tokens, position_ids=positions, past_key_values=cache)
    for position in range(5, 11):
        tokens = torch.cat([tokens, answer["logits"][:, -1:].argmax(-1)], 1)
        answer = pipes["decode"](
            input_ids=tokens[:, -1:],
            position_ids=torch.full((3, 1), position),
            past_key_values=answer["past_key_values"],
        )
    assert torch.equal(tokens, expected)


def test_each_weight_is_stored_once_under_its_name(text_bundle: stagepack.Bundle) -> None:
    parameters = dict(llama().named_parameters())
    assert weight_names(text_bundle) == {*parameters}
    elements = sum(parameter.numel() for parameter in parameters.values())
    assert stored_bytes(Path(text_bundle.path)) < 4 * elements + 8_000


def test_parts_have_the_names_of_the_model_and_share_tied_weights(parts_folder: Path, tmp_path: Path) -> None:
    bundle = stagepack.export(
        parts_folder, out=tmp_path / "m.stagepack", split_at={"language_model": ["model.language_model.layers.1"]}
    )
    assert [entry_point.name for entry_point in bundle.entry_points] == ["language_model", "lm_head", "decode"]
    model = llava()
    # In the programs are the parameters of the text model alone: the exporter leaves out its pictures.
    expected = {name for name, _ in model.named_parameters() if name.startswith("model.language_model.")}
    assert weight_names(bundle) == expected
    head = bundle.select("lm_head").graph(0)
    assert head.weights[0].names == ("model.language_model.embed_tokens.weight", "lm_head.weight")
    assert {scope.path for scope in head.scopes} == {"lm_head"}
    hidden = torch.randn(2, 5, 32)
    assert torch.equal(stagepack.load_entry_points(bundle)["lm_head"](input=hidden), model.lm_head(hidden))


def test_a_model_that_is_exported_as_a_whole_is_the_only_entry_point(tmp_path: Path) -> None:
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, 90, (2, 9)), "use_cache": False}
    exported = DynamoExporter().export(llama(), inputs, DynamoConfig(dynamic=True))
    exported.save_pretrained(tmp_path / "x")
    bundle = stagepack.export(tmp_path / "x", out=tmp_path / "m.stagepack", split_at=["model.layers.1"])
    assert bundle.entry_point.name == "forward"
    tokens = torch.randint(3, 90, (3, 4))
    expected = exported(input_ids=tokens).logits
    assert torch.equal(stagepack.load(bundle)(input_ids=tokens)["logits"], expected)


Change = Callable[[dict[str, Any]], object]


def _copy_of_prefill(manifest: dict[str, Any], name: str, file: str) -> None:
    manifest["components"][name] = {**manifest["components"]["prefill"], "file": file}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda m: m.update(schema_version=2),
            r"export.json: expected schema_version 1, found 2: export the model again",
        ),
        (lambda m: m.update(schema_version="1"), r"expected the manifest of an export .* `\$.schema_version`"),
        (lambda m: m.update(export_format="onnx"), r"expected export_format 'dynamo', found 'onnx': .* DynamoExporter"),
        (lambda m: m.pop("export_format"), r"expected the manifest .* missing required field `export_format`"),
        (lambda m: m.update(components={}), r"expected at least one component, found none"),
        (lambda m: m.update(components=[]), r"expected the manifest .* `object`, got `array` - at `\$.components`"),
        (
            lambda m: _copy_of_prefill(m, "pre.fill", "a.pt2"),
            r"expected names of components that are .* found 'pre.fill'",
        ),
        (lambda m: _copy_of_prefill(m, "", "a.pt2"), r"expected names of components that are .* found ''"),
        (lambda m: _copy_of_prefill(m, "class", "a.pt2"), r"expected names of components that are .* found 'class'"),
        (lambda m: _copy_of_prefill(m, "Prefill", "a.pt2"), r"'prefill' and 'Prefill' have one name, where case"),
        (lambda m: _copy_of_prefill(m, "more", "prefill.pt2"), r"prefill and more have one file, prefill.pt2"),
        (lambda m: _copy_of_prefill(m, "more", "more.pt2"), r"more.pt2: no such file: it has the component more"),
        (lambda m: _copy_of_prefill(m, "more", "../x/a.pt2"), r"more: expected the name of a .pt2 file in this folder"),
        (lambda m: _copy_of_prefill(m, "more", "/x/a.pt2"), r"more: expected the name of a .pt2 file in this folder"),
        (lambda m: _copy_of_prefill(m, "more", "..\\a.pt2"), r"more: expected the name of a .pt2 file in this folder"),
        (lambda m: _copy_of_prefill(m, "more", "a.onnx"), r"more: expected the name of a .pt2 file in this folder"),
        (lambda m: m["components"]["decode"].pop("file"), r"missing required field `file` - at `\$.components\[...\]`"),
        (
            lambda m: m["components"]["decode"]["metadata"].update(
                in_spec='"type": "transformers.cache_utils:NoCache"'
            ),
            r"export.json: this transformers has no transformers.cache_utils.NoCache: install the version",
        ),
        (
            lambda m: m["components"]["decode"]["metadata"].update(in_spec='"type": "transformers.no_module:Cache"'),
            r"export.json: this transformers has no transformers.no_module.Cache: install the version",
        ),
    ],
)
def test_a_wrong_manifest_gives_one_error(own_folder: Path, tmp_path: Path, change: Change, says: str) -> None:
    path = own_folder / "export.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match=says):
        stagepack.export(own_folder, out=tmp_path / "m.stagepack")
    assert not (tmp_path / "m.stagepack").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", r"export.json: expected the manifest of an export of transformers: Expecting value"),
        ("[]", r"export.json: expected the manifest of an export of transformers: Expected `object`, got `array`"),
        ("\xff", r"export.json: expected the manifest of an export of transformers: "),
        ("[" * 100_000, r"export.json: expected the manifest of an export of transformers: "),
        (
            '{"export_format": "dynamo", "components": {"a": {"file": "a.pt2"}, "a": {"file": "b.pt2"}}}',
            r"expected the manifest of an export of transformers: expected 'a' once, found it 2 times",
        ),
    ],
)
def test_a_manifest_that_is_none_gives_one_error(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "export.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CaptureError, match=says):
        stagepack.export(tmp_path / "x", out=tmp_path / "m.stagepack")


def _truncate(folder: Path) -> None:
    path = folder / "decode.pt2"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _exchange(folder: Path) -> None:
    (folder / "decode.pt2").rename(folder / "other")
    (folder / "prefill.pt2").rename(folder / "decode.pt2")
    (folder / "other").rename(folder / "prefill.pt2")


def _make_folder(folder: Path) -> None:
    (folder / "decode.pt2").unlink()
    (folder / "decode.pt2").mkdir()


def _other_program(folder: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), folder / "decode.pt2")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "decode.pt2").unlink(), r"decode.pt2: no such file: it has the component decode"),
        (_make_folder, r"decode.pt2: no such file: it has the component decode"),
        (lambda folder: (folder / "decode.pt2").write_bytes(b"no zip"), r"decode.pt2: expected a .pt2 file that"),
        (_truncate, r"decode.pt2: expected a .pt2 file that torch.export.save wrote"),
        (_exchange, r"decode.pt2: its inputs are other than those that export.json states for the component decode"),
        (_other_program, r"decode.pt2: its inputs are other than those that export.json states"),
    ],
)
def test_a_wrong_file_gives_one_error(
    own_folder: Path, tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    change(own_folder)
    with pytest.raises(CaptureError, match=says):
        stagepack.export(own_folder, out=tmp_path / "m.stagepack")


def _save(folder: Path, programs: Mapping[str, torch.export.ExportedProgram]) -> Path:
    """A folder of programs, as `ExportedModel.save_pretrained` writes it."""
    folder.mkdir()
    for name, program in programs.items():
        torch.export.save(program, folder / f"{name}.pt2")
    components = {name: {"file": f"{name}.pt2", "metadata": {}} for name in programs}
    (folder / "export.json").write_text(json.dumps({"export_format": "dynamo", "components": components}))
    return folder


class Twice(torch.nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = copy.deepcopy(self.first)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.second(self.first(x)) + self.calls
        return result


def _program(model: torch.nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model, (torch.ones(2, 4),))


def _twins(folder: Path) -> Path:
    program = _program(Twice())
    return _save(folder / "x", {"one": program, "two": program})


def test_the_command_exports_and_examines_a_folder(text_bundle: stagepack.Bundle, tmp_path: Path) -> None:
    folder, out = _twins(tmp_path), str(tmp_path / "m.stagepack")
    done = run("export", str(folder / "export.json"), "-o", out, "--stages", "2")
    assert done.exit_code == 0
    assert "entry point one" in done.stdout
    for bundle in (out, str(text_bundle.path)):
        assert run("verify", bundle, "--run").exit_code == 0
    done = run("doctor", str(folder))
    assert done.exit_code == 0
    assert "entry point two" in done.stdout


def test_a_folder_with_a_model_and_programs_is_the_model(tmp_path: Path) -> None:
    folder = _twins(tmp_path)
    llama().save_pretrained(folder)
    model = stagepack.export(folder, out=tmp_path / "model.stagepack")
    programs = stagepack.export(folder / "export.json", out=tmp_path / "programs.stagepack")
    assert [entry_point.name for entry_point in model.entry_points] == ["forward"]
    assert [entry_point.name for entry_point in programs.entry_points] == ["one", "two"]


def test_weights_of_one_name_that_differ_are_refused(tmp_path: Path) -> None:
    model = Twice()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.second.bias[2] *= -1
    folder = _save(tmp_path / "x", {"one": _program(model), "two": _program(other)})
    says = r"x: two: expected the weight second.bias of one \(float32\[4\] on cpu\), found other values"
    with pytest.raises(CaptureError, match=says):
        stagepack.export(folder, out=tmp_path / "m.stagepack")


def test_equal_parts_are_told_apart_by_the_names_of_the_programs(tmp_path: Path) -> None:
    model = Twice()
    folder = _save(tmp_path / "x", {"second": _program(model.second), "whole": _program(model)})
    bundle = stagepack.export(folder, out=tmp_path / "m.stagepack")
    names = {weight.names for weight in bundle.select("second").graph(0).weights}
    assert names == {("second.weight",), ("second.bias",)}


def test_state_is_shared_by_the_programs_that_write_it(tmp_path: Path) -> None:
    pipes = stagepack.load_entry_points(stagepack.export(_twins(tmp_path), out=tmp_path / "m.stagepack", stages=2))
    x = torch.ones(2, 4)
    first, second = pipes["one"](x), pipes["two"](x)
    torch.testing.assert_close(second, first + 1)


def test_a_folder_of_links_is_read_as_caches_and_mounts_have_it(tmp_path: Path) -> None:
    folder = hub_cache(_save(tmp_path / "x", {"model": _program(Twice())}), tmp_path / "cache")
    bundle = stagepack.export(folder, out=tmp_path / "m.stagepack")
    assert bundle.entry_point.name == "forward"


def test_examples_are_given_by_the_names_of_the_components(tmp_path: Path) -> None:
    folder = _twins(tmp_path)
    given = {"two": stagepack.Inputs(args=(torch.full((2, 4), 3.0),))}
    bundle = stagepack.export(folder, out=tmp_path / "m.stagepack", entry_points=given)
    bundle.verify()
    out = tmp_path / "n.stagepack"
    with pytest.raises(
        OptionError, match=r"inputs: .*x has the entry points one, two: pass a dict of stagepack.Inputs"
    ):
        stagepack.export(folder, (torch.ones(2, 4),), out=out)
    with pytest.raises(OptionError, match=r"entry_points: expected names among one, two, found 'three'"):
        stagepack.export(folder, out=out, entry_points={"three": stagepack.Inputs()})
    with pytest.raises(OptionError, match=r"entry_points: expected stagepack.Inputs for 'one', found tuple"):
        stagepack.export(folder, out=out, entry_points={"one": (1,)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modules": ["first"]}, r"modules: .*x holds exported programs: each becomes an entry point"),
        ({"dtype": "bfloat16"}, r"dtype: it is for a Hugging Face folder or hub name"),
        ({"weights": "w.safetensors"}, r"weights: expected a function that makes the module"),
        ({"strict": True}, r"strict: an exported program is captured already"),
    ],
)
def test_options_that_need_a_module_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    folder = _save(tmp_path / "x", {"one": _program(Twice())})
    with pytest.raises((OptionError, CaptureError), match=says):
        stagepack.export(folder, out=tmp_path / "m.stagepack", **options)


def test_generation_needs_the_model(text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"expected a module, found exported programs \(prefill, decode\)"):
        stagepack.export(text_folder, out=tmp_path / "m.stagepack", generate=16)
