"""Manifests that lie: sealed with the right digest, so that the rule itself has to refuse them."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import stagepack
from stagepack.errors import DigestError, FormatError, LimitError, NotABundleError, VersionError
from stagepack.format import limits
from stagepack.format.chunks import chunk_count, file_entry
from tests.bundle_editor import ZERO_DIGEST, BundleEditor, rename_value
from tests.hostile.attack import Attack, Seen, attacks, change_at, check


def put(path: str, value: Any) -> Callable[[BundleEditor], None]:
    """Set one field of the manifest."""
    return lambda editor: editor.edit_manifest(change_at(path, value))


def entry(path: str, value: Any) -> Callable[[BundleEditor], None]:
    """Set one field of the only entry point."""
    return put(f"entry_points/0/{path}", value)


def rename(old: str, new: str) -> Callable[[BundleEditor], None]:
    """Call something else what has a name, wherever the manifest has it."""
    return lambda editor: editor.edit_manifest(lambda fields: fields.update(rename_value(fields, old, new)))


def rename_file(new: str) -> Callable[[BundleEditor], None]:
    """Call a listed file something else."""
    return rename("stage-1.safetensors", new)


def text(content: str) -> Callable[[BundleEditor], None]:
    """Put a text in the place of the manifest."""
    return lambda editor: editor.write_manifest_text(content)


def without_edges(editor: BundleEditor) -> None:
    editor.edit_manifest(lambda fields: fields["entry_points"][0].pop("edges"))


def without_digest(editor: BundleEditor) -> None:
    editor.write_manifest_text(json.dumps(editor.manifest(), indent=1))


def not_utf_8(editor: BundleEditor) -> None:
    (editor / "manifest.json").write_bytes(b'{"format": "\xff"}')


def twice(key: str) -> Callable[[BundleEditor], None]:
    """Let a key of the manifest stand twice; the second one, that most readers take, is the true one."""

    def make(editor: BundleEditor) -> None:
        text = json.dumps(editor.manifest() | {"sha256": ZERO_DIGEST}, indent=1, ensure_ascii=False) + "\n"
        line = next(line for line in text.splitlines() if line.strip().startswith(f'"{key}":'))
        editor.write_manifest_text(text.replace(line, f"{line.rstrip(',')},\n{line}", 1))

    return make


def nested(depth: int) -> Any:
    """Containers of a result, one inside the other."""
    tree: Any = {"type": "value", "name": "div"}
    for _ in range(depth):
        tree = {"type": "sequence", "kind": "list", "items": [tree]}
    return tree


NO_FILE_NAMES = [
    "../escape", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".hidden", "nul\0byte", "new\nline", "a b",
    "é.safetensors", "x" * 201, "ends.", "C:x", "~root", "$HOME",
]  # fmt: skip

ATTACKS = [
    *attacks(
        VersionError,
        Seen.OPEN,
        (put("version", "2.0"), r"has format 2\.0.* reads 1\.x: upgrade stagepack"),
        (put("version", "1000.3"), r"has format 1000\.3"),
        (
            put("features", ["sparse", "time-travel"]),
            r"needs the features \['sparse', 'time-travel'\].*upgrade stagepack",
        ),
    ),
    *attacks(
        FormatError,
        Seen.OPEN,
        (put("version", "0.9"), r"expected a version such as 1\.0, found '0\.9'"),
        (put("version", 1.0), "expected a version such as"),
        (put("version", "1.0; import os"), "expected a version such as"),
        (put("version", "\u0661.\u0660"), "expected a version such as"),
        (put("features", "sparse"), "expected the features as a list"),
        (put("exec", "import os"), r"\$: the field 'exec' is unknown"),
        (entry("stages/1/code", "x"), r"stages\[1\]: the field 'code' is unknown"),
        (twice("device"), "duplicate key 'device'"),
        (twice("weight_bytes"), "duplicate key 'weight_bytes'"),
        (entry("stages", []), f"expected 1 to {limits.STAGES}, found 0"),
        (entry("stages", 3), r"Expected `array`, got `int` - at `.*\.stages`"),
        (without_edges, "missing required field `edges`"),
        (entry("stages/1/flops", 2**64), r"stages\[1\]\.flops"),
        (entry("stages/1/weight_bytes", -1), "stage 1: .* is negative"),
        (entry("stages/1/graph", "stage-9.msgpack"), "uses 'stage-9.msgpack', which is not"),
        (put("device", "cpu; rm -rf"), "'cpu; rm -rf' is not a device type"),
        *((rename_file(name), "not a plain file name") for name in NO_FILE_NAMES),
        (rename_file("manifest.json"), "'manifest.json': .*a reserved name"),
        (rename_file("model.sig"), "'model.sig': .*a reserved name"),
        (rename_file("STAGE-2.safetensors"), "duplicate name, where case is ignored"),
        (put("files/0/blake3", "x" * 64), "the digest is not 64 hexadecimal digits"),
        (put("files/0/size", -1), "the size is negative"),
        (entry("edges/1/producer", 2), "edge embedding_0: expected consumers after stage 2, ascending, found 1"),
        (entry("edges/1/consumers", [7]), "edge embedding_0: expected consumers after stage 0, ascending, found 7"),
        (entry("edges/1/consumers", [-1]), "edge embedding_0: expected consumers after stage 0, ascending, found -1"),
        (entry("edges/1/consumers", [2]), "stage 1: its inputs or outputs"),
        (entry("edges/1/name", "gelu_2"), "edge gelu_2: the name is not an identifier, or is a duplicate"),
        (rename("gelu_2", "x;import os"), "edge x;import os: the name is not an identifier"),
        (rename("gelu_2", "lambda"), "edge lambda: the name is not an identifier"),
        (entry("edges/1/shape", ["batch", "n"]), "the symbol 'n' is not declared"),
        (entry("edges/1/shape", [-4]), "expected a size of at least 0, found -4"),
        (entry("edges/1/shape", [2**63 - 1]), "expected at most 4611686018427387904"),
        (entry("edges/1/shape", [{"op": "exec", "args": [1, 2]}]), "'exec' of 2 operands"),
        (entry("signature/result", {"type": "value", "name": "ghost"}), "'ghost'"),
        (entry("signature/result", {"type": "import", "name": "os"}), "Invalid value 'import'"),
        (entry("signature/result/kind", "set"), "Invalid enum value 'set'"),
        (
            entry("signature/result", {"type": "dict", "kind": "defaultdict", "items": [], "factory": "eval"}),
            "Invalid enum value 'eval'",
        ),
        (text('{"format": "stagepack", "version": ' + "9" * 100_000 + "}"), "out of range"),
        (not_utf_8, "not JSON"),
        (text('{"format": "stagepack", "x": NaN}'), "not JSON"),
        (text('{"format": "stagepack", "x": "\\ud800"}'), "not JSON"),
    ),
    *attacks(NotABundleError, Seen.OPEN, (put("format", "cargo"), "not a stagepack manifest")),
    *attacks(
        LimitError,
        Seen.OPEN,
        (entry("edges/1/shape", [1] * 65), "expected at most 64 dimensions, found 65"),
        (entry("signature/result", nested(65)), "nested deeper than 64"),
        (text("[" * 100_000), "nested too deep"),
        (text('{"format":"stagepack","x":' * 100_000), "nested too deep"),
    ),
    *attacks(DigestError, Seen.OPEN, (without_digest, "the file was changed")),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_a_manifest_that_lies_is_refused_when_it_is_opened(attack: Attack, editor: BundleEditor) -> None:
    check(attack, editor)


def test_a_manifest_over_the_limit_is_refused_unread(editor: BundleEditor) -> None:
    with (editor / "manifest.json").open("r+b") as file:
        file.truncate(limits.MANIFEST_BYTES + 1)  # a hole: no disk is used
    [attack] = attacks(LimitError, Seen.OPEN, (lambda _: None, f"expected at most {limits.MANIFEST_BYTES} bytes"))
    check(attack, editor)


def test_a_graph_that_is_said_to_be_over_the_limit_is_refused_unread(editor: BundleEditor) -> None:
    size = limits.GRAPH_BYTES + 1
    names = [file["name"] for file in editor.manifest()["files"]]
    editor.truncate("stage-1.msgpack", size)  # a hole: no disk is used
    listed = msgspec.to_builtins(file_entry("stage-1.msgpack", size, ["0" * 64] * chunk_count(size)))
    put(f"files/{names.index('stage-1.msgpack')}", listed)(editor)
    with pytest.raises(LimitError, match=r"stage-1\.msgpack: expected at most"):
        stagepack.open(editor.path).graph(1)
    with pytest.raises(LimitError, match=r"stage-1\.msgpack: expected at most"):
        stagepack.load(editor.path)


def test_a_newer_minor_version_may_say_more(editor: BundleEditor) -> None:
    put("version", "1.7")(editor)
    put("hint", {"new": [1, 2]})(editor)
    stagepack.open(editor.path).verify()
    stagepack.load(editor.path)
