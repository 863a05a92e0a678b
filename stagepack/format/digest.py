"""The digest of a manifest, which is that of the bundle: SHA-256, in hexadecimal (SPEC D3)."""

import hashlib
import re
from pathlib import Path

ZERO_DIGEST = "0" * 64
_DIGEST_FIELD = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 digest of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal. The file is read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def insert_digest(manifest: bytes) -> bytes:
    """Replace the 64 zeros at the end of a manifest by its digest (D3)."""
    stated_digest, actual_digest = stated_and_actual_digest(manifest)
    if stated_digest != ZERO_DIGEST:
        raise ValueError("expected a manifest that ends with 64 zeros as its sha256")
    return manifest[: manifest.rindex(ZERO_DIGEST.encode())] + actual_digest.encode() + b'"\n}\n'


def stated_and_actual_digest(manifest: bytes) -> tuple[str | None, str]:
    """Return the digest that a manifest states as its own, and the digest that it has (D3).

    The result is the value of the last field ``sha256``, or None if the manifest does not end with one; and the SHA-256 of the text with 64
        zeros in the place of that value.
    """
    field = _DIGEST_FIELD.search(manifest)
    if field is None:
        return None, sha256_of(manifest)
    start, end = field.span(1)
    return field[1].decode(), sha256_of(manifest[:start] + ZERO_DIGEST.encode() + manifest[end:])
