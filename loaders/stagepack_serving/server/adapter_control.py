"""Loads and unloads adapters of models while a server runs: as clients ask by names, or as they appear in a folder."""

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from stagepack.adapter.opened import OpenAdapter
from stagepack.errors import AdapterError, OptionError, StageLostError, StagepackError, named_errors
from stagepack.format.rules import MANIFEST_NAME
from stagepack.named_adapters import NamedAdapter, check_adapter_name
from stagepack.opening import check_signed, open_adapter
from stagepack.remote.url import is_url
from stagepack_loaders.adapter_changes import AdapterChange
from stagepack_loaders.update_report import UpdateReport
from stagepack_serving.server.bundle_listings import BundleListing, LoggedErrors, folder_state
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.event_loop_threads import run_in_thread
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.served_model import ServedModel

_LOGGER: Final = logging.getLogger("stagepack.serve")


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    """The body of a request to load an adapter, as vLLM has it: a name, and an adapter of the folder by its name or its path.

    Attributes:
        load_inplace: let it take the place of an adapter of its name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    """The body of a request to unload an adapter, as vLLM has it."""

    lora_name: str


class AdaptedModels(Protocol):
    """The models that adapters are loaded over.

    Attributes:
        models: the models of loaded bundles.
        changing: held while a bundle or an adapter is loaded.
        source: the bundles that may be loaded.
    """

    models: ModelRegistry
    changing: asyncio.Lock
    source: BundleListing

    def check_changes_allowed(self) -> None:
        """Check that clients may change the server."""


@dataclass
class AdapterControl:
    """The adapters that the operator allows: those of the command line, and those in a folder. Clients choose among their names.

    Attributes:
        control: the models.
        folder: the folder; None for none.
        given: the adapters of the command line.
        trusted_files: the files of keys of those who must have signed them; empty for no check.
    """

    control: AdaptedModels
    folder: Path | None = None
    given: Sequence[NamedAdapter] = ()
    trusted_files: Sequence[str] = ()
    # Why adapters of the folder were refused, and with which files and bundles polling has tried each.
    _refusals: dict[str, str] = field(default_factory=dict)
    _tried: dict[str, object] = field(default_factory=dict)
    # Why the folder, or one in it, could not be read last.
    _errors: LoggedErrors = field(default_factory=lambda: LoggedErrors(_LOGGER))

    def listed(self) -> dict[str, NamedAdapter]:
        """Return the adapters that are there now, by name."""
        found: list[NamedAdapter] = []
        if self.folder is not None:
            try:
                names = sorted(filter(_is_name, os.listdir(self.folder)))
            except OSError as error:
                reason = f"{self.folder}: the folder of adapters cannot be read: {error.strerror}"
                raise RequestError(RequestStatus.MODEL_FAILED, reason) from None
            found = [NamedAdapter(name, str(self.folder / name), None) for name in names]
        return {named.name: named for named in (*found, *self.given) if is_url(named.location) or self._is_there(named)}

    def _is_there(self, named: NamedAdapter) -> bool:
        """Whether the folder of an adapter has a document. One that cannot be read is logged."""
        try:
            is_there = stat.S_ISREG(os.stat(os.path.join(named.location, MANIFEST_NAME)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError as error:
            self._errors.add(named.name, f"{named.location}: the adapter cannot be read: {error.strerror}")
            return False
        self._errors.forget(named.name)
        return is_there

    async def load_as_listed(self, name: str) -> bool:
        """Load an adapter by its name, or again if it has changed; return whether there is one of this name."""
        named = (await run_in_thread(self.listed)).get(name)
        if named is not None:
            await self._load_listed(named)
        return named is not None

    async def load(self, request: LoadLoraRequest) -> None:
        """Load an adapter as a client of vLLM asks."""
        self.control.check_changes_allowed()
        listed = await run_in_thread(self.listed)
        # Compared as text: no client makes the server look for a path.
        wanted = os.path.abspath(request.lora_path)
        named = listed.get(request.lora_path) or next(
            (named for named in listed.values() if os.path.abspath(named.location) == wanted), None
        )
        if named is None:
            raise RequestError(
                RequestStatus.NOT_FOUND,
                f"lora_path: no adapter {request.lora_path[:80]!r} is in the folder of adapters (--adapter-folder): give its name there",
            )
        await self._change(request.lora_name, named, replaces=request.load_inplace)

    async def unload(self, name: str) -> None:
        """Unload an adapter. Requests and texts that it has begun go on."""
        self.control.check_changes_allowed()
        await self._change(name, None, replaces=False)

    def is_loaded(self, name: str) -> bool:
        """Return whether a model has an adapter of this name."""
        return name in self.control.models.adapter_names

    async def entries(self, *, lists_others: bool) -> list[tuple[str, str, str, str]]:
        """Return the name, version, state and reason of each adapter for the index.

        lists_others: also those that are not loaded.
        """
        models_of: dict[tuple[str, str], list[str]] = {}
        for model in self.control.models.serving:
            for name in model.adapters.names:
                models_of.setdefault((name, model.version), []).append(model.name)
        loaded = [(*key, "READY", f"adapter of {', '.join(sorted(names))}") for key, names in models_of.items()]
        names = {name for name, _, _, _ in loaded} | {model.name for model in self.control.models.serving}
        others: Iterable[str] = self._refusals
        if lists_others:
            with contextlib.suppress(RequestError):  # the folder cannot be read now
                others = await run_in_thread(self.listed)
        return loaded + [
            (name, "", "UNAVAILABLE", self._refusals.get(name, "adapter: not loaded"))
            for name in others
            if name not in names
        ]

    async def poll(self) -> None:
        """Load and unload what has changed in the folder, or what other bundles are there for."""
        if self.folder is None:
            return
        try:
            listed = await run_in_thread(self.listed)
        except StagepackError as error:
            self._errors.add("", error)
            return
        self._errors.forget("")
        digests = sorted({model.bundle.digest for model in self.control.models.serving})
        states: dict[str, object] = {
            name: (await run_in_thread(partial(folder_state, named.location)), digests)
            for name, named in listed.items()
        }
        gone = [name for name in self._tried if name not in listed and name not in self._errors]
        for name in (*gone, *(name for name, state in states.items() if self._tried.get(name) != state)):
            try:
                if name in listed:
                    await self._load_listed(listed[name])
                elif self.is_loaded(name):
                    await self._change(name, None, replaces=False)
            except StagepackError as error:
                _LOGGER.error("%s", error)  # noqa: TRY400 - the reason is enough
                if isinstance(error, RequestError) and error.status is RequestStatus.STAGE_LOST:
                    states[name] = None  # its processes are started again: it is tried again
        self._tried = states
        self._refusals = {name: reason for name, reason in self._refusals.items() if name in listed}

    async def _load_listed(self, named: NamedAdapter) -> None:
        """Load an adapter by its name, and keep for the index why it is refused."""
        try:
            await self._change(named.name, named, replaces=True)
        except StagepackError as error:
            self._refusals[named.name] = f"refused: {error}"
            raise
        self._refusals.pop(named.name, None)

    async def _change(self, name: str, named: NamedAdapter | None, *, replaces: bool) -> None:
        """Load an adapter over the models that it was made for, or unload it. It goes on if its caller is cancelled."""
        changing = asyncio.ensure_future(self._change_all(name, named, replaces=replaces))
        changing.add_done_callback(lambda task: task.cancelled() or task.exception())
        action = "unloaded" if named is None else "loaded"
        try:
            await asyncio.shield(changing)
        except RequestError:
            raise
        except StagepackError as error:
            status = RequestStatus.STAGE_LOST if isinstance(error, StageLostError) else RequestStatus.BAD_REQUEST
            raise RequestError(status, f"{name:.100}: not {action}: {error}") from error

    async def _change_all(self, name: str, named: NamedAdapter | None, *, replaces: bool) -> None:
        async with self.control.changing:
            if named is None:
                adapter = None
                targets = [model for model in self.control.models.serving if name in model.adapters.names]
                if not targets:
                    raise RequestError(RequestStatus.NOT_FOUND, f"no model and no adapter {name!r:.100} is loaded")
            else:
                adapter = await run_in_thread(partial(self._open, named))
                paths_by_name = await run_in_thread(self.control.source)
                targets = self._targets(name, named, adapter, paths_by_name, replaces=replaces)
            change = AdapterChange(name=name, adapter=adapter, replaces=True)
            with named_errors(name if adapter is None else adapter.location):
                await run_in_thread(partial(_apply, change, targets))
            for model in targets:
                for part in model.parts.values():
                    part.follow_weights()
        for model in targets:
            _LOGGER.info("%s: the adapter %s was %s", model.name, name, "unloaded" if named is None else "loaded")

    def _open(self, named: NamedAdapter) -> OpenAdapter:
        """Open an adapter, and check that it is signed by those that the operator trusts."""
        adapter = open_adapter(named.location, digest=named.digest)
        if self.trusted_files:
            check_signed(adapter, self.trusted_files)
        return adapter

    def _targets(
        self, name: str, named: NamedAdapter, adapter: OpenAdapter, models_by_name: Mapping[str, Any], *, replaces: bool
    ) -> list[ServedModel]:
        """The models that an adapter is to be loaded over, which have another one of its name or none; refuse a name that is taken."""
        check_adapter_name(name)
        serving = self.control.models.serving
        if name in models_by_name or any(model.name == name for model in serving):
            raise AdapterError(
                "a model has this name, and clients name both in one field: give the adapter another name"
            )
        if any(given.name == name and given.location != named.location for given in self.given):
            raise AdapterError("an adapter of the command line has this name: give this one another name")
        fitting = [model for model in serving if model.bundle.digest == adapter.document.base]
        holders = [model for model in serving if name in model.adapters.names]
        if holders and (not replaces or any(model not in fitting for model in holders)):
            raise AdapterError(
                f"{holders[0].name} has an adapter of this name already: unload it, replace it (load_inplace), or choose another name"
            )
        if not fitting:
            raise AdapterError(
                f"was made for the bundle {adapter.document.base[:12]}, which is not loaded: load its model, or make it for "
                "one that is (stagepack adapter)"
            )
        for model in fitting:
            for part in model.parts.values():
                part.check_new_adapter(adapter)
        loaded = [(model, model.adapters.opened.get(name)) for model in fitting]
        return [model for model, other in loaded if other is None or other.digest != adapter.digest]


def _is_name(name: str) -> bool:
    try:
        check_adapter_name(name)
    except OptionError:
        return False
    return True


def _apply(change: AdapterChange, models: Sequence[ServedModel]) -> None:
    """Change an adapter of some models; if one of them fails, none has changed."""
    changed: list[tuple[ServedModel, OpenAdapter | None]] = []
    try:
        # The entry points of a bundle change together.
        for model in {id(model.pipeline.executor.updated.joint): model for model in models}.values():
            former = model.adapters.opened.get(change.name)
            model.pipeline.executor.update(change, UpdateReport())
            changed.append((model, former))
    except BaseException:
        for model, former in reversed(changed):
            back = AdapterChange(name=change.name, adapter=former, replaces=True)
            with contextlib.suppress(StagepackError):  # the first error says what has failed
                model.pipeline.executor.update(back, UpdateReport())
        raise
