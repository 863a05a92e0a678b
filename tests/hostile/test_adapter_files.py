"""Folders of adapters that are damaged, of another model, or made to do harm: each is refused by one typed error."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import stagepack
from stagepack.errors import AdapterError, FormatError, OptionError, OutputExistsError, StagepackError, WriteError
from stagepack.format.chunks import chunk_digest, file_entry
from stagepack.format.manifest_codec import encode_manifest
from stagepack.roads.onnx import add_onnx
from tests.adapters.lora import PREFIX, write_lora
from tests.hostile.attack import command_fails

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


class Model(torch.nn.Module):
    """Two layers, of which an adapter changes the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    model = Model().eval()
    add_onnx(stagepack.export(model, (torch.randn(3, 8),), out=folder / "m.stagepack", stages=2))
    write_lora(model, folder / "lora", {"first": 2})
    return folder


@pytest.fixture
def lora(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "lora", tmp_path / "lora"))


def settings(**fields: Any) -> Callable[[Path], None]:
    """Change fields of the settings; a text is JSON as it is."""

    def change(folder: Path) -> None:
        known = json.loads((folder / SETTINGS).read_text())
        texts = {name: json.dumps(value) for name, value in (known | fields).items()}
        texts |= {name: value.removeprefix("=") for name, value in fields.items() if str(value).startswith("=")}
        (folder / SETTINGS).write_text("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}")

    return change


def tensors(**changes: Any) -> Callable[[Path], None]:
    """Change tensors by the end of their names, with ``_`` for dots; None removes one."""

    def change(folder: Path) -> None:
        loaded = load_file(folder / TENSORS)
        for name, tensor in changes.items():
            loaded[PREFIX + name.replace("__", ".")] = tensor
        save_file({name: tensor for name, tensor in loaded.items() if tensor is not None}, folder / TENSORS)

    return change


def unending(pattern: str, module: str = "a" * 40) -> Callable[[Path], None]:
    """Add a module with a long name, and a pattern that takes long to match it."""

    def change(folder: Path) -> None:
        pair = {"lora_A.weight": torch.zeros(2, 8), "lora_B.weight": torch.zeros(6, 2)}
        tensors(**{f"{module}.{name}": tensor for name, tensor in pair.items()})(folder)
        settings(rank_pattern={pattern: 2})(folder)

    return change


def header(fields: Any, length: int | None = None) -> Callable[[Path], None]:
    """Replace the file of the tensors by a header and 64 bytes."""

    def change(folder: Path) -> None:
        text = (fields if isinstance(fields, str) else json.dumps(fields)).encode()
        size = len(text) if length is None else length
        (folder / TENSORS).write_bytes(size.to_bytes(8, "little") + text + bytes(64))

    return change


def replace_by_folder(folder: Path) -> None:
    (folder / TENSORS).unlink()
    (folder / TENSORS).mkdir()


