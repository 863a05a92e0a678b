"""Encode, decode and check the manifest as JSON (SPEC E1 to E3). Documents of deltas and of adapters are encoded alike.

Law: a manifest that is decoded and encoded again has the same fields in the same order.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from stagepack.errors import NotABundleError, Problem
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.manifest import Manifest
from stagepack.format.rules import MANIFEST_NAME, parse_json, raise_problems, refuse_encoding, rule_error, typed_errors
from stagepack.format.upgrade import check_version, is_newer_minor
from stagepack.format.validate.manifest_rules import check_files, check_manifest

Document = TypeVar("Document", bound=msgspec.Struct)

ZERO_DIGEST = "0" * 64
BUNDLE_FORMAT: Final = "stagepack"
# What a folder of each format is, and what to do with it where another one is expected.
_KINDS: Final = {
    BUNDLE_FORMAT: ("a bundle", "give {expected} that was made for it"),
    "stagepack delta": (
        "a delta",
        "apply it to its base (stagepack apply), or load the base with it (deltas=, --delta)",
    ),
    "stagepack adapter": (
        "an adapter",
        "load its base with it (adapters=, --adapter), or merge it into its base (stagepack adapter --merge)",
    ),
}
_DIGEST_FIELD = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')


class DocumentKind(NamedTuple, Generic[Document]):
    """A kind of document that is encoded as a manifest is.

    Attributes:
        document_format: what its field ``format`` states.
        document_type: its type.
        check: yields the problems of a document by itself.
        file_name: the name of its file.
        rule: the rule that states the format.
    """

    document_format: str
    document_type: type[Document]
    check: Callable[[Document], Iterable[Problem]]
    file_name: str = MANIFEST_NAME
    rule: str = "M1"


BUNDLE: Final = DocumentKind(BUNDLE_FORMAT, Manifest, check_manifest)


class _FileList(msgspec.Struct):
    """The field that documents of all kinds have."""

    files: tuple[File, ...]


def kind_name(document_format: str) -> str:
    """Return what a folder of a format is: "a bundle", "a delta" or "an adapter"."""
    return _KINDS[document_format][0]


def kind_noun(document_format: str) -> str:
    """Return what a folder of a format is, without an article."""
    return kind_name(document_format).partition(" ")[2]


def other_kind_error(location: str, expected: str, found_format: str | None, rule: str = "M1") -> NotABundleError:
    """Return the error for a folder of another kind than `expected`, such as "a bundle"."""
    name, use = _KINDS.get(found_format or "", ("a folder of a newer stagepack", "upgrade stagepack"))
    return NotABundleError(f"{location}: expected {expected}, found {name}: {use.format(expected=expected)} [{rule}]")


def encode_manifest(manifest: msgspec.Struct) -> bytes:
    """Return a manifest as indented JSON, with its own digest inserted. Equal manifests give equal bytes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=ZERO_DIGEST))
    content = json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    _, digest = stated_and_actual_digest(content)
    return content[: content.rindex(ZERO_DIGEST.encode())] + digest.encode() + b'"\n}\n'


def parse_manifest(content: bytes, location: str, file_name: str = MANIFEST_NAME) -> Manifest:
    """Decode and check a manifest."""
    return parse_document(content, location, BUNDLE._replace(file_name=file_name))


def parse_document(content: bytes, location: str, kind: DocumentKind[Document]) -> Document:
    """Decode and check a document."""
    document = convert_document(parse_fields(content, location, kind), kind)
    raise_problems(kind.check(document))
    return document


def convert_document(fields: Any, kind: DocumentKind[Document]) -> Document:
    """Convert a document from plain containers to its type. It has one form, as a graph has one encoding (E2, E3)."""
    with typed_errors(kind.file_name, "JSON"):
        document = msgspec.convert(fields, kind.document_type)
        converted_back = msgspec.to_builtins(document)
        if not is_newer_minor(fields["version"]) and json.dumps(converted_back) != json.dumps(fields):
            refuse_encoding(kind.file_name, fields, converted_back)
    return document


def parse_fields(content: bytes, location: str, kind: DocumentKind[Any]) -> Any:
    """Decode a document to plain containers, after its version and its digest are compared."""
    document_format = kind.document_format
    fields = _decode(content, kind.file_name)
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != document_format:
        if isinstance(found, str) and found in _KINDS:
            raise other_kind_error(location, kind_name(document_format), found, kind.rule)
        raise NotABundleError(
            f'{location}: not a {document_format} manifest: expected the field "format": "{document_format}" [{kind.rule}]'
        )
    _check_seal(fields, content, kind.file_name)
    return fields


def parse_files(content: bytes) -> tuple[File, ...]:
    """Return the files that a document of any kind lists. Its version and its digest are compared, and nothing else of it is checked."""
    fields = _decode(content, MANIFEST_NAME)
    _check_seal(fields, content, MANIFEST_NAME)
    with typed_errors(MANIFEST_NAME, "JSON"):
        files = msgspec.convert(fields, _FileList).files
    raise_problems(Problem(rule=rule, where=where, message=message) for rule, where, message in check_files(files))
    return files


def _decode(content: bytes, file_name: str) -> Any:
    if len(content) > limits.MANIFEST_BYTES:
        message = f"expected at most {limits.MANIFEST_BYTES} bytes, found {len(content)}"
        raise rule_error("L1", file_name, message)
    return parse_json(content, file_name)


def _check_seal(fields: Any, content: bytes, file_name: str) -> None:
    """Compare the version of a document with those that this code reads, and its digest with its content."""
    check_version(fields, file_name)
    stated_digest, actual_digest = stated_and_actual_digest(content)
    if stated_digest != actual_digest:
        message = f"the manifest states the sha256 {stated_digest}, found {actual_digest}: the file was changed"
        raise rule_error("D3", file_name, message)


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
