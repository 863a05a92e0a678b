"""Adapters that a stranger has written, with digests that are right: each is refused by one typed error, before memory is taken."""

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.errors import StagepackError
from tests.adapters.lora import write_tiny_adapter
from tests.bundle_editor import BundleEditor, weight_file
from tests.conformance.vectors import TINY
from tests.hostile.attack import change_at, command_fails

TENSORS = "adapter.safetensors"
DEEP = b"[" * 100_000
FIELDS = ("format", "version", "base", "changes", "replaced", "files", "sha256")


def document(path: str, value: Any) -> Callable[[BundleEditor], object]:
    """Set a field of the document."""

    def change(editor: BundleEditor) -> None:
        fields = editor.manifest()
        change_at(path, value)(fields)
        editor.write_manifest(fields)

    return change


def text(old: str, new: str) -> Callable[[BundleEditor], object]:
    """Change the text of the document."""

    def change(editor: BundleEditor) -> None:
        fields = editor.manifest()
        stated = fields["sha256"]
        content = (editor / "manifest.json").read_text().replace(stated, "0" * 64)
        assert old in content
        editor.write_manifest_text(content.replace(old, new, 1))

    return change


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[BundleEditor], object]:
    return lambda editor: editor.edit_weight_header(TENSORS, change)


def file(content: bytes) -> Callable[[BundleEditor], object]:
    return lambda editor: editor.write_file(TENSORS, content)


def tensors(entries: dict[str, tuple[str, list[int]]], **fields: Any) -> Callable[[BundleEditor], object]:
    """Write other tensors of zeros, by name: a dtype and a shape; and fields of the document."""

    def change(editor: BundleEditor) -> None:
        position = 0
        stated: dict[str, Any] = {}
        for name, (dtype, shape) in entries.items():
            size = {"F32": 4, "I32": 4, "F16": 2}[dtype]
            for length in shape:
                size *= length
            if position % 64:
                padding = -position % 64
                stated[f"__padding__{len(stated)}"] = entry("U8", [padding], position, padding)
                position += padding
            stated[name] = entry(dtype, shape, position, size)
            position += size
        editor.write_file(TENSORS, weight_file(json.dumps(stated).encode(), bytes(position)))
        manifest = editor.manifest()
        editor.write_manifest({key: (manifest | fields)[key] for key in FIELDS if key in manifest | fields})

    return change


