"""What a pipeline is updated from: a bundle, or deltas on the bundle that runs."""

import os
from collections.abc import Sequence
from typing import TypeAlias

from stagepack.deltas.delta import Delta
from stagepack.errors import OptionError, UpdateError
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, open_delta, opened, opened_listed, with_deltas
from stagepack.remote.url import split_entry_point
from stagepack_loaders.versions import UpdateSource

# A bundle, a delta, or several deltas in their order.
WeightSource: TypeAlias = "BundleSource | DeltaSource | Sequence[DeltaSource]"


def update_source(running: Bundle, source: WeightSource, require_signature: TrustedSigners | None) -> UpdateSource:
    """Return what makes a new version of the bundle that runs."""
    if (deltas := _find_deltas(source)) is None:
        return UpdateSource(bundle=opened(source, require_signature))  # type: ignore[arg-type] # no deltas
    if not deltas:
        raise OptionError("expected a bundle, a delta or several, found an empty list")
    if not running.compares_digests:
        raise UpdateError(
            f"{running.location}: deltas: the bundle was loaded with verify='off', so that its weights may be others: give a whole bundle"
        )
    expected = running.digest
    for delta in deltas:
        if delta.base != expected:
            raise UpdateError(
                f"{delta.location}: expected a delta on the bundle that runs, {expected}, found one on {delta.base}: give the deltas "
                "between them, in order, or the whole bundle"
            )
        expected = delta.result
    bundle = _with_more_deltas(running.stored, deltas, require_signature)
    return UpdateSource(bundle=bundle, name=deltas[-1].version or None, base=running.digest)


def _with_more_deltas(stored: Bundle, deltas: Sequence[Delta], require_signature: TrustedSigners | None) -> Bundle:
    """Return the bundle that deltas make of a bundle that may be made by others already."""
    from stagepack.deltas.patches import ComposedFiles  # noqa: PLC0415 - zstandard, which updates by bundles do not need

    base, chain = stored, list[Delta]()
    if isinstance(stored.patches, ComposedFiles):
        base, chain = stored.patches.base, list(stored.patches.deltas)
    digests = [base.digest, *(delta.result for delta in chain)]
    for delta in deltas:
        if delta.result in digests:  # back to an earlier version of the chain
            position = digests.index(delta.result)
            del chain[position:], digests[position + 1 :]
        else:
            chain.append(delta)
            digests.append(delta.result)
    return with_deltas(base, chain, require_signature)


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
