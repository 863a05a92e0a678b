"""Edit a real bundle and make its digests right again, so that the rule under test is what fires.

Only json, msgpack and hashlib are used: a check of stagepack that is wrong on both sides cannot hide here.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

MANIFEST = "manifest.json"
ZEROS = "0" * 64

# A graph and a manifest have one encoding each: fields stand in this order, whatever order a test adds them in.
_GRAPH_FIELDS = [
    "path",
    "type",
    "value",
    "names",
    "kind",
    "name",
    "device",
    "dtype",
    "shape",
    "expr",
    "trainable",
    "strides",
    "base",
    "offset",
    "zeros",
    "min",
    "max",
    "example",
    "schema",
    "parameters",
    "mutates",
    "aliases",
    "random",
    "enabled",
    "cache",
    "parent",
    "grad",
    "autocast",
    "flops",
    "bytes",
    "symbols",
    "inputs",
    "weights",
    "first",
    "nodes",
    "signature",
    "tree",
    "positional",
    "keyword",
    "items",
    "maxlen",
    "factory",
    "class_name",
    "fields",
    "op",
    "args",
    "kwargs",
    "outputs",
    "unpack",
    "scope",
    "context",
    "cost",
    "subgraphs",
    "ops",
    "scopes",
    "contexts",
    "calls",
    "regions",
    "result",
]
_MANIFEST_FIELDS = [
    "format",
    "version",
    "stagepack",
    "torch",
    "type",
    "kind",
    "name",
    "tree",
    "positional",
    "keyword",
    "dtype",
    "shape",
    "expr",
    "producer",
    "consumers",
    "parameters",
    "result",
    "signature",
    "graph",
    "weights",
    "inputs",
    "outputs",
    "nodes",
    "module",
    "weight_bytes",
    "flops",
    "bytes",
    "received",
    "picoseconds",
    "receiving",
    "memory",
    "memory_limit",
    "speed",
    "namespaces",
    "state",
    "added",
    "places",
    "model",
    "onnx",
    "stages",
    "shared",
    "edges",
    "size",
    "files",
    "device",
    "features",
    "plan",
    "min",
    "max",
    "example",
    "symbols",
    "seed",
    "sha256",
]


class Forge:
    """A copy of a bundle under a test's hands."""

    def __init__(self, bundle: Path, to: Path) -> None:
        """Copy `bundle` to `to`."""
        shutil.copytree(bundle, to)
        self.path = to

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def manifest(self) -> dict[str, Any]:
        """The manifest as plain containers."""
        fields: dict[str, Any] = json.loads((self.path / MANIFEST).read_text())
        return fields

    def seal(self, fields: dict[str, Any]) -> None:
        """Write a manifest with its own digest: that of the text in which 64 zeros stand for it."""
        others = {key: part for key, part in fields.items() if key != "sha256"}
        self.seal_text(json.dumps(others | {"sha256": ZEROS}, indent=1, ensure_ascii=False) + "\n")

    def seal_text(self, text: str) -> None:
        """Write the text of a manifest that holds 64 zeros where its digest belongs."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        (self.path / MANIFEST).write_text(text.replace(ZEROS, digest))

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest and seal it."""
        fields = self.manifest()
        change(fields)
        self.seal(in_order(fields, _MANIFEST_FIELDS))

    def replace(self, name: str, content: bytes) -> None:
        """Give a file other content, and list it so."""
        (self.path / name).write_bytes(content)
        entry = {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

        def relist(fields: dict[str, Any]) -> None:
            others = [file for file in fields["files"] if file["name"] != name]
            fields["files"] = sorted([*others, entry], key=lambda file: str(file["name"]))

        self.edit(relist)

    def graph(self, stage: int) -> dict[str, Any]:
        """The graph of a stage as plain containers."""
        fields: dict[str, Any] = msgpack.unpackb((self.path / f"stage-{stage}.msgpack").read_bytes())
        return fields

    def edit_graph(self, stage: int, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the graph of a stage, and list its file so."""
        fields = self.graph(stage)
        change(fields)
        self.replace(f"stage-{stage}.msgpack", msgpack.packb(in_order(fields, _GRAPH_FIELDS)))

    def edit_weights(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the header of a weight file, keep its data, and list it so."""
        content = (self.path / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        fields = json.loads(content[8 : 8 + length])
        change(fields)
        self.replace(name, weight_file(json.dumps(fields, separators=(",", ":")).encode(), content[8 + length :]))

    def truncate(self, name: str, size: int) -> None:
        """Cut a file short, and leave the digests as they are."""
        with (self.path / name).open("r+b") as file:
            file.truncate(size)

    def flip(self, name: str, position: int, bit: int = 0) -> None:
        """Flip a bit of a file, and leave the digests as they are."""
        content = bytearray((self.path / name).read_bytes())
        content[position] ^= 1 << bit
        (self.path / name).write_bytes(content)


def weight_file(header: bytes, data: bytes) -> bytes:
    """A safetensors file whose data begins on a multiple of 64 bytes."""
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header + data


def rename_value(fields: Any, old: str, new: str) -> Any:
    """Plain containers with every text that is exactly `old` replaced, keys left alone."""
    if isinstance(fields, dict):
        return {key: rename_value(part, old, new) for key, part in fields.items()}
    if isinstance(fields, list):
        return [rename_value(part, old, new) for part in fields]
    return new if fields == old and isinstance(fields, str) else fields


def in_order(fields: Any, order: list[str]) -> Any:
    """Plain containers whose keys stand in an order; keys that it lacks come last."""
    if isinstance(fields, dict):
        keys = sorted(fields, key=lambda key: order.index(key) if key in order else len(order))
        return {key: in_order(fields[key], order) for key in keys}
    return [in_order(part, order) for part in fields] if isinstance(fields, list) else fields
