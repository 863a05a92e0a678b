"""Verify the signature of a bundle before anything of it is used.

The signature lists the digests of all files. Only the digest of the manifest is compared: the manifest has a digest of every file, with
which each file is compared when it is read (SPEC D2). So weights are read once, and nothing is between the check and the use.
"""

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from model_signing import hashing, manifest, verifying

from stagepack.errors import FormatError, OptionError, SignatureError
from stagepack.format import limits
from stagepack.format.file_checks import checked_path, read_plain_file
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest_codec import kind_noun, stated_and_actual_digest
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME, format_names
from stagepack.signing.keys import check_key
from stagepack.signing.signature_file import SignatureFile

_HASHES: Final[dict[str, Callable[[bytes], Any]]] = {
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
    "blake3": blake3,
}
_PEM_BLOCK: Final = re.compile(rb"-----BEGIN (CERTIFICATE|PUBLIC KEY)-----\s[^-]*-----END \1-----")
_PEM_START: Final = re.compile(rb"-----BEGIN (?:CERTIFICATE|PUBLIC KEY)-----")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSignature:
    """A signature that is by a trusted signer, and over the bundle."""

    trusted_file: str  # the file of the caller that the signature was verified with
    subject: str | None  # the subject of the certificate of the signer; None if it signed with a key alone


def verify_signature(bundle: ListedFiles, trusted_files: Iterable[str | os.PathLike[str]]) -> VerifiedSignature:
    """Verify that a trusted signer has signed the manifest of a bundle, and with it the digests of all its files.

    The content of the files is compared with the manifest when they are read, or by `Bundle.verify`.

    trusted_files: PEM files with public keys, certificates of authorities, or both. One of all these must verify the signature.
    """
    # Read before the signature, so that what is wrong with them is said first.
    if not isinstance(trusted_files, Iterable):
        trusted_files = [trusted_files]
    paths = [str(checked_path(trusted_file, "require_signature")) for trusted_file in trusted_files]
    verifiers = [(path, verifier) for path in paths for verifier in _verifiers(path)]
    if not verifiers:
        raise OptionError("require_signature: expected a public key or certificates, found no file")
    signature = SignatureFile.parse(_read_signature(bundle), bundle.location)
    trusted_file, signed = _verified_by_one(bundle, signature, verifiers)
    signature.check_validity_periods(bundle.location)
    _compare_manifest(bundle, signed)
    _compare_names(bundle, signed)
    certificates = signature.certificates()
    subject = certificates[0].subject.rfc4514_string() if certificates else None
    return VerifiedSignature(trusted_file=trusted_file, subject=subject)


def _read_signature(bundle: ListedFiles) -> bytes:
    try:
        content = bundle.read_signature()
    except FormatError as error:
        raise SignatureError(f"{bundle.location}: {error}", reason="malformed") from None
    if content is None:
        noun = kind_noun(bundle.document_format)
        raise SignatureError(
            f"{bundle.location}: expected a signed {noun}, found no {SIGNATURE_NAME}: have it signed ('stagepack sign')",
            reason="unsigned",
        )
    return content


def _verified_by_one(
    bundle: ListedFiles, signature: SignatureFile, verifiers: Sequence[tuple[str, verifying.Config]]
) -> tuple[str, manifest.Manifest]:
    """Return the file that verifies the signature, and the signed list of files."""
    reasons = []
    with tempfile.TemporaryDirectory(prefix="stagepack-signature-") as folder:
        signature_path = Path(folder) / SIGNATURE_NAME
        signature_path.write_bytes(signature.encode())
        for path, verifier in verifiers:
            try:
                return path, _signed_manifest(verifier, signature_path)
            except Exception as error:  # noqa: BLE001 - model_signing, cryptography and OpenSSL have no common error
                reasons.append(f"{path}: {str(error).strip() or type(error).__name__}")
    raise SignatureError(
        f"{bundle.location}: the signature is not by a trusted signer, or it was changed: {'; '.join(reasons)}",
        reason="untrusted",
    )


