"""Loads and unloads bundles while a server runs, without a request that fails.

A new version is loaded beside the old one, and its example is run; then new requests go to it, and the old one finishes what it has begun.
Source of the modes, states and folders: https://github.com/triton-inference-server/server, docs/user_guide/model_management.md and
model_repository.md.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

from stagepack.errors import InputError, StagepackError
from stagepack.named_adapters import NamedAdapter
from stagepack_serving.server.adapter_control import AdapterControl
from stagepack_serving.server.bundle_listings import (
    BundleListing,
    LoggedErrors,
    UnreadableModel,
    check_not_empty,
    source_states,
)
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.event_loop_threads import run_in_thread
from stagepack_serving.server.free_memory import EndedVersions
from stagepack_serving.server.limits import VersionPolicy
from stagepack_serving.server.model_registry import LoadedBundle, ModelRegistry
from stagepack_serving.server.security import file_state
from stagepack_serving.server.served_model import ServedModel
from stagepack_serving.server.watched_deltas import DeltaFolder, WatchedDeltas
from stagepack_serving.server.weight_updates import WeightUpdates

ControlMode = Literal["none", "explicit", "poll"]
_LOGGER: Final = logging.getLogger("stagepack.serve")
_WATCH_SECONDS: Final = 0.2
# A version without requests may still run one that nobody waits for any more.
_CLOSE_SECONDS: Final = 86_400.0
# The longest time that a load waits for an abandoned version to close.
_LOAD_DELAY_SECONDS: Final = 10


class BundleLoader(Protocol):
    """Loads bundles as a server is told to by its operator. It is called in any thread, one call at a time."""

    def __call__(self, model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle | None:
        """Load a bundle, and run its example.

        Args:
            model_name: the name of the model; with several entry points, the first part of the names of the models.
            version: the number of the version.
            path: the path or URL of the bundle.
            unless_digest: the digest of a bundle that is not loaded again; None for any.

        Returns:
            The loaded bundle; None if it has the digest `unless_digest`.

        Raises:
            StagepackError: the bundle cannot be loaded, or its example has other results than those that are recorded.
        """


class ModelControl:
    """The bundles of a server, loaded or not. All methods are called in the thread of its event loop.

    Attributes:
        models: the models of loaded bundles.
        source: the bundles that may be loaded.
        changing: held while a bundle or an adapter is loaded or weights are updated.
        updates: updates the weights of models.
        adapters: loads adapters over models.
    """

    def __init__(
        self,
        models: ModelRegistry,
        source: BundleListing,
        load_bundle: BundleLoader,
        *,
        mode: ControlMode = "none",
        version_policy: VersionPolicy = VersionPolicy(newest_count=1),  # noqa: B008 - frozen
        poll_seconds: float = 15.0,
        trusted_files: Sequence[str] = (),
        update_folder: Path | None = None,
        watched_deltas: WatchedDeltas | None = None,
        adapter_folder: Path | None = None,
        given_adapters: Sequence[NamedAdapter] = (),
    ) -> None:
        self.models = models
        self.source = source
        self._load_bundle = load_bundle
        self._mode = mode
        self._version_policy = version_policy
        self._poll_seconds = poll_seconds
        self._trusted_files = [Path(path) for path in trusted_files]
        self._loaded: dict[str, dict[int, LoadedBundle]] = {}
        # Each with the name of its model.
        self._retiring: dict[LoadedBundle, str] = {}
        # Bundles that are loading, or that were refused or unloaded: their state, and the reason.
        self._states: dict[tuple[str, int], tuple[str, str]] = {}
        self._polled_states: Mapping[str, object] = {}
        self._errors = LoggedErrors(_LOGGER)
        self._closing: set[asyncio.Task[None]] = set()
        self._ended_versions = EndedVersions()
        # One bundle is loaded at a time: two need more memory, and the second would take as much longer.
        self.changing = asyncio.Lock()
        folder = None if update_folder is None else DeltaFolder(update_folder)
        self.updates = WeightUpdates(self, folder, watched_deltas)
        self.adapters = AdapterControl(self, adapter_folder, given_adapters, trusted_files)

    def load_at_start(
        self, model_names: Sequence[str] | None = None, *, on_step: Callable[[str], None] = lambda _: None
    ) -> bool:
        """Load bundles in this thread, before the server listens: the bundles of some models, or all. False if it does not serve."""
        self._polled_states = self._source_states() if self._mode == "poll" else {}
        paths_by_name = self.source()
        if self._mode == "none":
            check_not_empty(paths_by_name)
        for model_name in paths_by_name if model_names is None else model_names:
            if isinstance(paths := paths_by_name.get(model_name), UnreadableModel):
                self._errors.add(model_name, f"{model_name}: {paths.reason}")
                continue
            on_step(model_name)
            for version, path in self._chosen_versions(model_name, paths_by_name).items():
                bundle = self._load_bundle(model_name, version, path, unless_digest=None)
                if bundle is None:
                    return False
                self._check_names(model_name, bundle)
                self._serve(model_name, bundle)
        self._ended_versions.begin()
        if self._mode == "poll":
            asyncio.run(self.adapters.poll())
        return True

    async def load(self, model_name: str) -> None:
        """Load the newest versions of a model, as far as they are not loaded or have changed, and send requests to them; or an adapter.

        What cannot be loaded leaves the loaded versions as they are. The load goes on if its caller is cancelled.
        """
        self.check_changes_allowed()
        is_model = model_name in self._loaded or model_name in await self._listed()
        if not is_model and await self.adapters.load_as_listed(model_name):
            return
        loading = asyncio.ensure_future(self._load(model_name))
        # asyncio reports an error that nobody asks for.
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(loading)
        except RequestError:
            raise
        except StagepackError as error:
            raise BadRequestError(f"{model_name}: not loaded: {error}") from error

    def models_of_bundle(self, model: ServedModel) -> Sequence[ServedModel]:
        """Return the models of the bundle that a model is of."""
        return next(bundle.models for bundle in self._all_bundles() if model in bundle.models)

    async def unload(self, model_name: str) -> None:
        """Send no new requests to a model, or unload an adapter. Requests and sequences that it has begun go on."""
        self.check_changes_allowed()
        if model_name not in self._loaded and self.adapters.is_loaded(model_name):
            await self.adapters.unload(model_name)
            return
        async with self.changing:
            if model_name not in self._loaded:
                raise RequestError(RequestStatus.NOT_FOUND, f"no model {model_name!r} is loaded")
            self._unload(model_name)

    async def index(self, *, ready_only: bool) -> list[dict[str, str]]:
        """Return the entries of the index of models, as Triton's model repository extension defines it."""
        entries, served = [], set()
        for model in self.models.serving:
            # A bundle that was refused under the number of a version that takes requests.
            _, refusal = self._states.get((model.name, int(model.version)), ("", ""))
            reason = "the server is stopping" if self.models.is_stopping else model.unavailable_reason()
            entries.append((model.name, model.version, "UNAVAILABLE" if reason else "READY", reason or refusal))
            served.add((model.name, model.version))
        for bundle in self._retiring:
            for model in bundle.models:
                left = f"{model.admission.pending_requests} requests and {model.sequence_count} sequences are left"
                if (model.name, model.version) not in served:
                    entries.append((model.name, model.version, "UNLOADING", left))
        served |= {(model_name, str(bundle.version)) for bundle, model_name in self._retiring.items()}
        entries += [
            (name, str(version), *state)
            for (name, version), state in self._states.items()
            if (name, str(version)) not in served
        ]
        if self._mode == "explicit":
            known_names = self._loaded.keys() | {name for name, _ in self._states}
            entries += [
                (name, "", "UNAVAILABLE", "not loaded") for name in await self._listed() if name not in known_names
            ]
        entries += await self.adapters.entries(lists_others=self._mode != "none")
        return [
            {"name": name, "version": version, "state": state} | ({"reason": reason} if reason else {})
            for name, version, state, reason in entries
            if state == "READY" or not ready_only
        ]

    async def _listed(self) -> Mapping[str, Mapping[int, str]]:
        """The bundles that may be loaded now."""
        try:
            return await run_in_thread(self.source)
        except InputError as error:
            raise RequestError(RequestStatus.MODEL_FAILED, str(error)) from error

    async def watch(self) -> None:
        """Close the versions that have finished, and poll the source where the mode says so, until the task is cancelled."""
        async with asyncio.TaskGroup() as watching:
            watching.create_task(self._close_finished())
            watching.create_task(self.updates.watch())
            if self._mode == "poll":
                watching.create_task(self._poll_source())

    async def _close_finished(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._close_retired()
            await self._ended_versions.free_memory()

    def _close_retired(self) -> None:
        # A function of its own: the variable of a loop that waits would keep the last bundle, and its weights.
        for bundle in list(self._retiring):
            if all([model.has_finished() for model in bundle.models]):
                del self._retiring[bundle]
                self.models.remove(bundle.models)
                closing = asyncio.create_task(self._end_version(bundle))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _end_version(self, bundle: LoadedBundle) -> None:
        """End the threads and processes of a version that has finished."""
        await run_in_thread(partial(bundle.close, _CLOSE_SECONDS))
        _LOGGER.info("%s: version %d is closed", bundle.models[0].name, bundle.version)
        self._ended_versions.add()

    async def _await_free_memory(self) -> None:
        """Wait until the memory of the versions that have finished is free: a bundle that is loaded before needs memory beside theirs."""
        self._close_retired()
        if self._closing:
            await asyncio.wait(self._closing, timeout=_LOAD_DELAY_SECONDS)
        while self._ended_versions.hold_memory:
            await asyncio.sleep(_WATCH_SECONDS)
            await self._ended_versions.free_memory()

    async def _poll_source(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            # A load goes on when this is cancelled, and has the lock meanwhile.
            await asyncio.shield(self._poll())
            await self.adapters.poll()

    def close(self, seconds: float) -> bool:
        """Finish the queued calls of all models, and end their threads, for which it waits so many seconds, and processes."""
        end_time = time.monotonic() + seconds
        is_closed = all([bundle.close(max(0.0, end_time - time.monotonic())) for bundle in self._all_bundles()])
        return is_closed and not self._closing and not self.changing.locked()

    def end_processes(self) -> None:
        """End the processes of all loaded bundles, also of those that could not be closed."""
        for bundle in self._all_bundles():
            bundle.end_processes()

    def _all_bundles(self) -> list[LoadedBundle]:
        return [bundle for versions in self._loaded.values() for bundle in versions.values()] + list(self._retiring)

    def check_changes_allowed(self) -> None:
        """Check that clients may change the server: its models and its log."""
        if self._mode != "explicit":
            raise RequestError(
                RequestStatus.FORBIDDEN,
                "clients may not change the server, as by loading models: the operator allows it with --model-control explicit",
            )

    async def _load(self, model_name: str) -> None:
        """Load the newest versions of a model; then retire the others, unless one of the newest was refused."""
        async with self.changing:
            paths = self._chosen_versions(model_name, await run_in_thread(self.source))
            await self._await_free_memory()
            for version in [version for name, version in self._states if name == model_name]:
                del self._states[model_name, version]
                self.models.metrics.refused_loads.remove(model_name, str(version))
            errors = []
            for version, path in paths.items():
                try:
                    await self._load_version(model_name, version, path)
                except StagepackError as error:
                    errors.append(error)
            if errors:
                self._ended_versions.add()
                raise errors[0]
            for version in self._loaded[model_name].keys() - paths.keys():
                self._retire(model_name, version)

    async def _load_version(self, model_name: str, version: int, path: str) -> None:
        """Load a version, and send requests to it, unless the same bundle is loaded already."""
        start_time = time.monotonic()
        loaded = self._loaded.get(model_name, {}).get(version)
        digest = None if loaded is None else loaded.digest
        self._states[model_name, version] = ("LOADING", "")
        try:
            with self._ended_versions.loading():
                load = partial(self._load_bundle, model_name, version, path, unless_digest=digest)
                bundle = await run_in_thread(load)
            if bundle is not None:
                self._check_names(model_name, bundle)
        except Exception as error:
            reason = str(error) if isinstance(error, StagepackError) else f"{type(error).__name__}: {error}"
            self._states[model_name, version] = ("UNAVAILABLE", f"refused: {reason}")
            self.models.metrics.refused_loads.labels(model_name, str(version)).set(1)
            _LOGGER.error("%s: version %d was refused: %s", model_name, version, reason)  # noqa: TRY400 - the reason is enough
            if isinstance(error, StagepackError):
                raise
            raise RequestError(RequestStatus.MODEL_FAILED, reason) from error
        del self._states[model_name, version]
        if bundle is not None:
            self._serve(model_name, bundle)
            _LOGGER.info("%s: version %d was loaded in %.1f s", model_name, version, time.monotonic() - start_time)

    def _chosen_versions(self, model_name: str, paths_by_name: Mapping[str, Mapping[int, str]]) -> dict[int, str]:
        """The paths of the versions of a model that should take requests."""
        paths = paths_by_name.get(model_name)
        if not paths:
            hint = "" if paths is None else ": expected a folder for each version, named by a number such as 1"
            hint = f": {paths.reason}" if isinstance(paths, UnreadableModel) else hint
            raise RequestError(RequestStatus.NOT_FOUND, f"{model_name!r}: no bundle of this model was found{hint}")
        versions = self._version_policy.choose(paths)
        if not versions:
            present = ", ".join(map(str, sorted(paths)))
            raise RequestError(
                RequestStatus.NOT_FOUND,
                f"{model_name!r}: has the versions {present}, none of which is served: --version-policy {self._version_policy}",
            )
        return {version: paths[version] for version in versions}

    def _check_names(self, model_name: str, bundle: LoadedBundle) -> None:
        """Check that no other bundle has a model of the same name, and no model an adapter of it."""
        own_models = {model for own in self._loaded.get(model_name, {}).values() for model in own.models}
        other_names = {model.name for model in self.models.serving if model not in own_models}
        adapters = self.models.adapter_names
        for model in bundle.models:
            problem = f"{model.name!r} in two bundles" if model.name in other_names else ""
            if model.name in adapters:
                problem = f"{model.name!r}, which is an adapter of {adapters[model.name]}: unload it first"
            if taken := {*other_names, *(other.name for other in bundle.models)}.intersection(model.adapters.names):
                cure = "pass --adapter NAME=FOLDER, or unload the model first"
                problem = f"{min(taken)!r}, which is a model and an adapter of {model.name}: {cure}"
            if problem:
                bundle.close(_CLOSE_SECONDS)
                raise InputError(f"expected distinct names of models and adapters, found {problem}")

    def _serve(self, model_name: str, bundle: LoadedBundle) -> None:
        """Send requests to a new version."""
        self.models.serve(bundle.models)
        if bundle.version in self._loaded.setdefault(model_name, {}):
            self._retire(model_name, bundle.version)
        self._loaded[model_name][bundle.version] = bundle
        self.models.metrics.refused_loads.labels(model_name, str(bundle.version)).set(0)

    def _retire(self, model_name: str, version: int) -> None:
        bundle = self._loaded[model_name].pop(version)
        self.models.retire(bundle.models)
        self._retiring[bundle] = model_name

    def _unload(self, model_name: str) -> None:
        for version in list(self._loaded[model_name]):
            self._retire(model_name, version)
            self._states[model_name, version] = ("UNAVAILABLE", "unloaded")
        del self._loaded[model_name]
        self._close_retired()
        _LOGGER.info("%s was unloaded", model_name)

    async def _poll(self) -> None:
        """Load and unload what has changed in the source."""
        try:
            states = await run_in_thread(self._source_states)
        except StagepackError as error:
            self._errors.add("", error)
            return
        self._errors.forget("")
        changed_names = [name for name, state in states.items() if self._polled_states.get(name) != state]
        self._polled_states = states
        for model_name in changed_names:
            try:
                await self._load(model_name)
            except StagepackError as error:
                # The log has the error of a refused version already.
                _LOGGER.debug("%s: %s", model_name, error)
        for model_name in self._loaded.keys() - states.keys():
            async with self.changing:
                self._unload(model_name)

    def _source_states(self) -> Mapping[str, object]:
        """For each model a value that changes with its bundles, and with the keys that must have signed them."""
        keys = [file_state(path) for path in self._trusted_files]
        return source_states(self.source(), keys, self._polled_states, self._errors)
