"""Adapters of a bundle by the names that calls choose them by."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stagepack.adapter.opened import OpenAdapter, all_graphs, check_fits
from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack.format.rules import FILE_NAME_PATTERN
from stagepack.opening import TrustedSigners, check_signed, open_adapter
from stagepack.remote.url import BundleUrl, is_url

if TYPE_CHECKING:
    from stagepack.adapter.adapted_bundle import AdaptedBundle

_ADAPTER_TEXT = re.compile(r"(?:(?P<name>[^=/\\]+)=)?(?P<location>.+?)(?:@sha256:(?P<digest>[0-9a-f]{64}))?", re.DOTALL)


def check_adapter_name(name: object, where: str = "") -> None:
    """Refuse what is no name of an adapter.

    where: what it is in, for messages.
    """
    if not isinstance(name, str) or not FILE_NAME_PATTERN.fullmatch(name):
        raise OptionError(
            "adapters: expected a name of letters, digits and '_.-' (1 to 200, not '.-' first, not '.' last) as in NAME=FOLDER, "
            f"found {name!r:.80}{where}"
        )


class NamedAdapter(NamedTuple):
    """Where an adapter is that callers choose by a name.

    Attributes:
        name: the name.
        location: its folder or URL.
        digest: the digest that it must have; None for any.
    """

    name: str
    location: str
    digest: str | None

    @staticmethod
    def parse(text: str) -> "NamedAdapter":
        """Return what ``LOCATION``, ``NAME=LOCATION`` or ``NAME=LOCATION@sha256:DIGEST`` names; a location has its last part as name."""
        match = None if os.path.lexists(text) else _ADAPTER_TEXT.fullmatch(text)
        given, location, digest = (None, text, None) if match is None else match.group("name", "location", "digest")
        name = given or (BundleUrl.parse(location).name if is_url(location) else Path(location).name)
        check_adapter_name(name, f" of {text[:200]!r}")
        return NamedAdapter(name, location, digest)

    def __str__(self) -> str:
        """The text that `parse` takes, which names the same from each folder that is the current one."""
        location = self.location if is_url(self.location) else os.path.abspath(self.location)
        return f"{self.name}={location}" + (f"@sha256:{self.digest}" if self.digest else "")


def named_adapters(given: Iterable[str]) -> list[NamedAdapter]:
    """Return adapters as callers name them, each with a name of its own."""
    adapters = [NamedAdapter.parse(text) for text in given]
    for name, count in Counter(adapter.name for adapter in adapters).items():
        if count > 1:
            raise OptionError(f"adapters: two have the name {name!r}: give them other names as NAME=FOLDER")
    return adapters


def pinned_adapters(
    bundle: Bundle,
    given: Iterable[str] | None,
    require_signature: TrustedSigners | None = None,
    *,
    fitting: bool = False,
) -> list[str] | None:
    """Check that adapters fit a bundle; return them with their digests, so that all processes load the same ones; None for None.

    fitting: leave out adapters of other bundles, which are refused otherwise.
    """
    if given is None:
        return None
    opened = {named: open_adapter(named.location, digest=named.digest) for named in named_adapters(given)}
    pinned = {named: adapter for named, adapter in opened.items() if not fitting or adapter.base == bundle.digest}
    check_adapters(bundle, pinned.values(), require_signature)
    return [str(named._replace(digest=adapter.digest)) for named, adapter in pinned.items()]


def check_adapters(
    bundle: Bundle, adapters: Collection[OpenAdapter], require_signature: TrustedSigners | None = None
) -> None:
    """Check that adapters were made for a bundle, whose graphs apply all their changes, and that they are signed if it is required."""
    # A process has the graphs of its own stages alone, and cannot say that nothing applies a change.
    graphs = all_graphs(bundle) if adapters else []
    for adapter in adapters:
        adapter.check_base(bundle)
        if require_signature is not None:
            check_signed(adapter, require_signature)
        check_fits(graphs, adapter.document, adapter.tensors, adapter.location)


def open_for_bundle(named: NamedAdapter, bundle: Bundle) -> OpenAdapter:
    """Open an adapter for a bundle, and check all that needs none of its tensors, before a weight is read."""
    adapter = open_adapter(named.location, digest=named.digest)
    adapter.check_base(bundle)
    _ = adapter.tensors
    if adapter.source is not None:  # what is damaged in the cache is downloaded again
        adapter.check_digests(adapter.files)
    return adapter


def with_adapters(bundle: Bundle, given: Sequence[str] | None) -> Bundle:
    """Return a bundle with adapters, which are opened and compared with it; None for a bundle that takes none."""
    if given is None:
        return bundle
    from stagepack.adapter.adapted_bundle import AdaptedBundle  # noqa: PLC0415 - numpy, which opening a bundle does not need

    return AdaptedBundle(bundle, {named.name: open_for_bundle(named, bundle) for named in named_adapters(given)})


def adapter_texts(bundle: "AdaptedBundle") -> tuple[str, ...]:
    """Return the adapters of a bundle with their digests, in the order of their numbers, as texts for `NamedAdapter`."""
    return tuple(
        str(NamedAdapter(name, opening_location(adapter), adapter.digest)) for name, adapter in bundle.adapters.items()
    )


def opening_location(adapter: OpenAdapter) -> str:
    """Return the folder or URL that other processes open an adapter by, with the secrets of the URL."""
    url = None if adapter.source is None else adapter.source.url
    return url or adapter.location
