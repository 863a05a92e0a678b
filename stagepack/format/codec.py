"""Bytes to types and back: msgpack for graphs, JSON for the manifest (SPEC E1 to E4).

Law: ``encode_graph(decode_graph(b)) == b`` for every `b` that `encode_graph` made; likewise for manifests.
"""

import json
from typing import Any

import msgspec

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import digest
from stagepack.format.graph import Graph
from stagepack.format.manifest import Manifest

_graph_encoder = msgspec.msgpack.Encoder()
_graph_decoder = msgspec.msgpack.Decoder(Graph)


def encode_graph(graph: Graph) -> bytes:
    """Write a graph as msgpack; the same graph gives the same bytes."""
    return _graph_encoder.encode(graph)


def decode_graph(content: bytes, where: str) -> Graph:
    """Read a graph from msgpack. The content is not yet checked by `validate`.

    Raises:
        FormatError: not msgpack (E1), a key twice or a number written long (E2), or not the types of a graph (E3).
        LimitError: nested too deep (L2).
    """
    try:
        plain = msgspec.msgpack.decode(content)
        graph = _graph_decoder.decode(content)
    except RecursionError:
        raise LimitError([Problem(rule="L2", where=where, message="nested too deep")]) from None
    except msgspec.ValidationError as error:
        raise FormatError([Problem(rule="E3", where=where, message=str(error))]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError([Problem(rule="E1", where=where, message=f"not msgpack: {error}")]) from None
    # A key that stands twice is gone after decoding, so writing again gives fewer bytes.
    if len(_graph_encoder.encode(plain)) != len(content):
        message = "a map has a key twice, or the encoding is not the shortest"
        raise FormatError([Problem(rule="E2", where=where, message=message)])
    return graph


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as indented JSON that carries its own digest; the same manifest gives the same bytes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=digest.ZEROS))
    fields["sha256"] = fields.pop("sha256")  # last, so that its place in the file is known
    return digest.seal(json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def parse_json(content: bytes, where: str) -> Any:
    """Read JSON as plain containers, and refuse what JSON leaves open: keys that stand twice, NaN.

    Raises:
        FormatError: not JSON (E1), or a key twice (E2).
        LimitError: nested too deep (L2).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
            raise FormatError([Problem(rule="E2", where=where, message=f"the key {twice!r} stands twice")])
        return found

    def refuse(constant: str) -> None:
        raise FormatError([Problem(rule="E1", where=where, message=f"{constant} is not JSON")])

    try:
        return json.loads(content, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise LimitError([Problem(rule="L2", where=where, message="nested too deep")]) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or an integer of thousands of digits
        raise FormatError([Problem(rule="E1", where=where, message=f"not JSON: {error}")]) from None


def convert_manifest(fields: Any, where: str) -> Manifest:
    """Give plain containers the types of a manifest.

    Raises:
        FormatError: the types do not fit (E3).
        LimitError: nested too deep (L2).
    """
    try:
        return msgspec.convert(fields, Manifest)
    except RecursionError:
        raise LimitError([Problem(rule="L2", where=where, message="nested too deep")]) from None
    except msgspec.ValidationError as error:
        raise FormatError([Problem(rule="E3", where=where, message=str(error))]) from None