def entry(dtype: str, shape: list[int], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def pair(a: list[int], b: list[int], dtype: str = "F32", **further: list[int]) -> dict[str, tuple[str, list[int]]]:
    named = {"layer.lora_A": a, "layer.lora_B": b} | {f"layer.{name}": shape for name, shape in further.items()}
    return {name: (dtype, shape) for name, shape in named.items()}


def replace_by_folder(editor: BundleEditor) -> None:
    (editor / TENSORS).unlink()
    (editor / TENSORS).mkdir()


def replace_by_link(editor: BundleEditor) -> None:
    (editor / TENSORS).unlink()
    (editor / TENSORS).symlink_to("/dev/zero")


CHANGE = {"module": "layer", "weight": "layer.weight", "scale": 1.0}
# What the adapter itself shows, to all that read it.
SELF_EVIDENT: dict[str, tuple[Callable[[BundleEditor], object], str]] = {
    "a size that is too large": (document("files/0/size", 2**40), "M14|D1"),
    "a size that is too small": (document("files/0/size", 8), "D1"),
    "a negative size": (document("files/0/size", -1), "M5"),
    "a file that is missing": (lambda editor: (editor / TENSORS).unlink(), "D1"),
    "a folder in its place": (replace_by_folder, "D1"),
    "a device in its place": (replace_by_link, "D1"),
    "no file": (document("files", []), "A3"),
    "a name outside of the folder": (document("files/0/name", "../adapter.safetensors"), "M5"),
    "an absolute name": (document("files/0/name", "/etc/passwd"), "M5"),
    "a name with a null byte": (text(f'"{TENSORS}"', '"\\u0000"'), "M5"),
    "no changes": (document("changes", []), "E2"),
    "70,000 changes": (document("changes", [CHANGE | {"module": str(n)} for n in range(70_000)]), "L1"),
    "a module twice": (document("changes", [CHANGE, CHANGE]), "A4"),
    "a scale of NaN": (text('"scale": 4.0', '"scale": NaN'), "E1"),
    "an infinite scale": (text('"scale": 4.0', '"scale": 1e999'), "E3"),
    "a scale of many digits": (text('"scale": 4.0', f'"scale": 1{"0" * 5000}'), "E1|E3"),
    "a scale that is a list": (document("changes/0/scale", [1.0]), "E3"),
    "a module that is a number": (document("changes/0/module", 1), "E3"),
    "a module without a name": (document("changes/0/module", ""), "A4"),
    "a module of a long name": (document("changes/0/module", "x" * 5000), "A4"),
    "a lone surrogate": (text('"module": "layer"', '"module": "\\ud800"'), "E1"),
    "a key twice": (text('"scale": 4.0', '"scale": 4.0, "scale": 1.0'), "E2"),
    "nested lists": (text('"changes": [', f'"changes": [{"[" * 5000}'), "L2"),
    "a header of 2**63 bytes": (file((2**63).to_bytes(8, "little") + bytes(64)), "L1"),
    "a header of 2**40 bytes": (file((2**40).to_bytes(8, "little") + bytes(64)), "L1"),
    "a header beyond the file": (file((2**20).to_bytes(8, "little") + bytes(64)), "W1"),
    "a file of three bytes": (file(bytes(3)), "W1|W2|E1"),
    "an empty file": (file(b""), "W1|W2|E1"),
    "a nested header": (file(len(DEEP).to_bytes(8, "little") + DEEP), "L2"),
    "tensors twice": (
        file(weight_file(b'{"layer.lora_A":{},"layer.lora_A":{}}', b"")),
        "E2",
    ),
    "overlapping tensors": (header(change_at("layer.lora_B/data_offsets", [0, 24])), "W5"),
    "tensors beyond the file": (header(change_at("layer.lora_B/data_offsets", [2**40, 2**40 + 24])), "W5"),
    "sizes that overflow": (header(change_at("layer.lora_A/shape", [2**40, 2**40])), "W3|W4"),
    "a size that is negative": (header(change_at("layer.lora_A/shape", [-2, -2])), "W3"),
    "rank 0": (tensors(pair([0, 2], [3, 0])), "A5"),
    "two ranks": (tensors(pair([2, 2], [3, 3])), "A5"),
    "vectors": (tensors(pair([2], [3])), "A5"),
    "a bias of another size": (tensors(pair([2, 2], [3, 2], lora_bias=[2])), "A5"),
    "integers": (tensors(pair([2, 2], [3, 2], dtype="I32")), "A5"),
    "a tensor too many": (tensors(pair([2, 2], [3, 2]) | {"x": ("F32", [2])}), "A3"),
    "one of a pair": (tensors({"layer.lora_A": ("F32", [2, 2])}), "A3"),
    "a replaced weight of the name of a pair": (tensors(pair([2, 2], [3, 2]), replaced=["layer.lora_A"]), "A4"),
}
# What shows when the adapter is compared with its base.
UNFIT: dict[str, tuple[Callable[[BundleEditor], object], str]] = {
    "sizes without elements": (tensors(pair([2, 0], [0, 2])), r"expected lora_A \[rank, 2\]"),
    "another base": (document("base", "0" * 64), "is an adapter of the bundle 000000000000"),
    "another input size": (tensors(pair([2, 3], [3, 2])), r"expected lora_A \[rank, 2\]"),
    "another output size": (tensors(pair([2, 2], [4, 2])), r"and lora_B \[3, rank\]"),
    "an exchanged pair": (tensors(pair([3, 3], [2, 3])), r"expected lora_A \[rank, 2\]"),
    "an unknown module": (
        tensors(
            {"other.lora_A": ("F32", [2, 2]), "other.lora_B": ("F32", [3, 2])}, changes=[CHANGE | {"module": "other"}]
        ),
        "expected a module that uses its weight",
    ),
    "an unknown weight": (document("changes/0/weight", "third.weight"), "which the bundle does not have"),
    "a bias as weight": (document("changes/0/weight", "layer.bias"), "expected a matrix of floats"),
    "a replaced weight of another shape": (
        tensors(pair([2, 2], [3, 2]) | {"layer.bias": ("F32", [4])}, replaced=["layer.bias"]),
        r"expected the shape \[3\], found \[4\]",
    ),
    "an unknown replaced weight": (
        tensors(pair([2, 2], [3, 2]) | {"x": ("F32", [4])}, replaced=["x"]),
        "which the bundle does not have",
    ),
    "an unknown replaced weight beside a known one": (
        tensors(pair([2, 2], [3, 2]) | {"layer.bias": ("F32", [3]), "x": ("F32", [4])}, replaced=["layer.bias", "x"]),
        "which the bundle does not have",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_adapter(tmp_path_factory.mktemp("sound") / "a")


def refused(says: str, call: Callable[[], object]) -> None:
    """Call what must soon end with a typed error."""
    start = time.monotonic()
    with pytest.raises(StagepackError, match=says):
        call()
    assert time.monotonic() - start < 10


def refused_in_little_memory(says: str, call: Callable[[], object]) -> None:
    tracemalloc.start()  # which takes ten times as long
    try:
        with pytest.raises(StagepackError, match=says):
            call()
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("attack", [*SELF_EVIDENT, *UNFIT])
def test_an_adapter_is_refused(attack: str, sound: Path, tmp_path: Path) -> None:
    spoil, says = (SELF_EVIDENT | UNFIT)[attack]
    editor = BundleEditor.copy(sound, tmp_path / "bad")
    spoil(editor)
    before = sorted(tmp_path.iterdir())
    path, out = str(editor.path), str(tmp_path / "out")
    refused_in_little_memory(says, lambda: stagepack.load(TINY, adapters=[path]))
    refused(says, lambda: stagepack.merge_adapter(TINY, path, out=out))
    command_fails("load", str(TINY), "--adapter", path)
    command_fails("adapter", path, "--base", str(TINY), "--merge", "-o", out)
    if attack in SELF_EVIDENT:
        refused(says, lambda: stagepack.verify(path))
        for command in ("verify", "inspect"):
            command_fails(command, path)
    assert sorted(tmp_path.iterdir()) == before


def test_the_sound_adapter_is_taken(sound: Path, tmp_path: Path) -> None:
    stagepack.verify(sound, strict=True)
    assert stagepack.load(TINY, adapters=[sound]).adapters == ("a",)
    shutil.copytree(sound, tmp_path / "b")
    assert stagepack.load(TINY, adapters={"x": sound, "y": tmp_path / "b"}).adapters == ("x", "y")
