"""Encode and decode graphs as msgpack and the manifest as JSON (SPEC E1 to E3).

Law: ``encode_graph(decode_graph(b, name)) == b`` for every `b` of this minor version that is not refused. A manifest that is decoded and
encoded again has the same fields in the same order.
"""

import collections
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import chunks
from stagepack.format.folded_graph import FoldedGraph
from stagepack.format.manifest import Manifest
from stagepack.format.upgrade import is_newer_minor

# What `msgspec.json.decode` raises for bytes that are not JSON in UTF-8, are nested too deep, or are of another type.
JSON_ERRORS: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_graph_encoder = msgspec.msgpack.Encoder()
_graph_decoder = msgspec.msgpack.Decoder(FoldedGraph)


def encode_graph(graph: FoldedGraph) -> bytes:
    """Return a graph as msgpack, the content of a graph file. Equal graphs give equal bytes."""
    return _graph_encoder.encode(graph)


def decode_graph(content: bytes, file_name: str, *, newer: bool = False) -> FoldedGraph:
    """Decode the content of a graph file. Of the rules, only E1 to E3 are checked.

    A graph has one encoding. The decoded graph is encoded again and must give the same bytes; this finds duplicate keys, defaults that
    are written out, and unknown fields.

    content: the bytes of the file.
    """
    with _typed_errors(file_name, "msgpack"):
        graph = _graph_decoder.decode(content)
        encoded_again = _graph_encoder.encode(msgspec.msgpack.decode(content) if newer else graph)
        if encoded_again != content:
            _refuse_encoding(file_name, msgspec.msgpack.decode(content), msgspec.msgpack.decode(encoded_again))
    return graph


def is_plain(value: object) -> bool:
    """Whether the format can represent a constant.

    The result is true for None, a bool, a float, an integer of at most 64 bits, and a string without lone surrogates; False for any other
        object.
    """
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    return value is None or type(value) in (bool, float)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as indented JSON, with its own digest inserted. Equal manifests give equal bytes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=chunks.ZERO_DIGEST))
    return chunks.insert_digest(json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def parse_json(content: bytes, file_name: str) -> Any:
    """Parse JSON strictly: duplicate keys, NaN, infinities, lone surrogates and the integer ``-0`` are refused."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            [(duplicate, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
            raise FormatError([Problem(rule="E2", where=file_name, message=f"duplicate key {duplicate[:80]!r}")])
        return fields

    with _typed_errors(file_name, "JSON"):
        # msgspec is stricter than json, but accepts duplicate keys.
        msgspec.json.decode(content)
        return json.loads(content.decode(), object_pairs_hook=unique_keys, parse_int=_parse_integer)


def _parse_integer(text: str) -> int:
    """Parse an integer of JSON. Others than Python read ``-0`` as the float -0.0."""
    if text == "-0":
        raise ValueError("found the integer -0, expected 0 or -0.0")
    return int(text)


def convert_manifest(fields: Any, file_name: str) -> Manifest:
    """Convert a manifest from plain containers to its types. Of the rules, only E2 and E3 are checked.

    A manifest has one form, as a graph has one encoding; see `decode_graph`.
    """
    with _typed_errors(file_name, "JSON"):
        manifest = msgspec.convert(fields, Manifest)
        converted_back = msgspec.to_builtins(manifest)
        if not is_newer_minor(manifest.version) and json.dumps(converted_back) != json.dumps(fields):
            _refuse_encoding(file_name, fields, converted_back)
    return manifest


@contextmanager
def deep_nesting_refused(file_name: str) -> Iterator[None]:
    """Refuse content that is nested deeper than Python can walk: from 3.12 on, the decoders, which are in C, go deeper than that."""
    try:
        yield
    except RecursionError:
        raise LimitError([Problem(rule="L2", where=file_name, message="nested too deep")]) from None


@contextmanager
def _typed_errors(file_name: str, encoding: str) -> Iterator[None]:
    """Convert the exceptions of the decoders to errors of stagepack."""
    try:
        with deep_nesting_refused(file_name):
            yield
    except msgspec.ValidationError as error:
        raise FormatError([Problem(rule="E3", where=file_name, message=str(error)[:300])]) from None
    # Bytes that are not UTF-8 raise a ValueError.
    except (msgspec.DecodeError, ValueError) as error:
        message = f"not {encoding}: {str(error)[:300]}"
        raise FormatError([Problem(rule="E1", where=file_name, message=message)]) from None


def _refuse_encoding(file_name: str, decoded: Any, expected: Any) -> None:
    """Raise the error for content that is not the one encoding of its value."""
    difference = _first_difference(decoded, expected, "$")
    message = difference or "duplicate key, fields out of order, or a value that is not in its shortest form"
    raise FormatError([Problem(rule="E2", where=file_name, message=message)])


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
