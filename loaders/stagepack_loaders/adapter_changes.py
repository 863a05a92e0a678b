"""How the adapters of a running pipeline change: it takes one more, or lets one go."""

from collections.abc import Iterable
from dataclasses import dataclass

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.adapter.opened import OpenAdapter
from stagepack.errors import AdapterError, named_errors
from stagepack.format.reader import Bundle
from stagepack.named_adapters import NamedAdapter, check_adapter_name, check_adapters, named_adapters, open_for_bundle
from stagepack.opening import AdapterSource, TrustedSigners, check_signed
from stagepack_loaders.options import adapter_text


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """One adapter that a pipeline takes, or lets go.

    Attributes:
        name: its name in calls.
        adapter: the adapter; None to let it go.
        replaces: it may take the place of another one of its name.
    """

    name: str
    adapter: OpenAdapter | None = None
    replaces: bool = False

    def apply(self, running: Bundle) -> AdaptedBundle:
        """Return the bundle that runs with the adapters after the change."""
        if not isinstance(running, AdaptedBundle):
            raise AdapterError(
                f"{running.location}: expected a pipeline that takes adapters: load it with those that it begins with, or with adapters=[]"
            )
        adapters = dict(running.adapters)
        if self.adapter is None:
            if self.name not in adapters:
                known = ", ".join(adapters) or "(none are loaded)"
                raise AdapterError(f"{running.location}: adapters: expected one of {known}, found {self.name!r:.80}")
            del adapters[self.name]
            return running.with_others(adapters)
        if self.name in adapters and not self.replaces:
            raise AdapterError(
                f"{running.location}: an adapter {self.name!r} is loaded already: give the new one another name, or replace it "
                "(replace=True)"
            )
        check_adapters(running.stored, [self.adapter])
        return running.with_others(adapters | {self.name: self.adapter})


def new_adapter(
    running: Bundle,
    adapter: AdapterSource,
    name: str | None,
    *,
    replaces: bool,
    require_signature: TrustedSigners | None = None,
) -> AdapterChange:
    """Open an adapter for the bundle that runs, which a caller names as ``FOLDER`` or ``NAME=FOLDER``, or with a name beside it.

    require_signature: who must have signed it; None for no check.
    """
    named = NamedAdapter.parse(adapter_text(adapter))
    if name is not None:
        check_adapter_name(name)
        named = named._replace(name=name)
    with named_errors(named.location):
        opened = open_for_bundle(named, running)
    if require_signature is not None:
        check_signed(opened, require_signature)
    return AdapterChange(name=named.name, adapter=opened, replaces=replaces)


def with_listed_adapters(running: Bundle, listed: Iterable[str]) -> AdaptedBundle:
    """Return the bundle that runs with other adapters; those that it has already are not opened again.

    listed: see `stagepack.named_adapters.adapter_texts`.
    """
    assert isinstance(running, AdaptedBundle)  # as in the process that lists them
    adapters = {}
    for named in named_adapters(listed):
        adapter = running.adapters.get(named.name)
        if adapter is None or adapter.digest != named.digest:
            adapter = open_for_bundle(named, running)
        adapters[named.name] = adapter
    return running.with_others(adapters)
