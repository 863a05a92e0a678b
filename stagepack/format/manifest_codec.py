"""Encode, decode and check the manifest as JSON (SPEC E1 to E3).

Law: a manifest that is decoded and encoded again has the same fields in the same order.
"""

import hashlib
import json
import re
from typing import Any

import msgspec

from stagepack.errors import NotABundleError
from stagepack.format import limits
from stagepack.format.manifest import Manifest
from stagepack.format.rules import MANIFEST_NAME, parse_json, raise_problems, refuse_encoding, rule_error, typed_errors
from stagepack.format.upgrade import check_version, is_newer_minor
from stagepack.format.validate.manifest_rules import check_manifest

ZERO_DIGEST = "0" * 64
_DIGEST_FIELD = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as indented JSON, with its own digest inserted. Equal manifests give equal bytes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(manifest, sha256=ZERO_DIGEST))
    content = json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    _, digest = stated_and_actual_digest(content)
    return content[: content.rindex(ZERO_DIGEST.encode())] + digest.encode() + b'"\n}\n'


def convert_manifest(fields: Any, file_name: str) -> Manifest:
    """Convert a manifest from plain containers to its types. Of the rules, only E2 and E3 are checked.

    A manifest has one form, as a graph has one encoding.
    """
    with typed_errors(file_name, "JSON"):
        manifest = msgspec.convert(fields, Manifest)
        converted_back = msgspec.to_builtins(manifest)
        if not is_newer_minor(manifest.version) and json.dumps(converted_back) != json.dumps(fields):
            refuse_encoding(file_name, fields, converted_back)
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
