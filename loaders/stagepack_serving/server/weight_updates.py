"""Updates the weights of models while a server runs: as clients ask, or as versions appear in a folder."""

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from stagepack.errors import OptionError, StageLostError, StagepackError
from stagepack.format import limits
from stagepack.format.file_checks import open_regular_file
from stagepack.format.rules import MANIFEST_NAME
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import check_weight_version
from stagepack_serving.server.bundle_listings import folder_state
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.event_loop_threads import run_in_thread
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.served_model import ServedModel

_LOGGER: Final = logging.getLogger("stagepack.serve")
_WATCH_SECONDS: Final = 0.5
# Clients choose among the names of a folder, and never a path.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


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


class _Step(msgspec.Struct):
    """What the document of a delta says of its place in a chain."""

    base: str = ""


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
    """The folder of the versions that the models of a server may be updated to: deltas, and bundles with the same graphs.

    A model has the versions of the folder, or, if this has a folder of its name, those in that one.

    Attributes:
        control: the models.
        folder: the folder; None for a server without updates.
        watches: update models as soon as a delta on what they run is in the folder.
    """

    control: UpdatedModels
    folder: Path | None = None
    watches: bool = False
    _seen: dict[tuple[str, Path], object] = field(default_factory=dict)
    # The base of each entry of the folder of a model by name, with the state of the file that says it.
    _bases: dict[str, dict[str, tuple[object, str]]] = field(default_factory=dict)

    async def update(self, model_name: str, parameters: UpdateParameters) -> dict[str, Any]:
        """Update a model as a client asks; return the fields of the answer."""
        self.control.check_changes_allowed()
        if parameters.rollback == (parameters.source is not None):
            raise BadRequestError("parameters: expected either source, the name of a version, or rollback")
        try:
            check_weight_version(parameters.weight_version)
        except OptionError as error:
            raise BadRequestError(f"weight_{error}") from None
        path = None if parameters.source is None else self._find(model_name, parameters.source)
        updating = asyncio.ensure_future(
            self._update(model_name, path, parameters.weight_version, keep_previous=parameters.keep_previous)
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
        """Update models as deltas on what they run appear in the folder, until the task is cancelled."""
        while self.watches:
            await asyncio.sleep(_WATCH_SECONDS)
            for model in self.control.models.serving:
                await self._take_steps(model)

    async def _take_steps(self, model: ServedModel) -> None:
        """Update a model by the deltas on what it runs, one after the other."""
        while (path := await run_in_thread(partial(self._next_step, model))) is not None:
            state = folder_state(str(path))
            try:
                await asyncio.shield(self._update(model.name, path, None, keep_previous=False))
            except StagepackError as error:
                _LOGGER.error("%s", error)  # noqa: TRY400 - the reason is enough
                if isinstance(error, RequestError) and error.status is RequestStatus.STAGE_LOST:
                    return  # its processes are started again
                self._seen[model.name, path] = state

    async def _update(
        self, model_name: str, path: Path | None, version: str | None, *, keep_previous: bool
    ) -> tuple[ServedModel, UpdateReport]:
        async with self.control.changing:
            model = self.control.models.find(model_name, "")
            together = self.control.models_of_bundle(model)
            state = None if path is None else folder_state(str(path))
            # A trainer ships each step, and the operator removes old ones.
            self._seen = {key: seen for key, seen in self._seen.items() if key[1].exists()}
            try:
                report = await run_in_thread(partial(_update, model, path, version, keep_previous=keep_previous))
            except StageLostError as error:
                raise RequestError(RequestStatus.STAGE_LOST, f"{model_name}: not updated: {error}") from error
            except StagepackError as error:
                raise BadRequestError(f"{model_name}: not updated: {error}") from error
            if path is not None:
                # The watch takes it once, whoever has asked for it: a client may go back to the version before.
                self._seen |= {(each.name, path): state for each in together}
            for part in chain.from_iterable(each.parts.values() for each in together):
                part.follow_weights()
        seconds = {part: round(part_seconds, 3) for part, part_seconds in report.seconds.items()}
        _LOGGER.info(
            "%s: the weights %r take the place of %r: %s", model_name, report.version, report.previous, seconds
        )
        return model, report

    def _folder_of(self, model_name: str) -> Path:
        if self.folder is None:
            raise RequestError(
                RequestStatus.FORBIDDEN, "this server takes no updates: the operator allows them with --update-folder"
            )
        own = self.folder / model_name
        return own if own.is_dir() and not (own / MANIFEST_NAME).exists() else self.folder

    def _find(self, model_name: str, source: str) -> Path:
        """The path of a version by its name."""
        self.control.models.find(model_name, "")
        folder = self._folder_of(model_name)
        if not _NAME.fullmatch(source) or not (folder / source / MANIFEST_NAME).is_file():
            raise RequestError(
                RequestStatus.NOT_FOUND, f"{model_name}: no version {source[:80]!r} is in the folder of updates"
            )
        return folder / source

    def _next_step(self, model: ServedModel) -> Path | None:
        """The delta on what a model runs; the first by name of several."""
        digest, folder = model.bundle.digest, self._folder_of(model.name)
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            _LOGGER.warning("%s: the folder of updates cannot be read: %s", folder, error.strerror)
            return None
        known, bases = self._bases.get(model.name, {}), {}
        for name in filter(_NAME.fullmatch, names):
            state = _manifest_state(folder / name)
            if name in known and known[name][0] == state:
                bases[name] = known[name]
            else:
                bases[name] = state, _read_step(folder / name).base
        self._bases[model.name] = bases
        for path in (folder / name for name, (_, base) in bases.items() if base == digest):
            if self._seen.get((model.name, path)) != folder_state(str(path)):
                return path
        return None


def _update(model: ServedModel, path: Path | None, version: str | None, *, keep_previous: bool) -> UpdateReport:
    """Update the weights of a model, or go back to those before."""
    if path is None:
        report = model.pipeline.rollback(keep_previous=keep_previous)
    else:
        report = model.pipeline.update(path, version=version, keep_previous=keep_previous)
    model.metrics.record_update(model.name, model.version, report.seconds)
    return report


def _manifest_state(path: Path) -> object:
    """A value that changes when the manifest in a folder changes; None if there is none."""
    try:
        status = os.stat(path / MANIFEST_NAME)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_step(path: Path) -> _Step:
    """The place of a delta in a chain; of anything else, none."""
    try:
        with open_regular_file(path / MANIFEST_NAME) as file:
            return msgspec.json.decode(file.read(limits.MANIFEST_BYTES), type=_Step)
    except (OSError, ValueError):
        return _Step()
