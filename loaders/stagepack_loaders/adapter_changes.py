"""How the adapters of a running pipeline change: it takes one more, or lets one go."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.adapter.folders import adapter_folders, check_adapter_name
from stagepack.errors import AdapterError, OptionError
from stagepack.format.reader import Bundle
from stagepack.format.rules import rule_error

if TYPE_CHECKING:
    from stagepack.adapter.opened import OpenAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """One adapter that a pipeline takes, or lets go.

    Attributes:
        name: its name in calls.
        adapter: the adapter; None to let it go.
        replaces: it may take the place of another one of its name.
    """

    name: str
    adapter: "OpenAdapter | None" = None
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
        self.adapter.check_base(running)
        return running.with_others(adapters | {self.name: self.adapter})


def new_adapter(adapter: str | os.PathLike[str], name: str | None, *, replaces: bool) -> AdapterChange:
    """Open an adapter that a caller names as ``FOLDER`` or ``NAME=FOLDER``, or with a name beside it."""
    if not isinstance(adapter, str | os.PathLike):
        raise OptionError(f"adapter: expected the folder of an adapter, found {type(adapter).__name__}")
    if name is None:
        [(name, folder)] = adapter_folders([os.fspath(adapter)]).items()
        return AdapterChange(name=name, adapter=_open(folder), replaces=replaces)
    check_adapter_name(name)
    return AdapterChange(name=name, adapter=_open(adapter), replaces=replaces)


def _open(folder: str | os.PathLike[str]) -> "OpenAdapter":
    from stagepack.adapter.opened import open_adapter  # noqa: PLC0415 - 9 ms, which pipelines without adapters do not need

    return open_adapter(folder)


class ListedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter of a version, as processes are told of it: its name, its folder, and the digest of its document."""

    name: str
    folder: str
    digest: str


def listed_adapters(bundle: AdaptedBundle) -> tuple[ListedAdapter, ...]:
    """Return the adapters of a bundle in the order of their numbers."""
    return tuple(
        ListedAdapter(name=name, folder=str(adapter.path.absolute()), digest=adapter.document.sha256)
        for name, adapter in bundle.adapters.items()
    )


def with_listed_adapters(running: Bundle, listed: Sequence[ListedAdapter]) -> AdaptedBundle:
    """Return the bundle that runs with other adapters; those that it has already are not opened again."""
    assert isinstance(running, AdaptedBundle)  # as in the process that lists them
    adapters = {}
    for entry in listed:
        adapter = running.adapters.get(entry.name)
        if adapter is None or adapter.document.sha256 != entry.digest:
            adapter = _open(entry.folder)
            if adapter.document.sha256 != entry.digest:
                found = f"expected the adapter {entry.digest}, found {adapter.document.sha256}"
                raise rule_error("D3", str(adapter.path), found)
            adapter.check_base(running)
        adapters[entry.name] = adapter
    return running.with_others(adapters)
