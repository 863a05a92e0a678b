"""Sign a bundle: write ``model.sig`` into its folder."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from model_signing import hashing, signing

from stagepack.documents import Listed, open_listed
from stagepack.errors import OptionError, OutputExistsError, WriteError, named_errors
from stagepack.format import limits
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.file_checks import read_plain_file
from stagepack.format.file_writing import synchronize
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest_codec import stated_and_actual_digest
from stagepack.format.output_file import TemporaryFolder
from stagepack.format.own_folders import check_no_cache
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME, rule_error
from stagepack.remote.url import is_url
from stagepack.signing.keys import check_key
from stagepack.signing.signature_file import SignatureFile


def sign_bundle(
    bundle: str | os.PathLike[str] | Listed,
    *,
    key: str | os.PathLike[str],
    certificate: str | os.PathLike[str] | None = None,
    certificate_chain: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    progress: ByteProgress | None = None,
) -> Listed:
    """Sign a bundle, a delta or an adapter, by the model signing of OpenSSF: a signature over all files comes into ``model.sig``.

    All files are compared with their digests and all rules are checked first. Every change of the bundle makes the signature invalid.
    ``model_signing verify key`` (or ``certificate``) verifies it too.

    Args:
        bundle: the folder of the bundle, delta or adapter, or an opened one. The signature over a delta is over the manifest of its
            result too, and so over the digests of all files of the result. A signature over a bundle is not over its adapters.
        key: a PEM file with the private key, unencrypted, of the curve P-256, P-384 or P-521.
        certificate: a PEM file with the certificate of this key, which comes into the signature. It must allow digital signatures or the
            signing of code. Without it, the public key verifies the signature.
        certificate_chain: PEM files with the certificates of the authorities between `certificate` and the one that verifiers trust.
        overwrite: replace a signature that the bundle has.
        progress: called by several threads with the number of bytes that were compared with their digests.

    Returns:
        The bundle, delta or adapter.

    Raises:
        NotABundleError, VersionError, DigestError, FormatError: the bundle is not in order; see `Bundle.verify`.
        OptionError: the key or the certificate cannot be used, or the bundle is at a URL.
        OutputExistsError: the bundle has a signature.
        WriteError: the signature cannot be written, or the bundle is in a cache of bundles.
        MissingPackageError: the package model_signing is not installed.

    Example:
        >>> stagepack.sign("m.stagepack", key="signer.pem")
        >>> pipe = stagepack.load("m.stagepack", require_signature="signer.pub")
    """
    location = bundle.location if isinstance(bundle, ListedFiles) else os.fspath(bundle)
    if is_url(location):
        raise OptionError(
            f"{location}: a signature is written into the folder: download the bundle first (stagepack pull)"
        )
    opened = bundle if isinstance(bundle, ListedFiles) else open_listed(bundle)
    if opened.patches is not None:
        raise OptionError(f"{location}: is composed of deltas: sign the deltas, or write it first (stagepack apply)")
    check_no_cache(opened.path)
    signature_path = opened.path / SIGNATURE_NAME
    if os.path.lexists(signature_path) and not overwrite:
        raise OutputExistsError(f"{location}: is signed already: replace the signature (--overwrite), or keep it")
    config = _signer(key, certificate, certificate_chain)
    with named_errors(location):
        opened.verify(progress)
    ignored_names = [SIGNATURE_NAME, *opened.unlisted_files()]
    hashed_files = hashing.Config().set_ignored_paths(paths=ignored_names, ignore_git_paths=False)
    config.set_hashing_config(hashed_files.set_allow_symlinks(True))
    try:
        with TemporaryFolder(opened.path.resolve()) as temporary:
            new_path = temporary.path / SIGNATURE_NAME
            config.sign(opened.path, new_path)
            _check_signed_manifest(opened, SignatureFile.parse(new_path.read_bytes(), location))
            synchronize(new_path)
            new_path.replace(signature_path)
            synchronize(opened.path)
    except OSError as error:
        raise WriteError(f"{signature_path}: could not be written: {error.strerror or error}") from error
    return opened


def _check_signed_manifest(bundle: ListedFiles, signature: SignatureFile) -> None:
    """Check that the signature is over the manifest that was opened and verified: model_signing reads the files again."""
    content = read_plain_file(bundle.path, MANIFEST_NAME, limits.MANIFEST_BYTES) or b""
    is_opened_one = set(stated_and_actual_digest(content)) == {bundle.digest}
    if not is_opened_one or signature.signed_digests().get(MANIFEST_NAME) != hashlib.sha256(content).hexdigest():
        message = (
            "was changed after the bundle was opened, so that it is not signed: open it again, and repeat the call"
        )
        raise rule_error("D3", MANIFEST_NAME, message)


def _signer(
    key: str | os.PathLike[str],
    certificate: str | os.PathLike[str] | None,
    certificate_chain: Sequence[str | os.PathLike[str]],
) -> signing.Config:
    """The signer of model_signing for the files of the caller."""
    if isinstance(certificate_chain, str | os.PathLike):
        raise OptionError(f"certificate_chain: expected a sequence of files, found {certificate_chain!r}")
    if certificate is None and certificate_chain:
        raise OptionError("certificate_chain: expected the certificate of the key too")
    for path in (key, *(() if certificate is None else (certificate,)), *certificate_chain):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    check_key(os.fspath(key), Path(key).read_bytes())
    try:
        if certificate is None:
            return signing.Config().use_elliptic_key_signer(private_key=key)
        # model_signing 1.1.1 takes no empty chain. A second copy of the certificate means nothing.
        return signing.Config().use_certificate_signer(
            private_key=key, signing_certificate=certificate, certificate_chain=certificate_chain or [certificate]
        )
    except Exception as error:
        used = os.fspath(key) if certificate is None else f"{os.fspath(key)} and {os.fspath(certificate)}"
        raise OptionError(
            f"{used}: expected PEM files of an unencrypted private key of the curve P-256, P-384 or P-521, and of its certificate: "
            f"{str(error).strip() or type(error).__name__}"
        ) from error
