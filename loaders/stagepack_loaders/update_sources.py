"""What a pipeline is updated from: a bundle, or deltas on the bundle that runs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from stagepack.errors import UpdateError
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, opened, with_deltas

if TYPE_CHECKING:
    from stagepack.deltas.delta import Delta

# A bundle, a delta, or several deltas in their order.
WeightSource: TypeAlias = "BundleSource | DeltaSource | Sequence[DeltaSource]"


class _Head(msgspec.Struct):
    format: Any = None


def bundle_of(
    running: Bundle, source: WeightSource, require_signature: TrustedSigners | None
) -> tuple[Bundle, str | None]:
    """Return the bundle that a source makes of the one that runs, and the name that the last delta gives it."""
    if (deltas := _find_deltas(source)) is None:
        return opened(source, require_signature), None  # type: ignore[arg-type] # no deltas
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
    return _with_more_deltas(running.stored, deltas, require_signature), deltas[-1].version or None


def _with_more_deltas(stored: Bundle, deltas: "Sequence[Delta]", require_signature: TrustedSigners | None) -> Bundle:
    """Return the bundle that deltas make of a bundle that may be made by others already."""
    from stagepack.deltas.patches import ComposedFiles  # noqa: PLC0415 - zstandard, which updates by bundles do not need

    if isinstance(stored.patches, ComposedFiles):
        return with_deltas(stored.patches.base, [*stored.patches.deltas, *deltas], require_signature)
    return with_deltas(stored, deltas, require_signature)


def _find_deltas(source: WeightSource) -> "list[Delta] | None":
    """The deltas of a source; None if it is a bundle."""
    if isinstance(source, Bundle):
        return None
    if isinstance(source, str | os.PathLike) and not is_delta(source):
        return None
    from stagepack.deltas.delta import Delta, open_delta  # noqa: PLC0415 - zstandard, as above

    if isinstance(source, str | os.PathLike | Delta):
        return [open_delta(source)]
    return [open_delta(delta) for delta in source] or None


def is_delta(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the folder of a delta; not of a bundle, and nothing else."""
    from stagepack.deltas.document import DELTA_FORMAT  # noqa: PLC0415 - it needs no numpy, but its package is of deltas

    try:
        content = (Path(path) / MANIFEST_NAME).read_bytes()
        return bool(msgspec.json.decode(content, type=_Head).format == DELTA_FORMAT)
    except (OSError, ValueError):
        return False
