"""Open bundles, deltas and adapters in folders or at URLs."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from stagepack.adapter.opened import OpenAdapter
from stagepack.deltas.delta import Delta
from stagepack.documents import Listed, of_kind, open_listed
from stagepack.errors import NotABundleError, OptionError, named_errors
from stagepack.extras import explain_missing_packages
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest_codec import kind_noun
from stagepack.format.reader import Bundle
from stagepack.format.rules import DIGEST_PATTERN, MANIFEST_NAME, rule_error
from stagepack.remote.url import BundleUrl, is_url, split_entry_point

if TYPE_CHECKING:
    from stagepack.signing.verification import VerifiedSignature

# The folder of a delta, or an opened one.
DeltaSource: TypeAlias = str | os.PathLike[str] | Delta

# The folder of an adapter, its URL, or an opened one.
AdapterSource: TypeAlias = str | os.PathLike[str] | OpenAdapter

# The folder of a bundle, its URL, or an opened bundle.
BundleSource = str | os.PathLike[str] | Bundle

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")

# A PEM file with a public key or with certificates of authorities, or several, one of which must verify a signature.
TrustedSigners = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def errors_name_bundle(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """Decorate a function whose first argument is a bundle, so that its errors begin with the path or URL of the bundle."""

    @functools.wraps(function)
    def named(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Returned:
        bundle = args[0] if args else kwargs.get("bundle", kwargs.get("source"))
        with named_errors(_shown_location(bundle)):
            return function(*args, **kwargs)

    return named


def _shown_location(bundle: object) -> str:
    """The path or URL of a bundle as errors name it; nothing for what is none, and for a draft, whose name users do not know."""
    if isinstance(bundle, Bundle):
        return "" if bundle.path.parent.name.endswith(".part") else bundle.location
    if not isinstance(bundle, str | os.PathLike):
        return ""
    location = os.fspath(split_entry_point(bundle)[0])
    if not is_url(location):
        return str(Path(location))
    with contextlib.suppress(OptionError):
        return str(BundleUrl.parse(location))
    return ""


@errors_name_bundle
def open_bundle(
    source: str | os.PathLike[str],
    *,
    digest: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    require_signature: TrustedSigners | None = None,
    deltas: Sequence[DeltaSource] = (),
) -> Bundle:
    """Open a bundle in a folder or at a URL. Only its manifest is read; needs no torch.

    The files of a remote bundle are downloaded when a method of the bundle, or a loader, reads them: the files of one stage for
    `stagepack.load_stage`. They stay in a cache, in the folder that ``STAGEPACK_CACHE`` names, by default ``~/.cache/stagepack``, which all
    processes of a user share. Each chunk of 16 MiB is compared with its digest before it is used, and a download that was interrupted
    goes on where it stopped.

    Args:
        source: the folder of the bundle; or its URL: ``https://HOST/FOLDER``, ``s3://BUCKET/FOLDER``, ``hf://ORGANIZATION/NAME`` with
            ``@REVISION`` for another revision than the main branch (with ``HF_HUB_OFFLINE=1``, its snapshot in the Hub's own cache), or
            a URL of another file system of fsspec. ``#NAME`` after the path or the URL selects an entry point, as `Bundle.select` does.
        digest: the digest that the bundle must have, as `Bundle.digest` and ``stagepack inspect`` state it. Without it, the manifest that
            the server sends is trusted. With it, nothing is downloaded that the cache has.
        storage_options: of a URL, arguments of the file system of fsspec, such as credentials.
        require_signature: refuse a bundle that no trusted signer has signed: a PEM file with the public key of a signer, or with
            certificates of authorities; or several files, one of which must verify the signature. See `sign`. The signature is over the
            manifest, whose digests the files are compared with when they are read. Each delta must be signed too.
        deltas: open the bundle that these deltas make of it, each on the result of the one before; see `stagepack.delta`. Its files are
            composed in memory when they are read, and nothing is written.

    Returns:
        The opened bundle.

    Raises:
        NotABundleError: there is no bundle.
        RemoteError: the server fails.
        DigestError: the bundle has another digest, or its manifest was changed.
        VersionError, LimitError, FormatError: see `Bundle`.
        EntryPointError: the bundle has no entry point of the name.
        SignatureError: `require_signature` is given, and the bundle has no such signature.
        OptionError: the digest or the URL is malformed, no file system has its scheme, or a file of `require_signature` cannot be used.
        MissingPackageError: the package of the file system, or model_signing, is not installed.
        WriteError: the cache cannot be written.

    Examples:
        >>> bundle = stagepack.open("m.stagepack")
        >>> bundle = stagepack.open("s3://models/m.stagepack", digest="6a664d10...")
        >>> stage = stagepack.load_stage(bundle, 1)
        >>> decoder = stagepack.open("translator.stagepack#decode")
    """
    if not isinstance(source, str | os.PathLike):
        raise OptionError(f"expected the path or the URL of a bundle, found {type(source).__name__}")
    location, name = split_entry_point(source)
    bundle = of_kind(_open_location(location, digest, storage_options), Bundle)
    if require_signature is not None:
        check_signed(bundle, require_signature)
    return with_deltas(bundle if name is None else bundle.select(name), deltas, require_signature)


def with_deltas(
    bundle: Bundle, deltas: Sequence[DeltaSource], require_signature: TrustedSigners | None = None
) -> Bundle:
    """Return the bundle that deltas make of another one; each of them must have the signature that is required."""
    if isinstance(deltas, str | os.PathLike | Delta):
        raise OptionError(f"deltas: expected a sequence of deltas, found {deltas!r}: write [{deltas!r}]")
    if not isinstance(deltas, Sequence):
        raise OptionError(f"deltas: expected a sequence of deltas, found {deltas!r}")
    opened_deltas = [open_delta(delta) for delta in deltas]
    if not opened_deltas:
        return bundle
    from stagepack.deltas.patches import patched_bundle  # noqa: PLC0415 - numpy and zstandard, which opening a bundle does not need

    verify_signatures(opened_deltas, require_signature)
    return patched_bundle(bundle, opened_deltas)


def verify_signatures(deltas: Sequence[Delta], require_signature: TrustedSigners | None) -> None:
    """Refuse deltas of which one has no signature of a trusted signer; None trusts all."""
    if require_signature is not None:
        for delta in deltas:
            check_signed(delta, require_signature)


def open_delta(
    source: DeltaSource, *, digest: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Delta:
    """Open a delta in a folder or at a URL. Only its document is read; needs no torch.

    Args:
        source: the folder of the delta, its URL (see `stagepack.open`), or an opened delta.
        digest: the digest that the delta must have.
        storage_options: see `stagepack.open`.

    Returns:
        The opened delta.

    Raises:
        NotABundleError: there is no delta.
        RemoteError, VersionError, DigestError, FormatError, OptionError, WriteError: see `stagepack.open`.

    Examples:
        >>> delta = stagepack.open_delta("step-12.delta")
        >>> delta.version, delta.changed_tensors("stage-0.safetensors")
    """
    return of_kind(_open_location(source, digest, storage_options, Delta), Delta)


def open_adapter(
    source: AdapterSource, *, digest: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> OpenAdapter:
    """Open an adapter in a folder or at a URL. Only its document is read; needs no torch.

    Args:
        source: the folder that `write_adapter` wrote, its URL (see `stagepack.open`), or an opened adapter.
        digest: the digest that the adapter must have.
        storage_options: see `stagepack.open`.

    Returns:
        The opened adapter.

    Raises:
        NotABundleError: there is no adapter.
        RemoteError, VersionError, DigestError, FormatError, OptionError, WriteError: see `stagepack.open`.

    Examples:
        >>> adapter = stagepack.open_adapter("pirate")
        >>> adapter.base, sorted(adapter.changes)
    """
    return of_kind(_open_location(source, digest, storage_options, OpenAdapter), OpenAdapter)


def _open_location(
    source: str | os.PathLike[str] | Listed,
    digest: str | None,
    storage_options: Mapping[str, Any] | None,
    expected: type[Bundle] | type[Delta] | type[OpenAdapter] = Bundle,
) -> Listed:
    if not isinstance(source, str | os.PathLike | ListedFiles):
        raise OptionError(f"expected a path or a URL, found {type(source).__name__}")
    if digest is not None and not (isinstance(digest, str) and DIGEST_PATTERN.fullmatch(digest)):
        raise OptionError(f"digest: expected 64 characters of 0123456789abcdef, found {digest!r:.80}")
    if isinstance(source, ListedFiles):
        bundle: Listed = source
    elif isinstance(source, str) and is_url(source):
        with explain_missing_packages("remote"):
            from stagepack.remote.cache import Cache, default_cache_folder  # noqa: PLC0415 - fsspec and aiohttp are optional
            from stagepack.remote.remote_bundle import open_url  # noqa: PLC0415 - the same

        cache = Cache(default_cache_folder())
        bundle = open_url(BundleUrl.parse(source), cache, digest=digest, storage_options=storage_options)
    elif storage_options is not None:
        raise OptionError(f"storage_options: only a URL has them, found the path {os.fspath(source)!r}")
    else:
        try:
            bundle = open_listed(source, expected=expected)
        except NotABundleError:
            # A repository in the cache of the Hugging Face Hub has a bundle in each of its snapshots.
            manifest_paths = list[Path]()
            with contextlib.suppress(OSError):  # a name that is too long, or a folder that cannot be read
                manifest_paths = sorted(Path(source).glob(f"snapshots/*/{MANIFEST_NAME}"))
            if not manifest_paths:
                raise
            folders = " or ".join(str(manifest_path.parent) for manifest_path in manifest_paths)
            raise NotABundleError(
                f"{source}: expected the folder of a bundle, found a repository in the cache of the Hugging Face Hub: give the snapshot "
                f"in it: {folders} [M1]"
            ) from None
    if digest not in (None, bundle.digest):
        noun = kind_noun(bundle.document_format)
        message = f"expected the {noun} of the digest {digest}, found {bundle.digest}: correct the digest or the path"
        raise rule_error("D3", str(bundle.path / MANIFEST_NAME), message)
    return bundle


def current_digest(url: str) -> str:
    """Return the digest of the bundle that is at a URL now; empty with ``HF_HUB_OFFLINE`` for one of the Hub."""
    with explain_missing_packages("remote"):
        from stagepack.remote.remote_bundle import digest_at  # noqa: PLC0415 - fsspec and aiohttp are optional

    return digest_at(BundleUrl.parse(os.fspath(split_entry_point(url)[0])))


def opened(
    bundle: BundleSource, require_signature: TrustedSigners | None = None, deltas: Sequence[DeltaSource] = ()
) -> Bundle:
    """Return a bundle that may be opened already, or the one that deltas make of it."""
    if not isinstance(bundle, ListedFiles):
        return open_bundle(bundle, require_signature=require_signature, deltas=deltas)
    bundle = of_kind(bundle, Bundle)
    if require_signature is not None:
        check_signed(bundle, require_signature)
    return with_deltas(bundle, deltas, require_signature)


def opened_listed(source: BundleSource | Listed, *, digest: str | None = None) -> Listed:
    """Return a bundle, at an entry point or not, a delta or an adapter; it may be opened already."""
    if isinstance(source, ListedFiles):
        return source
    location, name = split_entry_point(source) if isinstance(source, str | os.PathLike) else (source, None)
    listed = _open_location(location, digest, None)
    return listed.select(name) if name is not None and isinstance(listed, Bundle) else listed


def opened_folder(bundle: BundleSource, content: str) -> Bundle:
    """Return a bundle that `content`, such as "assets", is written into: refuse one that is at a URL."""
    bundle = opened(bundle)
    if bundle.patches is not None:
        raise OptionError(f"{bundle.location}: is composed of deltas: write it first (stagepack apply)")
    if bundle.source is not None:
        raise OptionError(
            f"{bundle.location}: {content} are written into the bundle: download it first (stagepack pull), and give its folder"
        )
    return bundle


@errors_name_bundle
def verify_bundle(
    bundle: BundleSource | Listed,
    *,
    require_signature: TrustedSigners | None = None,
    strict: bool = False,
    progress: ByteProgress | None = None,
) -> "VerifiedSignature | None":
    """Check the digest of every file and every rule of the format, and the signature if it is required. Reads the whole bundle.

    Args:
        bundle: the folder of the bundle, its URL (see `stagepack.open`), or an opened bundle; or a delta or an adapter, of which
            everything is checked that needs no base.
        require_signature: see `stagepack.open`.
        strict: refuse files that the manifest does not list; otherwise they are left alone, as nothing reads them.
        progress: called by several threads with the number of bytes that were compared with their digests.

    Returns:
        How the signature was verified; None without `require_signature`.

    Raises:
        SignatureError: the bundle has no signature that is required.
        DigestError: files are missing or changed, or not listed if `strict`.
        FormatError: a rule is broken.
        StagepackError: the bundle cannot be opened; see `stagepack.open`.

    Example:
        >>> stagepack.verify("m.stagepack", require_signature="signer.pub")
    """
    opened_bundle = opened_listed(bundle)
    signature = None if require_signature is None else check_signed(opened_bundle, require_signature)
    opened_bundle.verify(progress, strict=strict)
    return signature


def check_signed(bundle: ListedFiles, require_signature: TrustedSigners) -> "VerifiedSignature":
    """Verify that a trusted signer has signed what was opened."""
    if bundle.patches is not None:
        raise OptionError(
            f"{bundle.location}: require_signature: give the base and its deltas in one call, which verifies each of them: deltas=[...]"
        )
    with explain_missing_packages("sign"):
        from stagepack.signing.verification import verify_signature  # noqa: PLC0415 - model_signing is optional

    if isinstance(require_signature, str | os.PathLike):
        return verify_signature(bundle, [require_signature])
    return verify_signature(bundle, require_signature)
