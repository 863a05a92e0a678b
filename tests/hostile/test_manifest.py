"""Manifests that lie: sealed with the right digest, so that the rule itself has to refuse them."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import stagepack
from stagepack.errors import DigestError, FormatError, LimitError, NotABundleError, StagepackError, VersionError
from stagepack.format import limits
from stagepack.format.chunks import hash_file
from tests.bundle_editor import ZERO_DIGEST, BundleEditor, rename_value
from tests.hostile.attack import Attack, Seen, check

# The only entry point of a manifest.
ENTRY = ("entry_points", 0)


def put(*path: str | int, value: Any) -> Callable[[BundleEditor], None]:
    """Set one field of the manifest."""

    def make(editor: BundleEditor) -> None:
        def change(fields: Any) -> None:
            for key in path[:-1]:
                fields = fields[key]
            fields[path[-1]] = value

        editor.edit_manifest(change)

    return make


def rename_file(new: str) -> Callable[[BundleEditor], None]:
    """Call a listed file something else, wherever the manifest names it."""
    return lambda editor: editor.edit_manifest(
        lambda fields: fields.update(rename_value(fields, "stage-1.safetensors", new))
    )


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


def case(
    name: str,
    make: Callable[[BundleEditor], object],
    says: str,
    error: type[StagepackError] = FormatError,
    stage: int = 1,
) -> Attack:
    """An attack on the manifest."""
    return Attack(name=name, make=make, error=error, says=says, seen=Seen.OPEN, stage=stage)


ATTACKS = [
    case("newer major", put("version", value="2.0"), r"has format 2\.0.* reads 1\.x: upgrade stagepack", VersionError),
    case("far newer major", put("version", value="1000.3"), r"has format 1000\.3", VersionError),
    case("major 0", put("version", value="0.9"), r"expected a version such as 1\.0, found '0\.9'"),
    case("version is a number", put("version", value=1.0), "expected a version such as"),
    case("version is code", put("version", value="1.0; import os"), "expected a version such as"),
    case("version in other digits", put("version", value="\u0661.\u0660"), "expected a version such as"),
    case(
        "feature that is not known",
        put("features", value=["sparse", "time-travel"]),
        r"needs the features \['sparse', 'time-travel'\].*upgrade stagepack",
        VersionError,
    ),
    case("features is a text", put("features", value="sparse"), "expected the features as a list"),
    case("other format", put("format", value="cargo"), "not a stagepack manifest", NotABundleError),
    case("unknown field", put("exec", value="import os"), r"\$: the field 'exec' is unknown"),
    case(
        "unknown field of a stage",
        put(*ENTRY, "stages", 1, "code", value="x"),
        r"stages\[1\]: the field 'code' is unknown",
    ),
    case("key twice", twice("device"), "duplicate key 'device'"),
    case("key twice, inside", twice("weight_bytes"), "duplicate key 'weight_bytes'"),
    case("no stages", put(*ENTRY, "stages", value=[]), f"expected 1 to {limits.STAGES}, found 0"),
    case("stages are a number", put(*ENTRY, "stages", value=3), r"Expected `array`, got `int` - at `.*\.stages`"),
    case(
        "missing field",
        lambda editor: editor.edit_manifest(lambda fields: fields["entry_points"][0].pop("edges")),
        "missing required field `edges`",
    ),
    case("huge number", put(*ENTRY, "stages", 1, "flops", value=2**64), r"stages\[1\]\.flops"),
    case("negative bytes", put(*ENTRY, "stages", 1, "weight_bytes", value=-1), "stage 1: .* is negative"),
    case(
        "graph not listed",
        put(*ENTRY, "stages", 1, "graph", value="stage-9.msgpack"),
        "uses 'stage-9.msgpack', which is not",
    ),
    case("device is code", put("device", value="cpu; rm -rf"), "'cpu; rm -rf' is not a device type"),
    *(
        case(f"file name {name[:20]!r}", rename_file(name), "not a plain file name")
        for name in [
            "../escape",
            "../../etc/passwd",
            "/etc/passwd",
            "a/b",
            "a\\b",
            "..",
            ".",
            "",
            ".hidden",
            "nul\0byte",
            "new\nline",
            "a b",
            "é.safetensors",
            "x" * 201,
            "ends.",
            "C:x",
            "~root",
            "$HOME",
        ]
    ),
    case("file name of the manifest", rename_file("manifest.json"), "'manifest.json': .*a reserved name"),
    case("file name of the signature", rename_file("model.sig"), "'model.sig': .*a reserved name"),
    case("two names in one", rename_file("STAGE-2.safetensors"), "duplicate name, where case is ignored"),
    case("digest is not one", put("files", 0, "blake3", value="x" * 64), "the digest is not 64 hexadecimal digits"),
    case("negative size", put("files", 0, "size", value=-1), "the size is negative"),
    case(
        "edge from the future",
        put(*ENTRY, "edges", 1, "producer", value=2),
        "edge embedding_0: expected consumers after stage 2, ascending, found 1",
    ),
    case(
        "edge to nowhere",
        put(*ENTRY, "edges", 1, "consumers", value=[7]),
        "edge embedding_0: expected consumers after stage 0, ascending, found 7",
    ),
    case(
        "edge to stage -1",
        put(*ENTRY, "edges", 1, "consumers", value=[-1]),
        "edge embedding_0: expected consumers after stage 0, ascending, found -1",
    ),
    case(
        "edge with other consumers", put(*ENTRY, "edges", 1, "consumers", value=[2]), "stage 1: its inputs or outputs"
    ),
    case(
        "edge twice",
        put(*ENTRY, "edges", 1, "name", value="gelu_2"),
        "edge gelu_2: the name is not an identifier, or is a duplicate",
    ),
    case(
        "edge name is code",
        lambda editor: editor.edit_manifest(
            lambda fields: fields.update(rename_value(fields, "gelu_2", "x;import os"))
        ),
        "edge x;import os: the name is not an identifier",
    ),
    case(
        "edge name is a keyword",
        lambda editor: editor.edit_manifest(lambda fields: fields.update(rename_value(fields, "gelu_2", "lambda"))),
        "edge lambda: the name is not an identifier",
    ),
    case("unknown symbol", put(*ENTRY, "edges", 1, "shape", value=["batch", "n"]), "the symbol 'n' is not declared"),
    case(
        "negative size of an edge",
        put(*ENTRY, "edges", 1, "shape", value=[-4]),
        "expected a size of at least 0, found -4",
    ),
    case(
        "size over the limit",
        put(*ENTRY, "edges", 1, "shape", value=[2**63 - 1]),
        "expected at most 4611686018427387904",
    ),
    case(
        "arithmetic that is not",
        put(*ENTRY, "edges", 1, "shape", value=[{"op": "exec", "args": [1, 2]}]),
        "'exec' of 2 operands",
    ),
    case(
        "result that nobody makes",
        put(*ENTRY, "signature", "result", value={"type": "value", "name": "ghost"}),
        "'ghost'",
    ),
    case(
        "class to import",
        put(*ENTRY, "signature", "result", value={"type": "import", "name": "os"}),
        "Invalid value 'import'",
    ),
    case("no such container", put(*ENTRY, "signature", "result", "kind", value="set"), "Invalid enum value 'set'"),
    case(
        "factory that is a function",
        put(
            *ENTRY, "signature", "result", value={"type": "dict", "kind": "defaultdict", "items": [], "factory": "eval"}
        ),
        "Invalid enum value 'eval'",
    ),
    case(
        "rank over the limit",
        put(*ENTRY, "edges", 1, "shape", value=[1] * 65),
        "expected at most 64 dimensions, found 65",
        LimitError,
    ),
    case(
        "containers too deep", put(*ENTRY, "signature", "result", value=nested(65)), "nested deeper than 64", LimitError
    ),
    case("lists without end", lambda editor: editor.write_manifest_text("[" * 100_000), "nested too deep", LimitError),
    case(
        "objects without end",
        lambda editor: editor.write_manifest_text('{"format":"stagepack","x":' * 100_000),
        "nested too deep",
        LimitError,
    ),
    case(
        "number without end",
        lambda editor: editor.write_manifest_text('{"format": "stagepack", "version": ' + "9" * 100_000 + "}"),
        "out of range",
    ),
    case("not UTF-8", lambda editor: (editor / "manifest.json").write_bytes(b'{"format": "\xff"}'), "not JSON"),
    case("not a number", lambda editor: editor.write_manifest_text('{"format": "stagepack", "x": NaN}'), "not JSON"),
    case(
        "lone surrogate",
        lambda editor: editor.write_manifest_text('{"format": "stagepack", "x": "\\ud800"}'),
        "not JSON",
    ),
    case(
        "no digest",
        lambda editor: editor.write_manifest_text(json.dumps(editor.manifest(), indent=1)),
        "the file was changed",
        DigestError,
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_a_manifest_that_lies_is_refused_when_it_is_opened(attack: Attack, editor: BundleEditor) -> None:
    check(attack, editor)


def test_a_manifest_over_the_limit_is_refused_unread(editor: BundleEditor) -> None:
    with (editor / "manifest.json").open("r+b") as file:
        file.truncate(limits.MANIFEST_BYTES + 1)  # a hole: no disk is used
    attack = case("large", lambda _: None, f"expected at most {limits.MANIFEST_BYTES} bytes", LimitError)
    check(attack, editor)


def test_a_graph_that_is_said_to_be_over_the_limit_is_refused_unread(editor: BundleEditor) -> None:
    size = limits.GRAPH_BYTES + 1
    names = [file["name"] for file in editor.manifest()["files"]]
    editor.truncate("stage-1.msgpack", size)  # a hole: no disk is used
    entry = msgspec.to_builtins(hash_file(editor / "stage-1.msgpack", "stage-1.msgpack"))
    put("files", names.index("stage-1.msgpack"), value=entry)(editor)
    with pytest.raises(LimitError, match=r"stage-1\.msgpack: expected at most"):
        stagepack.open(editor.path).graph(1)
    with pytest.raises(LimitError, match=r"stage-1\.msgpack: expected at most"):
        stagepack.load(editor.path)


def test_a_newer_minor_version_may_say_more(editor: BundleEditor) -> None:
    put("version", value="1.7")(editor)
    put("hint", value={"new": [1, 2]})(editor)
    stagepack.open(editor.path).verify()
    stagepack.load(editor.path)
