"""The adapters of calls: the keyword that names them, and the input that gives their numbers to the stages."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import InputError
from stagepack.format.reader import Bundle

if TYPE_CHECKING:
    from stagepack.adapter.opened import OpenAdapter


class AdapterCalls:
    """What calls of a bundle, of a version of one, or of one of its stages with `argument_names`, say about adapters.

    Attributes:
        names: the names of the adapters that the bundle is loaded with.
        keyword: the keyword that names the adapter of a call: ``adapter``, with ``_`` behind it if the model has this one itself; None
            without adapters, when the model has all keywords.
        apart: an adapter that replaces whole weights, so that calls of several adapters are not joined; None if there is none.
    """

    def __init__(self, bundle: Bundle, argument_names: Collection[str] | None = None) -> None:
        self._bundle = bundle if isinstance(bundle, AdaptedBundle) else None
        self.names: tuple[str, ...] = () if self._bundle is None else tuple(self._bundle.adapters)
        self.keyword: str | None = None
        adapters = {} if self._bundle is None else self._bundle.adapters
        self.apart = next((name for name, adapter in adapters.items() if adapter.document.replaced), None)
        if self._bundle is not None:
            self.keyword = "adapter"
            if argument_names is None:
                argument_names = [parameter.name for parameter in bundle.entry_point.signature.parameters]
            while self.keyword in argument_names:
                self.keyword += "_"

    @property
    def opened(self) -> "Mapping[str, OpenAdapter]":
        """The adapters by name."""
        return {} if self._bundle is None else self._bundle.adapters

    def take(self, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the adapter that keyword arguments name, and the arguments of the model."""
        if self.keyword is None or self.keyword not in kwargs:
            return None, kwargs
        others = dict(kwargs)
        return others.pop(self.keyword), others

    def add(self, values: dict[str, Any], sizes: Mapping[str, int], adapter: Any) -> None:
        """Add the number of the adapter of each row to the values of a call.

        sizes: those of the symbols that the values determine.
        adapter: a name, None for none, or a list with one for each row.
        """
        if self._bundle is not None:
            values[self._bundle.rows_edge.name] = self._bundle.numbers(adapter, sizes)
        elif adapter is not None and not (isinstance(adapter, list | tuple) and adapter.count(None) == len(adapter)):
            raise InputError(f"adapter: expected none, the model has no adapters, found {adapter!r:.100}")
