"""The versions of a pipeline over processes, as the process knows them that is called.

All processes load a version before one request runs on it. The message of each request has the number of its version, so that all stages
switch between the same two requests. The processes keep a version until nothing here refers to it: no request, no sequence, no caller.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping

from msgspec import structs

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import StagepackError
from stagepack.format.reader import Bundle
from stagepack.named_adapters import adapter_texts
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.membership import VersionPlace
from stagepack_loaders.distributed.staging import VersionDescription
from stagepack_loaders.distributed.status import VersionStaged, attribute_error, rebuild_error
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import StageVersion


class GroupVersions:
    """The numbers of the versions in the processes of a group, and in those that are started in its place."""

    def __init__(self) -> None:
        self._groups = itertools.count(1)
        self._group = 0
        self._numbers = itertools.count(1)
        # Groups and numbers of versions that nothing refers to any more.
        self._ended: deque[tuple[int, int]] = deque()

    def begin_group(self, name: str, bundle: Bundle) -> StageVersion:
        """Begin with processes that have loaded one version, in the stages that they run, and no other one."""
        self._numbers, self._group = itertools.count(), next(self._groups)
        version, _ = self._new_version(name, bundle, self._group)
        return version

    def _new_version(
        self, name: str, bundle: Bundle, group: int
    ) -> "tuple[StageVersion, weakref.finalize[..., StageVersion]]":
        """A version that the processes have, or are to load; what they have loaded is freed with it."""
        version = StageVersion(name=name, bundle=bundle, number=next(self._numbers), group=group)
        end = weakref.finalize(version, self._ended.append, (version.group, version.number))
        end.atexit = False
        return version, end

    def stage_weights(
        self,
        front: FrontProcess,
        running: StageVersion,
        bundle: Bundle,
        name: str,
        place: VersionPlace,
        report: UpdateReport,
    ) -> StageVersion:
        """Have all processes load a version with other weights beside the one that runs.

        bundle: its bundle, in the stages that run.
        place: where the processes find it.
        """
        description = VersionDescription(
            number=0,
            base=running.number,
            name=name,
            location=place.bundle,
            digest=bundle.stored_digest,
            result=bundle.digest,
            deltas=place.deltas,
            delta_digests=() if bundle.patches is None else tuple(bundle.patches.open_deltas),
        )
        return self._stage(front, running, description, bundle, report)

    def stage_adapters(
        self, front: FrontProcess, running: StageVersion, bundle: AdaptedBundle, report: UpdateReport
    ) -> StageVersion:
        """Have all processes load a version with the adapters of a bundle, and the weights of the one that runs."""
        description = VersionDescription(
            number=0, base=running.number, name=running.name, adapters=adapter_texts(bundle)
        )
        return self._stage(front, running, description, bundle, report)

    def _stage(
        self,
        front: FrontProcess,
        running: StageVersion,
        description: VersionDescription,
        bundle: Bundle,
        report: UpdateReport,
    ) -> StageVersion:
        """Have all processes load a version, which gets its number here."""
        version, end = self._new_version(description.name, bundle, running.group)
        description = structs.replace(description, number=version.number)
        try:
            reports = front.staging.stage(description)
            _raise_error(front, reports)
        except BaseException:
            end()
            raise
        for part in ("fetch", "verify", "stage"):
            seconds = max(getattr(staged, part) for staged in reports.values())
            setattr(report, part, getattr(report, part) + seconds)
        return version

    def end_unused(self, end: Callable[[int], object]) -> None:
        """Call a function with the number of each version of the running processes that nothing refers to any more."""
        while self._ended:
            try:
                group, number = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            if group == self._group:
                end(number)


def _raise_error(front: FrontProcess, reports: Mapping[int, VersionStaged]) -> None:
    """Raise the error of the first process that could not load its stages, with the name of the process."""
    for rank, report in sorted(reports.items()):
        if report.error is not None:
            error = rebuild_error(report.error)
            if isinstance(error, StagepackError):
                attribute_error(error, front.process_names[rank])
            raise error