ENTRY = {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}
ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another kind": (settings(peft_type="LOHA"), "expected an adapter of the kind LORA, found LOHA: merge it"),
    "IA3": (settings(peft_type="IA3"), "found IA3: merge it"),
    "DoRA": (settings(use_dora=True), r"found DoRA \(use_dora\): merge it"),
    "QALoRA": (settings(use_qalora=True), "found QALoRA"),
    "target parameters": (settings(target_parameters=["first.weight"]), "found target_parameters"),
    "trained tokens": (settings(trainable_token_indices=[1]), "found trainable_token_indices"),
    "PiSSA": (
        settings(init_lora_weights="pissa"),
        "found init_lora_weights 'pissa', which changes the weights of the base",
    ),
    "CorDA": (settings(init_lora_weights="corda"), "found init_lora_weights 'corda'"),
    "NaN": (settings(lora_alpha="=NaN"), "not JSON.* the field 'lora_alpha' has a number that no float holds"),
    "infinity": (settings(lora_alpha="=1e999"), "the field 'lora_alpha' has a number that no float holds"),
    "an infinity of an adapter of many": (
        settings(rank_pattern='={"a": -Infinity}'),
        "the field 'a' has a number that",
    ),
    "an integer beyond floats": (settings(lora_alpha="=1" + "0" * 400), "expected a finite lora_alpha|not JSON"),
    "a text as alpha": (settings(lora_alpha="high"), 'lora_alpha: expected a number, found "high"'),
    "another rank": (settings(rank_pattern={}, r=3), "states the rank 3, its tensors have 2"),
    "patterns that are a list": (settings(alpha_pattern=["first"]), "alpha_pattern: expected an object, found list"),
    "a pattern without end": (settings(alpha_pattern={"(a+)+$": 1}), "expected a pattern with at most 2 repetitions"),
    "a pattern of many repetitions": (settings(alpha_pattern={".*.*.*x": 1}), "expected a pattern with at most 2"),
    "a pattern that is none": (settings(alpha_pattern={"[": 1}), "is no regular expression"),
    "a pattern of many optional parts": (unending("a?" * 40 + "a" * 40), "at most 4096 paths"),
    "a pattern of many alternatives": (unending("(a|aa|b)" * 40 + "c"), "at most 4096 paths"),
    "patterns that take many steps": (
        unending("[a.]*[a.]*b", module=".".join("a" * 512)),
        "rank_pattern: expected patterns that 2 modules match in 3e\\+08 steps, found",
    ),
    "patterns of many names": (
        settings(alpha_pattern={f"a*{number}": 1 for number in range(1001)}),
        "alpha_pattern: expected at most 1000 patterns, found 1001",
    ),
    "a repetition without end": (settings(alpha_pattern={"a{99999999999}": 1}), "is no regular expression: the repet"),
    "a module of a long name": (unending("b", module="a" * 1025), "expected names of at most 1024 characters"),
    "tensors with the same bytes": (
        header({f"{PREFIX}first.lora_{letter}.weight": ENTRY for letter in "AB"}),
        r"first\.lora_A\.weight and .*first\.lora_B\.weight have bytes \d+ to \d+ both",
    ),
    "settings that are a list": (lambda folder: (folder / SETTINGS).write_text("[]"), "expected an object, found list"),
    "a key twice": (lambda folder: (folder / SETTINGS).write_text('{"r": 1, "r": 2}'), "duplicate key 'r'"),
    "one of a pair": (tensors(first__lora_B__weight=None), "expected a pair lora_A and lora_B, found lora_A alone"),
    "a pair of two ranks": (tensors(first__lora_B__weight=torch.zeros(6, 3)), r"expected lora_A \[rank, in\]"),
    "a convolution": (tensors(first__lora_A__weight=torch.zeros(2, 8, 1, 1)), "such as of a convolution"),
    "a pair twice": (
        tensors(first__lora_embedding_A=torch.zeros(2, 8), first__lora_embedding_B=torch.zeros(6, 2)),
        "first has its lora_A twice",
    ),
    "another input size": (
        tensors(first__lora_A__weight=torch.zeros(2, 9)),
        r"first: expected lora_A \[rank, 8\] and lora_B \[6, rank\], found \[2, 9\] and \[6, 2\]",
    ),
    "a bias of another size": (
        tensors(first__lora_B__bias=torch.zeros(5)),
        "expected a bias of 6 numbers|expected lora_A",
    ),
    "a module of another model": (
        tensors(third__lora_A__weight=torch.zeros(2, 8), third__lora_B__weight=torch.zeros(6, 2)),
        "the rank 8, its tensors have 2|which has no weights third.weight",
    ),
    "a weight of another shape": (
        tensors(second__bias=torch.zeros(5)),
        r"second.bias: expected the shape \[4\], found \[5\]",
    ),
    "a weight of another model": (tensors(third__bias=torch.zeros(5)), "which has no weights third.bias"),
    "a vector of magnitudes": (
        tensors(first__lora_magnitude_vector=torch.zeros(6)),
        "is no tensor of a plain low-rank",
    ),
    "integers": (tensors(first__lora_A__weight=torch.zeros(2, 8, dtype=torch.int32)), "expected floats, found I32"),
    "names without a prefix": (
        lambda folder: save_file({"first.lora_A.weight": torch.zeros(2, 8)}, folder / TENSORS),
        r"expected tensors named base_model\.model\.",
    ),
    "no tensors": (header({}), "has no tensors"),
    "no file of tensors": (
        lambda folder: (folder / TENSORS).unlink(),
        "expected the tensors in adapter_model.safetensors",
    ),
    "pickle": (
        lambda folder: (folder / TENSORS).rename(folder / "adapter_model.bin"),
        "save the adapter with safe_serialization=True",
    ),
    "a header beyond the file": (header({}, length=2**20), "cut short: its header states 1048576 bytes"),
    "a header beyond the limit": (header({}, length=2**40), "cut short: its header states"),
    "a header that is no object": (header("[1]"), "expected a header that is an object"),
    "tensors beyond the file": (
        header({f"{PREFIX}first.lora_A.weight": ENTRY | {"data_offsets": [0, 2**40], "shape": [2**38]}}),
        "ends at byte",
    ),
    "sizes that overflow": (
        header({f"{PREFIX}first.lora_A.weight": ENTRY | {"shape": [2**40, 2**40]}}),
        "adapter_model.safetensors: base_model",
    ),
    "a folder in the place of the tensors": (
        replace_by_folder,
        "expected the tensors in",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_folder_of_peft_is_refused(attack: str, made: Path, lora: Path, tmp_path: Path) -> None:
    spoil, says = ATTACKS[attack]
    spoil(lora)
    start = time.monotonic()
    with pytest.raises((AdapterError, FormatError, OptionError), match=says):
        stagepack.write_adapter(made / "m.stagepack", lora, out=tmp_path / "out")
    assert time.monotonic() - start < 2
    assert not (tmp_path / "out").exists()
    command_fails("adapter", str(lora), "--base", str(made / "m.stagepack"), "-o", str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora"]


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
@pytest.mark.parametrize("name", ["manifest.json", "adapter.safetensors"])
def test_no_changed_byte_of_an_adapter_is_loaded(
    name: str, runtime: str, made: Path, lora: Path, tmp_path: Path
) -> None:
    adapter = stagepack.write_adapter(made / "m.stagepack", lora, out=tmp_path / "a").path
    content = (adapter / name).read_bytes()
    for position in range(0, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[position] ^= 1
        (adapter / name).write_bytes(changed)
        with pytest.raises(StagepackError):
            stagepack.load(made / "m.stagepack", adapters=[adapter], runtime=runtime)
    for length in (0, 7, len(content) // 2):
        (adapter / name).write_bytes(content[:length])
        with pytest.raises(StagepackError):
            stagepack.load(made / "m.stagepack", adapters=[adapter], runtime=runtime)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
@pytest.mark.parametrize(
    ("field", "value"), [("module", "other"), ("weight", "second.weight"), ("weight", "third.weight")]
)
def test_a_change_that_no_stage_applies_is_refused(
    field: str, value: str, runtime: str, made: Path, lora: Path, tmp_path: Path
) -> None:
    good = stagepack.write_adapter(made / "m.stagepack", lora, out=tmp_path / "good")
    bad = Path(shutil.copytree(good.path, tmp_path / "bad"))
    change = msgspec.structs.replace(good.document.changes[0], **{field: value})
    if field == "module":
        content = (bad / "adapter.safetensors").read_bytes().replace(b'"first.lora', b'"other.lora')
        (bad / "adapter.safetensors").write_bytes(content)
        entry = file_entry("adapter.safetensors", len(content), [chunk_digest(content)])
    else:
        [entry] = good.listed
    document = msgspec.structs.replace(good.document, changes=(change,), files=(entry,))
    (bad / "manifest.json").write_bytes(encode_manifest(document))
    with pytest.raises(AdapterError, match=r"expected a module that uses its weight|which the bundle does not have"):
        stagepack.load(made / "m.stagepack", adapters=[good.path, bad], runtime=runtime)


def test_the_output_of_an_adapter_replaces_adapters_alone(made: Path, lora: Path, tmp_path: Path) -> None:
    bundle, out = made / "m.stagepack", tmp_path / "a"
    stagepack.write_adapter(bundle, lora, out=out)
    with pytest.raises(OutputExistsError):
        stagepack.write_adapter(bundle, lora, out=out)
    stagepack.write_adapter(bundle, lora, out=out, overwrite=True)
    (out / "mine.txt").touch()
    for path in (out, lora, bundle):
        before = sorted(path.iterdir())
        with pytest.raises(OutputExistsError, match=r"is not an adapter|files that are not of the adapter"):
            stagepack.write_adapter(bundle, lora, out=path, overwrite=True)
        assert sorted(path.iterdir()) == before
    with pytest.raises(WriteError):
        stagepack.write_adapter(bundle, lora, out=bundle / "a")
    with pytest.raises(WriteError):
        stagepack.write_adapter(bundle, lora, out=tmp_path / "none" / "a")
