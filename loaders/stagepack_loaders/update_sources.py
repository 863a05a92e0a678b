"""What a pipeline is updated from: a bundle, or deltas on the bundle that runs."""

import os
from collections.abc import Sequence
from typing import TypeAlias

from stagepack.deltas.delta import Delta
from stagepack.errors import OptionError, UpdateError, named_errors
from stagepack.format.reader import Bundle
from stagepack.opening import (
    BundleSource,
    DeltaSource,
    TrustedSigners,
    open_delta,
    opened,
    opened_listed,
    verify_signatures,
    with_deltas,
)
from stagepack.remote.url import split_entry_point
from stagepack_loaders.versions import UpdateSource

# A bundle, a delta, or several deltas in their order.
WeightSource: TypeAlias = "BundleSource | DeltaSource | Sequence[DeltaSource]"


def update_source(
    running: Bundle,
    source: WeightSource,
    require_signature: TrustedSigners | None,
    trusted_signers: TrustedSigners | None = None,
) -> UpdateSource:
    """Return what makes a new version of the bundle that runs.

    require_signature: who must have signed it; None for `trusted_signers`, which have signed what runs.
    """
    if (deltas := _find_deltas(source)) is None:
        bundle = opened(source)  # type: ignore[arg-type] # no deltas
        # The digest of what runs is that of a manifest that was verified.
        signers = require_signature or (None if bundle.digest == running.digest else trusted_signers)
        return UpdateSource(bundle=opened(bundle, signers))
    if not deltas:
        raise OptionError("expected a bundle, a delta or several, found an empty list")
    if not running.compares_digests:
        raise UpdateError(
            f"{running.location}: deltas: the bundle was loaded with verify='off', so that its weights may be others: give a whole bundle"
        )
    if deltas[0].base != running.digest:
        raise UpdateError(
            f"{deltas[0].location}: expected a delta on the bundle that runs, {running.digest}, found one on {deltas[0].base}: give the "
            "deltas between them, in order, or the whole bundle"
        )
    verify_signatures(deltas, require_signature or trusted_signers)
    bundle = _with_more_deltas(running.stored, deltas)
    return UpdateSource(bundle=bundle, name=deltas[-1].version or None, base=running.digest)


def _with_more_deltas(stored: Bundle, deltas: Sequence[Delta]) -> Bundle:
    """Return the bundle that deltas make of a bundle that may be made by others already.

    They are a chain (Y8). Where it leads back to an earlier version of what runs, the deltas since that one are needed no more. Where it
    would be too long, the bundle that runs is written into the cache, and the chain begins anew.
    """
    from stagepack.deltas.patches import MOST_DELTAS, ComposedFiles, check_chain, without_returns  # noqa: PLC0415 - zstandard, which updates by bundles do not need

    check_chain(stored.digest, deltas)
    base, chain = stored, list(deltas)
    if isinstance(stored.patches, ComposedFiles):
        base, chain = stored.patches.base, [*stored.patches.deltas, *deltas]
    if len(chain := without_returns(base.digest, chain)) > MOST_DELTAS:
        base, chain = _written(stored), without_returns(stored.digest, deltas)
    return with_deltas(base, chain)


def known_bundle(running: Bundle, digest: str) -> Bundle | None:
    """Return the bundle of a digest if it is the one that runs, or the one that deltas make it of; None otherwise."""
    from stagepack.deltas.patches import ComposedFiles  # noqa: PLC0415 - zstandard, which updates by bundles do not need

    if running.digest == digest:
        return running if running.patches is None else _written(running)
    if isinstance(running.patches, ComposedFiles) and running.patches.base_digest == digest:
        return running.patches.base
    return None


def _written(bundle: Bundle) -> Bundle:
    """Write a bundle that deltas make into the cache, where it is as long as it is in use; return it there."""
    from stagepack.remote.cache import Cache, default_cache_folder  # noqa: PLC0415 - fcntl and zstandard, which few updates need
    from stagepack.remote.stored_composed import store_composed  # noqa: PLC0415 - the same

    with named_errors(f"{bundle.location}: the chain of its deltas is too long, and cannot be written as a bundle"):
        return store_composed(bundle, Cache(default_cache_folder()))


def _find_deltas(source: WeightSource) -> list[Delta] | None:
    """The deltas of a source; None if it is a bundle."""
    if isinstance(source, Bundle):
        return None
    if isinstance(source, str | os.PathLike):
        listed = opened_listed(split_entry_point(source)[0])
        return [listed] if isinstance(listed, Delta) else None
    if not isinstance(source, Delta | Sequence):
        found = type(source).__name__
        raise OptionError(
            f"expected a bundle, a delta or several, found {found}: stagepack.delta makes a delta of tensors"
        )
    return [source] if isinstance(source, Delta) else [open_delta(delta) for delta in source]
