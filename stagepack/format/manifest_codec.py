"""Encode, decode and check the manifest as JSON (SPEC E1 to E3). The document of a delta is encoded alike.

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
from stagepack.format.manifest import Manifest
from stagepack.format.rules import MANIFEST_NAME, parse_json, raise_problems, refuse_encoding, rule_error, typed_errors
from stagepack.format.upgrade import check_version, is_newer_minor
from stagepack.format.validate.manifest_rules import check_manifest

Document = TypeVar("Document", bound=msgspec.Struct)

ZERO_DIGEST = "0" * 64
BUNDLE_FORMAT: Final = "stagepack"
# What to do with a folder of another format than the expected one.
_CURES: Final = {
    BUNDLE_FORMAT: "it is a bundle",
    "stagepack delta": "it is a delta: apply it to its base (stagepack apply, or the argument deltas= of load)",
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
    document_format, file_name = kind.document_format, kind.file_name
    if len(content) > limits.MANIFEST_BYTES:
        message = f"expected at most {limits.MANIFEST_BYTES} bytes, found {len(content)}"
        raise rule_error("L1", file_name, message)
    fields = parse_json(content, file_name)
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != document_format:
        hint = f", found {found!r}: {_CURES[found]}" if isinstance(found, str) and found in _CURES else ""
        raise NotABundleError(
            f'{location}: not a {document_format} manifest: expected the field "format": "{document_format}"{hint} [{kind.rule}]'
        )
    check_version(fields, file_name)
    stated_digest, actual_digest = stated_and_actual_digest(content)
    if stated_digest != actual_digest:
        message = f"the manifest states the sha256 {stated_digest}, found {actual_digest}: the file was changed"
        raise rule_error("D3", file_name, message)
    return fields


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
