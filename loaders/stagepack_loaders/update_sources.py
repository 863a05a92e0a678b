"""What a pipeline is updated from: a bundle, or deltas on the bundle that runs."""

import os
from collections.abc import Sequence
from typing import TypeAlias

from stagepack.deltas.delta import Delta
from stagepack.errors import OptionError, UpdateError
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, open_delta, opened, opened_listed, with_deltas
from stagepack.remote.url import split_entry_point

# A bundle, a delta, or several deltas in their order.
WeightSource: TypeAlias = "BundleSource | DeltaSource | Sequence[DeltaSource]"


def bundle_of(
    running: Bundle, source: WeightSource, require_signature: TrustedSigners | None
) -> tuple[Bundle, str | None]:
    """Return the bundle that a source makes of the one that runs, and the digest of this one if it is made of it."""
    if (deltas := _find_deltas(source)) is None:
        return opened(source, require_signature), None  # type: ignore[arg-type] # no deltas
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
    return _with_more_deltas(running.stored, deltas, require_signature), running.digest


def _with_more_deltas(stored: Bundle, deltas: Sequence[Delta], require_signature: TrustedSigners | None) -> Bundle:
    """Return the bundle that deltas make of a bundle that may be made by others already."""
    from stagepack.deltas.patches import ComposedFiles  # noqa: PLC0415 - zstandard, which updates by bundles do not need

    if isinstance(stored.patches, ComposedFiles):
        return with_deltas(stored.patches.base, [*stored.patches.deltas, *deltas], require_signature)
    return with_deltas(stored, deltas, require_signature)


def _find_deltas(source: WeightSource) -> list[Delta] | None:
    """The deltas of a source; None if it is a bundle."""
    if isinstance(source, Bundle):
        return None
    if isinstance(source, str | os.PathLike):
        listed = opened_listed(split_entry_point(source)[0])
        return [listed] if isinstance(listed, Delta) else None
    return [source] if isinstance(source, Delta) else [open_delta(delta) for delta in source]
