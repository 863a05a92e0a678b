"""Keeps the chains of deltas short that models run on, and frees the disk of what was fetched for them and is needed no more."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

from stagepack.deltas.delta import Delta
from stagepack.deltas.patches import ComposedFiles
from stagepack.format.chunks import File
from stagepack.format.reader import Bundle
from stagepack.remote.cache import Cache, default_cache_folder
from stagepack.remote.cache_contents import remove_with_files
from stagepack.remote.stored_composed import store_composed

# A longer chain is written as a bundle, and so is one of more bytes than this share of its bundle. A chain has at most 64 deltas.
MOST_DELTAS = 16
_MOST_SHARE: Final = 1 / 2


class DeltaChains:
    """What a server has in the cache for the bundles that it runs: deltas that it has fetched.

    The disk has, for each bundle that runs, at most one that was made of a chain, a second one while it is written, and a chain that is
    not long.
    """

    def __init__(self) -> None:
        self._own: dict[str, Sequence[File]] = {}
        # Deltas of a chain that could not be written: the next attempt is for a longer one.
        self._postponed = 0

    @cached_property
    def _cache(self) -> Cache:
        return Cache(default_cache_folder())

    def add(self, delta: Delta) -> None:
        """Free a delta that was fetched when nothing needs it any more."""
        self._own[delta.digest] = delta.listed

    def is_long(self, bundle: Bundle) -> bool:
        """Whether the chain that makes a bundle is to be written as a bundle."""
        patches = bundle.patches
        if not isinstance(patches, ComposedFiles):
            return False
        if len(patches.deltas) <= self._postponed:
            return False
        sizes = [sum(file.size for file in listed.listed) for listed in (bundle, *patches.deltas)]
        return len(patches.deltas) > MOST_DELTAS or sum(sizes[1:]) > sizes[0] * _MOST_SHARE

    def store(self, bundle: Bundle) -> Bundle:
        """Write a bundle that a chain makes into the cache; return it there. It is removed when nothing uses it any more."""
        stored = store_composed(bundle, self._cache)
        self._postponed = 0
        return stored

    def postpone(self, bundle: Bundle) -> None:
        """Write a chain only when it is longer by a half than that of a bundle, which could not be written."""
        patches = bundle.patches
        self._postponed = len(patches.deltas) * 3 // 2 if isinstance(patches, ComposedFiles) else 0

    def has_unneeded(self, running: Iterable[Bundle]) -> bool:
        """Whether a delta was fetched that is not needed for the bundles that run."""
        return bool(self._own.keys() - _needed(running))

    def free(self, running: Iterable[Bundle]) -> None:
        """Remove deltas that are not needed for the bundles that run, nor by a call under way."""
        for digest in self._own.keys() - _needed(running):
            with contextlib.suppress(OSError):  # it is tried again
                is_gone = not self._cache.bundle_folder(digest).exists()
                if remove_with_files(self._cache, digest, self._own[digest]) or is_gone:
                    del self._own[digest]


def _needed(running: Iterable[Bundle]) -> set[str]:
    """The digests of the deltas that bundles are made of."""
    return {
        delta.digest
        for bundle in running
        if isinstance(bundle.patches, ComposedFiles)
        for delta in bundle.patches.deltas
    }
