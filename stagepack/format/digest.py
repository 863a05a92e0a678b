"""SHA-256 of the files of a bundle (SPEC D1 to D4)."""

import hashlib
import re
from pathlib import Path

ZERO_DIGEST = "0" * 64
_FIELD = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')


def sha256_of(content: bytes) -> str:
    """The digest of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The digest of a file, in hexadecimal, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def insert_digest(manifest: bytes) -> bytes:
    """Put the digest of a manifest that ends with 64 zeros into their place."""
    stated, found = stated_and_actual_digest(manifest)
    if stated != ZERO_DIGEST:
        raise ValueError("the manifest does not end with the zeros that its digest replaces")
    return manifest[: manifest.rindex(ZERO_DIGEST.encode())] + found.encode() + b'"\n}\n'


def stated_and_actual_digest(manifest: bytes) -> tuple[str | None, str]:
    """The digest that a manifest states of itself (None when it states none), and the one that it has."""
    field = _FIELD.search(manifest)
    if field is None:
        return None, sha256_of(manifest)
    start, end = field.span(1)
    return field[1].decode(), sha256_of(manifest[:start] + ZERO_DIGEST.encode() + manifest[end:])
