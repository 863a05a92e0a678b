"""Read and check the manifest of a bundle."""

from pathlib import Path

from stagepack.errors import DigestError, LimitError, NotABundleError, Problem
from stagepack.format import limits
from stagepack.format.codec import convert_manifest, parse_json
from stagepack.format.digest import stated_and_actual_digest
from stagepack.format.file_checks import is_plain_file
from stagepack.format.manifest import Manifest
from stagepack.format.upgrade import check_version
from stagepack.format.validate import MANIFEST_NAME, check_manifest, raise_problems


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the bundle in a folder.

    Args:
        folder: the folder of the bundle.

    Raises:
        NotABundleError, VersionError, DigestError, LimitError, FormatError: see `stagepack.format.reader.Bundle`.
    """
    path = folder / MANIFEST_NAME
    try:
        if not is_plain_file(path):
            hint = ": stagepack.open and stagepack.load take a URL" if ":/" in str(folder) else ""
            raise NotABundleError(
                f"{folder}: not a stagepack bundle: expected a folder with a file {MANIFEST_NAME}{hint} [M1]"
            )
        _check_manifest_size(path.stat().st_size)
        content = path.read_bytes()
    except OSError as error:
        raise NotABundleError(f"{path}: cannot be read: {error.strerror or error} [M1]") from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, location: str) -> Manifest:
    """Decode and check a manifest.

    Args:
        content: the bytes of the file.
        location: its path or URL, for messages.

    Raises:
        NotABundleError, VersionError, DigestError, LimitError, FormatError: see `Bundle`.
    """
    _check_manifest_size(len(content))
    fields = parse_json(content, MANIFEST_NAME)
    if not isinstance(fields, dict) or fields.get("format") != "stagepack":
        raise NotABundleError(f'{location}: not a stagepack manifest: expected the field "format": "stagepack" [M1]')
    check_version(fields, MANIFEST_NAME)
    stated_digest, actual_digest = stated_and_actual_digest(content)
    if stated_digest != actual_digest:
        message = f"the manifest states the sha256 {stated_digest}, found {actual_digest}: the file was changed"
        raise DigestError([Problem(rule="D3", where=MANIFEST_NAME, message=message)])
    manifest = convert_manifest(fields, MANIFEST_NAME)
    raise_problems(check_manifest(manifest))
    return manifest


def _check_manifest_size(file_size: int) -> None:
    if file_size > limits.MANIFEST_BYTES:
        message = f"expected at most {limits.MANIFEST_BYTES} bytes, found {file_size}"
        raise LimitError([Problem(rule="L1", where=MANIFEST_NAME, message=message)])