def _verifiers(path: str) -> list[verifying.Config]:
    """The verifiers of model_signing for a file of the caller: one for each public key, and one for all certificates."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from None
    if b"PRIVATE KEY-----" in content:
        raise OptionError(f"{path}: expected a public key or certificates, found a private key: keep it secret")
    certificates = [match[0] for match in _PEM_BLOCK.finditer(content) if match[1] == b"CERTIFICATE"]
    keys = [match[0] for match in _PEM_BLOCK.finditer(content) if match[1] == b"PUBLIC KEY"]
    if len(certificates) + len(keys) != len(_PEM_START.findall(content)):
        raise OptionError(f"{path}: a key or certificate in it has no end: write the whole file again")
    verifiers = [_verifier(path, key) for key in keys]
    if certificates or not keys:
        verifiers.append(_verifier(path, b"\n".join(certificates) or content))
    return verifiers


def _verifier(path: str, content: bytes) -> verifying.Config:
    """The verifier for one public key, or for certificates. model_signing reads a file, and of several keys in it the first one."""
    try:
        with tempfile.NamedTemporaryFile(prefix="stagepack-key-") as file:
            file.write(content)
            file.flush()
            if b"-----BEGIN CERTIFICATE-----" in content:
                return verifying.Config().use_certificate_verifier(certificate_chain=[file.name])
            check_key(path, content)
            return verifying.Config().use_elliptic_key_verifier(public_key=file.name)
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(
            f"{path}: expected a PEM file with public keys of the curves P-256, P-384 or P-521, or with certificates: "
            f"{str(error).strip() or type(error).__name__}"
        ) from error


class _RecordedManifest:
    """Takes the signed list of files from the comparison that `verifying.Config.verify` ends with."""

    def __init__(self) -> None:
        self.signed: manifest.Manifest | None = None

    def __eq__(self, signed: object) -> bool:
        assert isinstance(signed, manifest.Manifest)
        self.signed = signed
        return True

    __hash__ = None  # type: ignore[assignment]


class _NoHashing(hashing.Config):
    """In the place of hashing all files, which would read the weights a second time."""

    def __init__(self, recorded: _RecordedManifest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    def hash(self, *_: Any, **__: Any) -> Any:
        """Return what the signed list is compared with."""
        return self._recorded


def _signed_manifest(verifier: verifying.Config, signature_path: Path) -> manifest.Manifest:
    """Verify a signature by the public interface of model_signing; return what it is over."""
    recorded = _RecordedManifest()
    verifier.set_hashing_config(_NoHashing(recorded))
    # The verifier prints a warning for signatures of its versions before 1.1, and standard output is for the facts of our commands alone.
    with contextlib.redirect_stdout(sys.stderr):
        verifier.verify(signature_path.parent, signature_path)
    if recorded.signed is None:
        raise ValueError("this version of model_signing does not compare the signed files")
    return recorded.signed


def _compare_manifest(bundle: ListedFiles, signed: manifest.Manifest) -> None:
    """Compare the manifest that was opened with its signed digest, or with the digests of its shards."""
    content = read_plain_file(bundle.path, MANIFEST_NAME, limits.MANIFEST_BYTES) or b""
    changed = SignatureError(
        f"{bundle.location}: {MANIFEST_NAME} is not the one that was signed: the bundle was changed afterwards. If you changed it, as "
        "'stagepack onnx' does, sign it again",
        reason="changed",
    )
    # The bytes are those that were opened, because they have the same digest.
    if set(stated_and_actual_digest(content)) != {bundle.digest}:
        raise changed
    shards = [
        (shard or (0, len(content)), digest) for name, shard, digest in _signed_parts(signed) if name == MANIFEST_NAME
    ]
    position = 0
    for (start, end), digest in sorted(shards, key=lambda entry: entry[0]):
        # The algorithm of a shard has the size of the shards after its name: sha256-sharded-1000000000.
        algorithm = digest.algorithm.partition("-sharded-")[0]
        if algorithm not in _HASHES:
            raise SignatureError(f"{bundle.location}: unknown hash {algorithm[:80]!r} in model.sig", reason="malformed")
        if start != position or _HASHES[algorithm](content[start:end]).digest() != digest.digest_value:
            raise changed
        position = end
    if position != len(content):
        raise changed


def _signed_parts(signed: manifest.Manifest) -> Iterator[tuple[str, tuple[int, int] | None, Any]]:
    """Yield the name of each signed file, the range of its shard if it has shards, and the digest."""
    is_sharded = signed.serialization_type["method"] == "shards"
    for resource in signed.resource_descriptors():
        if is_sharded:
            name, start, end = resource.identifier.rsplit(":", 2)
            yield name, (int(start), int(end)), resource.digest
        else:
            yield resource.identifier, None, resource.digest


def _compare_names(bundle: ListedFiles, signed: manifest.Manifest) -> None:
    """Refuse files of the bundle that are not signed. Other files may be signed, and may be there: nothing reads them."""
    signed_names = {name for name, _, _ in _signed_parts(signed)}
    if unsigned := {MANIFEST_NAME, *bundle.files} - signed_names:
        raise SignatureError(
            f"{bundle.location}: not signed: {format_names(sorted(unsigned))}: sign it again", reason="files"
        )
