"""Updates the weights of models while a server runs: as clients ask, or as deltas appear in a folder or at a URL."""

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from stagepack.deltas.delta import Delta
from stagepack.errors import OptionError, StageLostError, StagepackError
from stagepack.format.rules import MANIFEST_NAME
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import check_weight_version
from stagepack_serving.server.bundle_listings import LoggedErrors, folder_state
from stagepack_serving.server.delta_chains import DeltaChains
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.event_loop_threads import run_in_thread
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.served_model import ServedModel
from stagepack_serving.server.watched_deltas import NAME, DeltaFolder, Step, WatchedDeltas

_LOGGER: Final = logging.getLogger("stagepack.serve")
# Deltas that were taken, or refused, and are not taken again. A trainer ships each step.
_MOST_SEEN: Final = 4096


class UpdateParameters(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a client asks for: the name of a version in the folder of updates, or to go back to the version before.

    Attributes:
        source: the name.
        rollback: go back to the weights before the last update, which kept them.
        weight_version: a name for the version in answers; by default that of the delta, or the digest of the bundle.
        keep_previous: keep the weights before in memory.
    """

    source: str | None = None
    rollback: bool = False
    weight_version: str | None = None
    keep_previous: bool = False


class UpdateRequest(msgspec.Struct, kw_only=True):
    """The body of a request to update a model."""

    parameters: UpdateParameters = UpdateParameters()


class UpdatedModels(Protocol):
    """The models that weights are updated of.

    Attributes:
        models: the models of loaded bundles.
        changing: held while a bundle is loaded or weights are updated.
    """

    models: ModelRegistry
    changing: asyncio.Lock

    def check_changes_allowed(self) -> None:
        """Check that clients may change the server."""

    def models_of_bundle(self, model: ServedModel) -> Sequence[ServedModel]:
        """Return the models of the bundle that a model is of."""


@dataclass
class WeightUpdates:
    """Updates the models of a server: to deltas, and to bundles with the same graphs.

    Attributes:
        control: the models.
        folder: the versions that clients may choose by their names; None for none.
        watched: deltas that are taken as soon as one is on what a model runs; None for none.
    """

    control: UpdatedModels
    folder: DeltaFolder | None = None
    watched: WatchedDeltas | None = None
    # The state of each delta that was taken, or with which adapters it was refused.
    _seen: dict[tuple[str, str], tuple[object, Sequence[str] | None]] = field(default_factory=dict)
    _chains: DeltaChains = field(default_factory=DeltaChains)
    # What could not be looked for or taken last, by model.
    _errors: LoggedErrors = field(default_factory=lambda: LoggedErrors(_LOGGER))

    async def update(self, model_name: str, parameters: UpdateParameters) -> dict[str, Any]:
        """Update a model as a client asks; return the fields of the answer."""
        self.control.check_changes_allowed()
        if parameters.rollback == (parameters.source is not None):
            raise BadRequestError("parameters: expected either source, the name of a version, or rollback")
        try:
            check_weight_version(parameters.weight_version)
        except OptionError as error:
            raise BadRequestError(f"weight_{error}") from None
        step = None if parameters.source is None else self._find(model_name, parameters.source)
        updating = asyncio.ensure_future(
            self._update(model_name, step, parameters.weight_version, keep_previous=parameters.keep_previous)
        )
        # As a load, it goes on if its caller is cancelled.
        updating.add_done_callback(lambda task: task.cancelled() or task.exception())
        model, report = await asyncio.shield(updating)
        return {
            "model_name": model.name,
            "model_version": model.version,
            "weight_version": report.version,
            "previous": report.previous,
            "seconds": {part: round(seconds, 6) for part, seconds in report.seconds.items()},
        }

    async def watch(self) -> None:
        """Update models as deltas on what they run appear, until the task is cancelled."""
        while self.watched is not None:
            await asyncio.sleep(self.watched.pause_seconds)
            for model in self.control.models.serving:
                try:
                    await self._take_steps(model, self.watched)
                except StagepackError as error:
                    self._log_error(model, self.watched, error)
            # Calls under way on a version before keep its deltas.
            await self._free_disk()

    async def _take_steps(self, model: ServedModel, watched: WatchedDeltas) -> None:
        """Update a model by the deltas on what it runs, one after the other."""
        while (step := await run_in_thread(partial(self._next_step, model, watched))) is not None:
            if isinstance(step.source, Delta):
                self._chains.add(step.source)
            try:
                await asyncio.shield(self._update(model.name, step, None, keep_previous=False))
            except StagepackError as error:
                self._log_error(model, watched, error)
                if isinstance(error, RequestError) and error.status is RequestStatus.STAGE_LOST:
                    return  # its processes are started again
                # A model with other adapters may take it.
                self._seen[model.name, step.name] = step.state, model.adapters.names
            else:
                self._errors.forget(model.name)
            del step  # it keeps a delta in the cache
            await asyncio.shield(self._shorten_chain(model))

    def _next_step(self, model: ServedModel, watched: WatchedDeltas) -> Step | None:
        """The first delta on what a model runs that was not taken yet, when its files are here."""
        for step in watched.steps(model.name, model.bundle.digest):
            if self._seen.get((model.name, step.name)) not in ((step.state, None), (step.state, model.adapters.names)):
                watched.fetch(step, model.bundle)
                return step
        return None

    def _log_error(self, model: ServedModel, watched: WatchedDeltas, error: StagepackError) -> None:
        self._errors.add(model.name, f"{watched.location}: {error}")

    async def _shorten_chain(self, model: ServedModel) -> None:
        """Let a model run the bundle that a long chain of deltas makes, and free what is needed no more."""
        async with self.control.changing:
            if self._chains.is_long(model.bundle.stored):
                try:
                    stored = await run_in_thread(partial(self._chains.store, model.bundle.stored))
                    # The bundle that runs, under its name: nothing is read.
                    await run_in_thread(partial(model.pipeline.update, stored, version=model.pipeline.version))
                    del stored
                except StagepackError as error:
                    self._chains.postpone(model.bundle.stored)
                    _LOGGER.warning("%s: the chain of its deltas is not written as a bundle: %s", model.name, error)

    async def _free_disk(self) -> None:
        if self._chains.has_unneeded(running := [model.bundle.stored for model in self.control.models]):
            await run_in_thread(partial(self._chains.free, running))

    async def _update(
        self, model_name: str, step: Step | None, version: str | None, *, keep_previous: bool
    ) -> tuple[ServedModel, UpdateReport]:
        async with self.control.changing:
            model = self.control.models.find(model_name, "")
            together = self.control.models_of_bundle(model)
            source = None if step is None else step.source
            try:
                report = await run_in_thread(partial(_update, model, source, version, keep_previous=keep_previous))
            except StageLostError as error:
                raise RequestError(RequestStatus.STAGE_LOST, f"{model_name}: not updated: {error}") from error
            except StagepackError as error:
                raise BadRequestError(f"{model_name}: not updated: {error}") from error
            if step is not None:
                # The watch takes it once, whoever has asked for it: a client may go back to the version before.
                self._seen |= {(each.name, step.name): (step.state, None) for each in together}
                for key in list(self._seen)[:-_MOST_SEEN]:
                    del self._seen[key]
            for part in chain.from_iterable(each.parts.values() for each in together):
                part.follow_weights()
        seconds = {part: round(part_seconds, 3) for part, part_seconds in report.seconds.items()}
        where = "" if step is None else f", from {step.name}"
        names = (model_name, report.version, report.previous)
        _LOGGER.info("%s: the weights %r take the place of %r%s: %s", *names, where, seconds)
        return model, report

    def _find(self, model_name: str, source: str) -> Step:
        """The version of a name."""
        self.control.models.find(model_name, "")
        if self.folder is None:
            raise RequestError(
                RequestStatus.FORBIDDEN, "this server takes no updates: the operator allows them with --update-folder"
            )
        folder = self.folder.of_model(model_name)
        if not NAME.fullmatch(source) or not os.path.isfile(folder / source / MANIFEST_NAME):
            raise RequestError(
                RequestStatus.NOT_FOUND,
                f"{model_name}: no version {source[:80]!r} is in the folder of updates: give the name of a bundle or delta there",
            )
        return Step(folder / source, str(folder / source), folder_state(str(folder / source)))


def _update(
    model: ServedModel, source: Path | Delta | None, version: str | None, *, keep_previous: bool
) -> UpdateReport:
    """Update the weights of a model, or go back to those before."""
    if source is None:
        report = model.pipeline.rollback(keep_previous=keep_previous)
    else:
        report = model.pipeline.update(source, version=version, keep_previous=keep_previous)
    model.metrics.record_update(model.name, model.version, report.seconds)
    return report
