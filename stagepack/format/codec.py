"""Encode, decode and check graphs as msgpack, and the manifest as JSON (SPEC E1 to E3).

Law: ``encode_graph(decode_graph(b, name)) == b`` for every `b` of this minor version that is not refused. A manifest that is decoded and
encoded again has the same fields in the same order.
"""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from stagepack.errors import NotABundleError
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.folded_graph import unfold_graph
from stagepack.format.graph import FoldedGraph, Graph
from stagepack.format.manifest import Manifest
from stagepack.format.rules import (
    MANIFEST_NAME,
    deep_nesting_refused,
    parse_json,
    raise_problems,
    rule_error,
    typed_errors,
)
from stagepack.format.upgrade import check_version, is_newer_minor
from stagepack.format.validate.folded import check_folded
from stagepack.format.validate.graph import check_graph
from stagepack.format.validate.manifest import check_manifest
from stagepack.format.validate.stage import StageGraph

ZERO_DIGEST = "0" * 64
_DIGEST_FIELD = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')
_graph_encoder = msgspec.msgpack.Encoder()
_graph_decoder = msgspec.msgpack.Decoder(FoldedGraph)


def encode_graph(graph: FoldedGraph) -> bytes:
    """Return a graph as msgpack, the content of a graph file. Equal graphs give equal bytes."""
    return _graph_encoder.encode(graph)


def decode_graph(content: bytes, file_name: str, *, newer: bool = False) -> FoldedGraph:
    """Decode the content of a graph file. Of the rules, only E1 to E3 are checked.

    A graph has one encoding. The decoded graph is encoded again and must give the same bytes; this finds duplicate keys, defaults that
    are written out, and unknown fields.
    """
    with typed_errors(file_name, "msgpack"):
        graph = _graph_decoder.decode(content)
        encoded_again = _graph_encoder.encode(msgspec.msgpack.decode(content) if newer else graph)
        if encoded_again != content:
            _refuse_encoding(file_name, msgspec.msgpack.decode(content), msgspec.msgpack.decode(encoded_again))
    return graph


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as indented JSON, with its own digest inserted. Equal manifests give equal bytes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=ZERO_DIGEST))
    content = json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    _, digest = stated_and_actual_digest(content)
    return content[: content.rindex(ZERO_DIGEST.encode())] + digest.encode() + b'"\n}\n'


def convert_manifest(fields: Any, file_name: str) -> Manifest:
    """Convert a manifest from plain containers to its types. Of the rules, only E2 and E3 are checked.

    A manifest has one form, as a graph has one encoding; see `decode_graph`.
    """
    with typed_errors(file_name, "JSON"):
        manifest = msgspec.convert(fields, Manifest)
        converted_back = msgspec.to_builtins(manifest)
        if not is_newer_minor(manifest.version) and json.dumps(converted_back) != json.dumps(fields):
            _refuse_encoding(file_name, fields, converted_back)
    return manifest


def parse_manifest(content: bytes, location: str) -> Manifest:
    """Decode and check a manifest."""
    if len(content) > limits.MANIFEST_BYTES:
        message = f"expected at most {limits.MANIFEST_BYTES} bytes, found {len(content)}"
        raise rule_error("L1", MANIFEST_NAME, message)
    fields = parse_json(content, MANIFEST_NAME)
    if not isinstance(fields, dict) or fields.get("format") != "stagepack":
        raise NotABundleError(f'{location}: not a stagepack manifest: expected the field "format": "stagepack" [M1]')
    check_version(fields, MANIFEST_NAME)
    stated_digest, actual_digest = stated_and_actual_digest(content)
    if stated_digest != actual_digest:
        message = f"the manifest states the sha256 {stated_digest}, found {actual_digest}: the file was changed"
        raise rule_error("D3", MANIFEST_NAME, message)
    manifest = convert_manifest(fields, MANIFEST_NAME)
    raise_problems(check_manifest(manifest))
    return manifest


class GraphFile(NamedTuple):
    """The content of a graph file: the graph as the file stores it, with regions and region calls, and unfolded."""

    folded: FoldedGraph
    graph: Graph


def read_graph(content: bytes, file_name: str, *, newer: bool = False, module_calls: bool = True) -> GraphFile:
    """Decode the content of a graph file, check it and unfold it."""
    folded = decode_graph(content, file_name, newer=newer)
    with deep_nesting_refused(file_name):
        raise_problems(check_folded(folded, file_name))
        graph = unfold_graph(folded, file_name, module_calls=module_calls)
        raise_problems(check_graph(graph, file_name))
    return GraphFile(folded, graph)


class KeptGraphs:
    """The graphs that a bundle has read and checked, with what follows from them; see `Bundle.with_graphs_kept`."""

    def __init__(self) -> None:
        # By the name of the file, and by its digest, since a writer gives each entry point files of its own; and by module calls or none.
        self._files: dict[tuple[str, bool], tuple[GraphFile, StageGraph]] = {}
        self._contents: dict[tuple[str, bool], tuple[GraphFile, StageGraph]] = {}
        # The entry points whose stages were checked together, by what is checked.
        self.models: set[bytes] = set()

    def read(
        self, entry: File, read_content: Callable[[], bytes], *, newer: bool, module_calls: bool
    ) -> tuple[GraphFile, StageGraph]:
        """Return the graph of a file, whose content is read if it was not before, and what follows from it; see `read_graph`."""
        key, content_key = (entry.name, module_calls), (entry.blake3, module_calls)
        if key not in self._files:
            content = read_content()  # compared with its digest, also if another file has the same
            if content_key not in self._contents:
                graph_file = read_graph(content, entry.name, newer=newer, module_calls=module_calls)
                self._contents[content_key] = graph_file, StageGraph.of(graph_file.graph)
            self._files[key] = self._contents[content_key]
        return self._files[key]


def _refuse_encoding(file_name: str, decoded: Any, expected: Any) -> None:
    """Raise the error for content that is not the one encoding of its value."""
    difference = _first_difference(decoded, expected, "$")
    message = difference or "duplicate key, fields out of order, or a value that is not in its shortest form"
    raise rule_error("E2", file_name, message)


def _first_difference(decoded: Any, expected: Any, path: str) -> str | None:
    """The first location where the decoded content has fields or items that its one encoding does not have, if there is one."""
    if isinstance(decoded, dict) and isinstance(expected, dict):
        extra_key = next((key for key in decoded if key not in expected), None)
        if extra_key is not None:
            return (
                f"{path}: the field {str(extra_key)[:80]!r} is unknown, or has its default value and must be left out"
            )
        pairs = ((decoded[key], expected[key], f"{path}.{key}") for key in decoded)
    elif isinstance(decoded, list | tuple) and isinstance(expected, list | tuple):
        if len(decoded) != len(expected):
            return f"{path}: expected {len(expected)} items, found {len(decoded)}"
        pairs = ((*pair, f"{path}[{index}]") for index, pair in enumerate(zip(decoded, expected, strict=True)))
    else:
        return None
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), None)


def stated_and_actual_digest(manifest: bytes) -> tuple[str | None, str]:
    """Return the digest that a manifest states in its last field ``sha256``, and the digest that it has (D3).

    The digest is the SHA-256 of the text with 64 zeros in its place. A manifest that does not end with the field states None.
    """
    field = _DIGEST_FIELD.search(manifest)
    if field is None:
        return None, hashlib.sha256(manifest).hexdigest()
    start, end = field.span(1)
    zeroed = manifest[:start] + ZERO_DIGEST.encode() + manifest[end:]
    return field[1].decode(), hashlib.sha256(zeroed).hexdigest()
