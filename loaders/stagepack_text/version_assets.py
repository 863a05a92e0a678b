"""What the text assets of the versions of a bundle say, such as its tokenizer."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from stagepack.format.reader import Bundle

Asset = TypeVar("Asset")


class VersionAssets(Generic[Asset]):
    """What is read of each version of a bundle. Versions whose files are equal have one object, as those of deltas of weights do.

    names: the files that are read.
    read: reads them.
    """

    def __init__(self, names: Sequence[str], read: Callable[[Bundle], Asset]) -> None:
        self._names = names
        self._read = read
        self._assets: WeakKeyDictionary[Bundle, Asset] = WeakKeyDictionary()
        # Kept, as processes that are started again open the bundle of their version anew.
        self._last: tuple[Sequence[str | None], Asset] | None = None
        self._lock = threading.Lock()

    def of(self, bundle: Bundle) -> Asset:
        """Return what was read of a version; read it if no equal one was. Reading takes up to a second: call it in a thread first."""
        found = self._assets.get(bundle)
        if found is None:
            found = self._equal_asset(bundle)
        if found is None:
            asset = self._read(bundle)
            with self._lock:  # another thread may have read an equal one meanwhile
                found = self._find_equal(bundle) or asset
                self._put(bundle, found)
        return found

    def all(self) -> list[Asset]:
        """Return what was read of the versions that are in use, each once."""
        with self._lock:
            assets = [*self._assets.values(), *([] if self._last is None else [self._last[1]])]
        return list({id(asset): asset for asset in assets}.values())

    def _equal_asset(self, bundle: Bundle) -> Asset | None:
        with self._lock:
            found = self._find_equal(bundle)
            if found is not None:
                self._put(bundle, found)
        return found

    def _find_equal(self, bundle: Bundle) -> Asset | None:
        digests = self._digests(bundle)
        known = [(self._digests(other), asset) for other, asset in self._assets.items()]
        known += [] if self._last is None else [self._last]
        return next((asset for other_digests, asset in known if other_digests == digests), None)

    def _put(self, bundle: Bundle, asset: Asset) -> None:
        self._assets[bundle] = asset
        self._last = self._digests(bundle), asset

    def _digests(self, bundle: Bundle) -> Sequence[str | None]:
        return [bundle.files[name].blake3 if name in bundle.files else None for name in self._names]
