"""Bytes to types and back: msgpack for graphs, JSON for the manifest (SPEC E1 to E3).

Law: ``encode_graph(decode_graph(b)) == b`` for every `b` that is read; a manifest gives the same fields in the same order.
"""

import collections
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import digest
from stagepack.format.folded import FoldedGraph
from stagepack.format.manifest import Manifest
from stagepack.format.upgrade import is_newer_minor

_graph_encoder = msgspec.msgpack.Encoder()
_graph_decoder = msgspec.msgpack.Decoder(FoldedGraph)


def encode_graph(graph: FoldedGraph) -> bytes:
    """Write a graph as msgpack, as its file holds it; the same graph gives the same bytes."""
    return _graph_encoder.encode(graph)


def decode_graph(content: bytes, where: str, *, newer: bool = False) -> FoldedGraph:
    """Read a graph from msgpack, as its file holds it. The content is not yet checked by `validate`.

    A graph has one encoding: writing it again gives the same bytes, so a key that stands twice, a default written out
    or a field with a wrong name cannot hide. In a bundle of a `newer` minor version, fields may stand that are not
    known here, and are ignored.

    Raises:
        FormatError: not msgpack (E1), not the one encoding (E2), or not the types of a graph (E3).
        LimitError: nested too deep (L2).
    """
    with _typed_errors(where, "msgpack"):
        graph = _graph_decoder.decode(content)
        written = _graph_encoder.encode(msgspec.msgpack.decode(content) if newer else graph)
        if written != content:
            _refuse(where, msgspec.msgpack.decode(content), msgspec.msgpack.decode(written))
    return graph


def is_plain(value: object) -> bool:
    """Whether the format can write a constant: no integer over 64 bits, no text with half a character."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    return value is None or type(value) in (bool, float)


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as indented JSON that carries its own digest; the same manifest gives the same bytes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=digest.ZERO_DIGEST))
    return digest.insert_digest(json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def parse_json(content: bytes, where: str) -> Any:
    """Read JSON as plain containers, and refuse what JSON leaves open: keys that stand twice, NaN, half characters.

    Raises:
        FormatError: not JSON in UTF-8 (E1), or a key twice (E2).
        LimitError: nested too deep (L2).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            [(twice, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
            raise FormatError([Problem(rule="E2", where=where, message=f"the key {twice[:80]!r} stands twice")])
        return found

    with _typed_errors(where, "JSON"):
        msgspec.json.decode(content)  # stricter than json, but lets a key stand twice
        return json.loads(content.decode(), object_pairs_hook=unique)


def convert_manifest(fields: Any, where: str) -> Manifest:
    """Give plain containers, as `parse_json` gives them, the types of a manifest.

    A manifest has one form too, as a graph does (see `decode_graph`).

    Raises:
        FormatError: the types do not fit (E3), or it is not the one form (E2).
        LimitError: nested too deep (L2).
    """
    with _typed_errors(where, "JSON"):
        manifest = msgspec.convert(fields, Manifest)
        written = msgspec.to_builtins(manifest)
        if not is_newer_minor(manifest.version) and json.dumps(written) != json.dumps(fields):
            _refuse(where, fields, written)
    return manifest


@contextmanager
def _typed_errors(where: str, language: str) -> Iterator[None]:
    """Say what decoders raise on bad input as one of our errors."""
    try:
        yield
    except RecursionError:
        raise LimitError([Problem(rule="L2", where=where, message="nested too deep")]) from None
    except msgspec.ValidationError as error:
        raise FormatError([Problem(rule="E3", where=where, message=str(error)[:300])]) from None
    except (msgspec.DecodeError, ValueError) as error:  # bytes that are not UTF-8 are a ValueError
        message = f"not {language}: {str(error)[:300]}"
        raise FormatError([Problem(rule="E1", where=where, message=message)]) from None


def _refuse(where: str, given: Any, written: Any) -> None:
    """Raise the error for content that is not the one encoding of what it says."""
    message = (
        _difference(given, written, "$") or "a key stands twice or out of order, or a number is not written shortest"
    )
    raise FormatError([Problem(rule="E2", where=where, message=message)])


def _difference(given: Any, written: Any, path: str) -> str | None:
    """The first place where content holds what its one encoding does not, if it can be named."""
    if isinstance(given, dict) and isinstance(written, dict):
        extra = next((key for key in given if key not in written), None)
        if extra is not None:
            return f"{path}: the field {str(extra)[:80]!r} is not known, or holds the default that is left out"
        inner = ((given[key], written[key], f"{path}.{key}") for key in given)
    elif isinstance(given, list | tuple) and isinstance(written, list | tuple):
        if len(given) != len(written):
            return f"{path}: expected {len(written)} items, found {len(given)}"
        inner = ((*pair, f"{path}[{index}]") for index, pair in enumerate(zip(given, written, strict=True)))
    else:
        return None
    return next(filter(None, (_difference(*part) for part in inner)), None)
