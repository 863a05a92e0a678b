"""Edit a bundle and update its sizes and digests, so that the rule under test is the one that fails.

The hostile and the conformance tests share it. It uses json, msgpack, hashlib and blake3 alone: an error that the reader and the writer of
stagepack have in common cannot hide here.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from blake3 import blake3

MANIFEST_NAME = "manifest.json"
ZERO_DIGEST = "0" * 64

# A graph and a manifest have one encoding each: their fields come in this order, whatever the order in which a test adds them.
_GRAPH_FIELDS = [
    "path", "type", "value", "names", "kind", "name", "device", "dtype", "shape", "expr", "trainable",
    "strides", "base", "offset", "zeros", "min", "max", "example", "schema", "parameters", "mutates", "aliases",
    "random", "enabled", "cache", "parent", "grad", "autocast", "flops", "bytes", "symbols", "inputs",
    "weights", "first", "nodes", "signature", "tree", "positional", "keyword", "items", "maxlen", "factory",
    "class_name", "fields", "op", "args", "kwargs", "outputs", "unpack", "scope", "context", "cost",
    "subgraphs", "ops", "scopes", "contexts", "calls", "regions", "result",
]  # fmt: skip
_MANIFEST_FIELDS = [
    "format", "version", "stagepack", "torch", "type", "kind", "name", "tree", "positional", "keyword", "dtype",
    "shape", "expr", "producer", "consumers", "parameters", "result", "signature", "graph", "weights", "inputs",
    "outputs", "nodes", "module", "weight_bytes", "flops", "bytes", "received", "picoseconds", "receiving",
    "memory", "memory_limit", "speed", "namespaces", "state", "added", "places", "model", "onnx", "stages",
    "shared", "edges", "plan", "min", "max", "example", "symbols", "left", "relation", "right", "guards",
    "seed", "entry_points", "size", "blake3", "chunks", "files", "device", "features", "sha256",
]  # fmt: skip


class BundleEditor:
    """Edits the files of one bundle.

    Attributes:
        path: the folder of the bundle.
    """

    def __init__(self, path: Path) -> None:
        """Edit the bundle at `path` in place."""
        self.path = path

    @classmethod
    def copy(cls, bundle: Path, path: Path) -> "BundleEditor":
        """Copy `bundle` to `path`, and edit the copy."""
        shutil.copytree(bundle, path)
        return cls(path)

    def __truediv__(self, file_name: str) -> Path:
        return self.path / file_name

    def manifest(self) -> dict[str, Any]:
        """The manifest as plain containers."""
        fields: dict[str, Any] = json.loads((self.path / MANIFEST_NAME).read_text())
        return fields

    def write_manifest(self, fields: dict[str, Any]) -> None:
        """Write a manifest, its fields in the order given, with its own digest (rule D3)."""
        (self.path / MANIFEST_NAME).write_bytes(encode_manifest(fields))

    def write_manifest_text(self, text: str) -> None:
        """Write the text of a manifest that has 64 zeros in the place of its digest."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        (self.path / MANIFEST_NAME).write_text(text.replace(ZERO_DIGEST, digest))

    def edit_manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest, and write it with its fields in order."""
        fields = self.manifest()
        change(fields)
        self.write_manifest(sort_manifest(fields))

    def write_file(self, file_name: str, content: bytes) -> None:
        """Write a file, and list its size and digest in the manifest."""
        (self.path / file_name).write_bytes(content)
        listed = {"name": file_name, "size": len(content), **file_digests(content)}
        fields = self.manifest()
        entries = [entry for entry in fields["files"] if entry["name"] == file_name]
        for entry in entries:
            entry.clear()
            entry.update(listed)
        if not entries:
            fields["files"] = sorted([*fields["files"], listed], key=lambda entry: str(entry["name"]))
        self.write_manifest(fields)

    def graph(self, stage: int) -> dict[str, Any]:
        """The graph of a stage as plain containers."""
        fields: dict[str, Any] = msgpack.unpackb((self.path / f"stage-{stage}.msgpack").read_bytes())
        return fields

    def edit_graph(self, stage: int, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the graph of a stage, and write it with its fields in order."""
        self.edit_graph_file(f"stage-{stage}.msgpack", change)

    def edit_graph_file(self, file_name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the graph in a file, and write it with its fields in order."""
        fields: dict[str, Any] = msgpack.unpackb((self.path / file_name).read_bytes())
        change(fields)
        self.write_file(file_name, msgpack.packb(sort_graph(fields)))

    def edit_weight_header(self, file_name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the header of a weight file, and keep its data."""
        content = (self.path / file_name).read_bytes()
        data_start = 8 + int.from_bytes(content[:8], "little")
        fields = json.loads(content[8:data_start])
        change(fields)
        self.write_file(file_name, weight_file(encode_header(fields), content[data_start:]))

    def truncate(self, file_name: str, size: int) -> None:
        """Truncate a file to `size` bytes, and leave the manifest as it is."""
        with (self.path / file_name).open("r+b") as file:
            file.truncate(size)

    def flip_bit(self, file_name: str, position: int, bit: int = 0) -> None:
        """Flip one bit of the byte at `position`, and leave the manifest as it is."""
        content = bytearray((self.path / file_name).read_bytes())
        content[position] ^= 1 << bit
        (self.path / file_name).write_bytes(content)


def file_digests(content: bytes) -> dict[str, Any]:
    """The digest of a file and, if it has several chunks of 16 MiB, those of its chunks: `blake3` and `chunks` of a File."""
    chunks = [blake3(content[start : start + 2**24]).digest() for start in range(0, len(content), 2**24)]
    if len(chunks) < 2:
        return {"blake3": blake3(content).hexdigest()}
    root = blake3(derive_key_context="stagepack 2026-11-22 digests of chunks")
    for chunk in chunks:
        root.update(chunk)
    return {"blake3": root.hexdigest(), "chunks": [chunk.hex() for chunk in chunks]}


def encode_manifest(fields: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with the digest of the bytes in which 64 zeros take its place (rule D3)."""
    unsigned = {key: value for key, value in fields.items() if key != "sha256"} | {"sha256": ZERO_DIGEST}
    content = json.dumps(unsigned, indent=1, ensure_ascii=False).encode() + b"\n"
    return content[: -len(ZERO_DIGEST) - 4] + hashlib.sha256(content).hexdigest().encode() + content[-4:]


def encode_header(fields: Any) -> bytes:
    """The JSON of a weight file's header, without padding."""
    return json.dumps(fields, separators=(",", ":")).encode()


def weight_file(header: bytes, data: bytes) -> bytes:
    """A safetensors file whose data begins on a multiple of 64 bytes."""
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header + data


def rename_value(fields: Any, old: str, new: str) -> Any:
    """Plain containers in which each string that equals `old` is `new`; keys stay as they are."""
    if isinstance(fields, dict):
        return {key: rename_value(value, old, new) for key, value in fields.items()}
    if isinstance(fields, list):
        return [rename_value(value, old, new) for value in fields]
    return new if isinstance(fields, str) and fields == old else fields


def sort_manifest(fields: Any) -> Any:
    """The fields of a manifest in the order of its one form."""
    return sort_fields(fields, _MANIFEST_FIELDS)


def sort_graph(fields: Any) -> Any:
    """The fields of a graph in the order of its one encoding. A region has its nodes before its weights, a graph after them."""
    graph = sort_fields(fields, _GRAPH_FIELDS)
    if isinstance(graph, dict) and isinstance(graph.get("regions"), list):
        graph["regions"] = [
            {"nodes": region["nodes"]} | region if isinstance(region, dict) and "nodes" in region else region
            for region in graph["regions"]
        ]
    return graph


def sort_fields(fields: Any, order: list[str]) -> Any:
    """Plain containers with their keys in the given order; keys that it lacks come last."""
    if isinstance(fields, dict):
        # In the object of a signature, the kind is the last field; in its other containers it is the second one.
        last = "kind" if "class_name" in fields else None
        keys = sorted(fields, key=lambda key: order.index(key) if key in order and key != last else len(order))
        return {key: sort_fields(fields[key], order) for key in keys}
    return [sort_fields(value, order) for value in fields] if isinstance(fields, list) else fields
