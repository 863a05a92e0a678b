"""Runs the cases of ``schema/vectors`` as its README describes them.

Documents and files are made here with plain json, msgpack and hashlib, as a reader in another language would make them.
"""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from blake3 import blake3

from stagepack.adapter.opened import OpenAdapter
from stagepack.deltas.changed_bytes import ChangedBytes
from stagepack.deltas.delta import Delta
from stagepack.deltas.document import ChangedFile, Part
from stagepack.deltas.patches import patched_bundle
from stagepack.errors import FormatError, StagepackError
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph_codec import decode_graph, encode_graph, read_graph
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, evaluate_dim
from stagepack.format.upgrade import is_newer_minor
from stagepack.format.weights import read_weight_header
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.value_check import check_graph_values
from tests.bundle_editor import MANIFEST_NAME, BundleEditor, encode_header, encode_manifest, weight_file
from tests.protobuf_fields import message

SCHEMA = Path(__file__).parents[2] / "schema"
VECTORS = SCHEMA / "vectors"
TINY = VECTORS / "bundle" / "tiny.stagepack"
TINY_DELTA = VECTORS / "deltas" / "tiny.delta"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case: `kind` is the folder it stands in, `fields` what the file says of it."""

    kind: str
    file: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}/{self.file}: {self.fields['name']}"

    @property
    def rules(self) -> set[str]:
        """The rules that it breaks; none when it is good."""
        return {self.fields["rule"]} if "rule" in self.fields else set()

    def document(self) -> Any:
        """The manifest or the graph as plain containers."""
        if "document" in self.fields:
            return self.fields["document"]
        base = TINY / "manifest.json" if self.kind == "manifest" else VECTORS / self.kind / "base.json"
        return edited(json.loads(base.read_text()), self.fields.get("edit", []))


def cases() -> list[Case]:
    """All cases of what is read, in the order of the files: those of `runs` break no rule."""
    return [
        Case(kind=path.parent.name, file=path.stem, fields=fields)
        for path in sorted(VECTORS.glob("*/*.json"))
        if path.stem != "base" and path.parent.name != "runs"
        for fields in json.loads(path.read_text())["cases"]
    ]


def broken_rules(case: Case, folder: Path) -> set[str]:
    """Read the input of a case; `folder` is an empty one to write into. Returns the rules that the error names."""
    try:
        _READERS[case.kind](case, folder)
    except FormatError as error:
        return {problem.rule for problem in error.problems}
    except StagepackError as error:
        return set(re.findall(r"\[([A-Z]\d+)\]", str(error)))
    return set()


def edited(document: Any, edits: list[dict[str, Any]]) -> Any:
    """A document after edits in the words of RFC 6902: add, replace, remove; and nest, which is ours."""
    root = {"": copy.deepcopy(document)}
    for edit in edits:
        *path, key = (part.replace("~1", "/").replace("~0", "~") for part in edit["path"].split("/"))
        held: Any = root
        for part in path:
            held = held[int(part) if isinstance(held, list) else part]
        place = key if isinstance(held, dict) else len(held) if key == "-" else int(key)
        if edit["op"] == "add" and isinstance(held, list):
            held.insert(place, edit["value"])
        elif edit["op"] in ("add", "replace"):
            held[place] = edit["value"]
        elif edit["op"] == "remove":
            del held[place]
        else:
            for _ in range(edit["times"]):
                held[place] = _filled(edit["in"], held[place])
    return root[""]


def _filled(pattern: Any, inner: Any) -> Any:
    """A pattern with `inner` in place of the text ``@``."""
    if pattern == "@":
        return inner
    if isinstance(pattern, list):
        return [_filled(part, inner) for part in pattern]
    return {key: _filled(part, inner) for key, part in pattern.items()} if isinstance(pattern, dict) else pattern


def file_content(case: Case) -> bytes:
    """The content of the file that a case is about: a manifest, a graph, a weight file or an ONNX file."""
    fields = case.fields
    if "hex" in fields:
        return bytes.fromhex(fields["hex"])
    match case.kind:
        case "manifest":
            return fields["text"].encode() if "text" in fields else encode_manifest(case.document())
        case "graph":
            packed: bytes = msgpack.packb(case.document())
            return packed
        case "weights":
            return _weight_file(fields)
        case "onnx":
            return message(case.document())[: fields.get("bytes")]
    raise ValueError(case.kind)


def _weight_file(fields: dict[str, Any]) -> bytes:
    """The weight file of a case: a header, as text or as containers, and a number of data bytes."""
    header = fields["header"]
    content = header.encode() if isinstance(header, str) else weight_file(encode_header(header), b"")[8:]
    return fields.get("length", len(content)).to_bytes(8, "little") + content + bytes(fields.get("data", 0))


def _read_manifest(case: Case, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(file_content(case))
    Bundle(folder)


def _read_graph(case: Case, folder: Path) -> None:
    content = file_content(case)
    file = read_graph(content, "graph", newer=is_newer_minor(case.fields.get("version", "1.0")))
    if "document" in case.fields:
        assert msgpack.unpackb(content) == case.document()
    if "unfolded" in case.fields:
        assert msgpack.unpackb(encode_graph(trivially_folded(file.graph))) == case.fields["unfolded"]
    if "version" not in case.fields:
        assert encode_graph(file.folded) == content


def _read_calls(case: Case, folder: Path) -> None:
    graph = read_graph(msgpack.packb(case.document()), "graph").graph
    check_graph_values(graph, resolve_operators(graph.ops, (), "graph"), "graph")


def _read_weights(case: Case, folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(file_content(case))
    found = read_weight_header(path)
    if "tensors" in case.fields:
        assert {name: [tensor.start, tensor.end] for name, tensor in found.items()} == case.fields["tensors"]


def edit_bundle(case: Case, folder: Path) -> Path:
    """Write the bundle of a case of the folder ``bundle`` into an empty folder; return its path."""
    editor = BundleEditor.copy(TINY, folder / "case.stagepack")
    for edit in case.fields["edit"]:
        _edit_file(editor, edit)
    return editor.path


def _read_bundle(case: Case, folder: Path) -> None:
    Bundle(edit_bundle(case, folder)).verify(strict=case.fields.get("strict", False))


def _read_onnx(case: Case, folder: Path) -> None:
    editor = BundleEditor.copy(TINY, folder / "case.stagepack")
    editor.write_file("stage-0.onnx", file_content(case))
    fields = editor.manifest()
    fields["entry_points"][0]["stages"][0]["onnx"] = {"model": "stage-0.onnx"}
    editor.write_manifest(fields)
    Bundle(editor.path).verify()


def adapter_content(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """The document and the file of tensors of an adapter, from its document and its header; sizes and digests are made right."""
    end = max((entry["data_offsets"][1] for entry in fields["header"].values()), default=0)
    content = weight_file(encode_header(fields["header"]), bytes(end))
    listed = {"size": len(content), "blake3": blake3(content).hexdigest()}
    document = fields["document"]
    document["files"] = [{"name": entry["name"], **listed, **entry} for entry in document["files"]]
    return encode_manifest(document), content


def _read_adapter(case: Case, folder: Path) -> None:
    document, content = adapter_content(case.document())
    if not case.fields.get("sealed", True):
        document = document.replace(json.loads(document)["sha256"].encode(), b"0" * 64)
    (folder / "manifest.json").write_bytes(document)
    (folder / "adapter.safetensors").write_bytes(content)
    OpenAdapter(folder).verify(strict=True)


def _read_shape(case: Case, folder: Path) -> None:
    try:
        found: Any = evaluate_dim(_dim(case.fields["dim"]), case.fields["sizes"])
    except (KeyError, ArithmeticError):
        found = None
    assert found == case.fields["result"]


def _dim(dim: Any) -> Dim:
    graph = {"inputs": [{"name": "x", "dtype": "float32", "shape": [dim]}]}
    return decode_graph(msgpack.packb(graph), "shape").inputs[0].shape[0]


def _read_delta(case: Case, folder: Path) -> None:
    """The delta of a case, and the bundle that it makes of the tiny one; applied to its result again as often as `times` says."""
    editor = BundleEditor.copy(TINY_DELTA, folder / "case.delta")
    for edit in case.fields["edit"]:
        _edit_file(editor, edit)
    delta = Delta(editor.path)
    delta.verify(strict=case.fields.get("strict", False))
    patched_bundle(Bundle(TINY), [delta] * case.fields.get("times", 1)).verify()


def _read_part(case: Case, folder: Path) -> None:
    """Apply one part to bytes of the base."""
    start, size, code, width, count, frames = case.fields["part"]
    part = Part(start, size, code, width, count, tuple(len(frame) // 2 for frame in frames))
    editor = BundleEditor.copy(TINY_DELTA, folder / "case.delta")
    editor.write_file("stage-0.safetensors.changes", bytes.fromhex("".join(frames)))
    changed = ChangedFile(name="stage-0.safetensors", data="stage-0.safetensors.changes", parts=(part,))
    fields = editor.manifest()
    fields["changed"] = [msgspec.to_builtins(changed)]
    editor.write_manifest(fields)
    content = bytearray.fromhex(case.fields["base"])
    ChangedBytes(Delta(editor.path), changed).apply(start, memoryview(content))
    assert content.hex() == case.fields["result"]


_READERS = {
    "deltas": _read_delta,
    "parts": _read_part,
    "manifest": _read_manifest,
    "graph": _read_graph,
    "calls": _read_calls,
    "weights": _read_weights,
    "onnx": _read_onnx,
    "bundle": _read_bundle,
    "shapes": _read_shape,
    "adapter": _read_adapter,
}


def _edit_file(editor: BundleEditor, edit: dict[str, Any]) -> None:
    path = editor / edit["file"]
    match edit["op"]:
        case "header":
            editor.edit_weight_header(path.name, lambda fields: _apply(fields, edit["edit"]))
        case "store":
            editor.write_file(path.name, bytes.fromhex(edit["hex"]))
        case "patch" if path.name == MANIFEST_NAME:
            editor.write_manifest(edited(editor.manifest(), edit["edit"]))
        case "patch":
            editor.write_file(path.name, msgpack.packb(edited(msgpack.unpackb(path.read_bytes()), edit["edit"])))
        case "delete":
            path.unlink()
        case "write":
            path.write_bytes(bytes.fromhex(edit["hex"]))
        case "flip":
            editor.flip_bit(path.name, edit["byte"])
        case "resize":
            editor.truncate(path.name, edit["bytes"])
        case "link":
            target = editor.path.parent / path.name
            path.rename(target)
            path.symlink_to(editor.path.parent / edit.get("to", path.name))
        case "folder":
            path.unlink()
            path.mkdir()


def _apply(fields: dict[str, Any], edits: list[dict[str, Any]]) -> None:
    """Edit the top level of a header in place."""
    changed = edited(fields, edits)
    fields.clear()
    fields.update(changed)


def all_rules() -> Iterator[str]:
    """The rules that SPEC.md states, in its order."""
    yield from re.findall(r"^\*\*([A-Z]\d+)\*\*", (SCHEMA / "SPEC.md").read_text(), re.MULTILINE)
