"""Versions of stages that change together: of one pipeline, or of all entry points of a bundle."""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress

from stagepack_loaders.adapter_changes import AdapterChange
from stagepack_loaders.base import SharedObjects
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import StageVersion, UpdateSource


class JointStages(ABC):
    """The stages of one pipeline, whose versions change together with those of others.

    Attributes:
        joint: the versions of all of them.
        checks: called with each version that is loaded, before any takes over; an error refuses it.
    """

    joint: "JointVersions"
    checks: list[Callable[[StageVersion], None]]

    def begin(self, version: StageVersion) -> None:
        """Begin with a version, alone."""
        self.checks = []
        JointVersions().add(self, version)

    @property
    def newest(self) -> StageVersion:
        """The version that calls and sequences to come run on."""
        return self.joint.newest[id(self)]

    @newest.setter
    def newest(self, version: StageVersion) -> None:
        self.joint.put({id(self): version})

    @property
    def kept(self) -> StageVersion | None:
        """The version before, if it is kept in memory."""
        return self.joint.kept.get(id(self))

    @kept.setter
    def kept(self, version: StageVersion | None) -> None:
        others = {key: other for key, other in self.joint.kept.items() if key != id(self)}
        self.joint.kept = others if version is None else {**others, id(self): version}

    def newest_with(self, other: "JointStages") -> tuple[StageVersion, StageVersion]:
        """Return the newest version, and that of other stages: of one version, if they change together."""
        if self.joint is not other.joint:
            return self.newest, other.newest
        newest = self.joint.newest
        return newest[id(self)], newest[id(other)]

    @property
    def pauses(self) -> bool:
        """Whether a call may wait while a version takes over."""
        return False

    @abstractmethod
    def stage(self, source: UpdateSource | AdapterChange, report: UpdateReport, shared: SharedObjects) -> StageVersion:
        """Load the stages of a version beside those of the newest one; see `Executor.update`.

        shared: what stages share that are loaded together.
        """

    @abstractmethod
    def take_over(self, version: StageVersion) -> None:
        """Pass on to a version what the one before holds. It is called with that one again if others cannot take over."""

    def switching(self) -> AbstractContextManager[object]:
        """Return a context in which the version that runs is changed by nothing else. Default: nothing else changes it."""
        return nullcontext()


class JointVersions:
    """The newest versions of stages that change together: calls that come one after the other find all of the same version.

    Attributes:
        newest: the newest version by the identity of the stages. An update replaces the mapping as a whole.
        kept: the versions before, if they are kept in memory.
    """

    def __init__(self) -> None:
        self.newest: Mapping[int, StageVersion] = {}
        self.kept: Mapping[int, StageVersion] = {}
        self._members: list[weakref.ref[JointStages]] = []
        self._updating = threading.Lock()
        # Held while `newest` is replaced: processes that are started again replace their version, too.
        self._assigning = threading.RLock()

    def add(self, stages: JointStages, version: StageVersion) -> None:
        """Add stages, before any is updated."""
        self._members.append(weakref.ref(stages))
        stages.joint = self
        self.put({id(stages): version})
        weakref.finalize(stages, self.forget, id(stages)).atexit = False

    def put(self, versions: Mapping[int, StageVersion]) -> None:
        """Replace the newest versions of some stages."""
        with self._assigning:
            self.newest = {**self.newest, **versions}

    def update(self, source: UpdateSource | AdapterChange, report: UpdateReport) -> None:
        """Load a version beside all newest ones, and let calls and sequences to come run on it; see `Executor.update`."""
        with self._updating:
            members = [stages for member in self._members if (stages := member()) is not None]
            shared = SharedObjects()
            staged = [stages.stage(source, report, shared) for stages in members]
            for stages, version in zip(members, staged, strict=True):
                for check in stages.checks:
                    check(version)
            with ExitStack() as switching, report.part("switch"):
                for stages in members:
                    switching.enter_context(stages.switching())
                previous = [stages.newest for stages in members]
                try:
                    for stages, version in zip(members, staged, strict=True):
                        stages.take_over(version)
                except BaseException:
                    for stages, version in zip(members, previous, strict=True):
                        with suppress(Exception):  # the first error is raised
                            stages.take_over(version)
                    raise
                self.put({id(stages): version for stages, version in zip(members, staged, strict=True)})
                if isinstance(source, UpdateSource):  # before processes may be started again, which keep none
                    kept = {id(stages): version for stages, version in zip(members, previous, strict=True)}
                    self.kept = kept if source.keeps_previous else {}
            if any(stages.pauses for stages in members):
                report.pause = report.switch
            report.version, report.previous = staged[0].name, previous[0].name

    def forget(self, key: int) -> None:
        """Keep no version of stages that are gone, or that have other versions to change with."""
        with self._assigning:
            self.newest = {member: version for member, version in self.newest.items() if member != key}
            self.kept = {member: version for member, version in self.kept.items() if member != key}


def join_versions(members: Iterable[JointStages]) -> None:
    """Let the versions of stages, which run the same bundle, change together from now on."""
    joint = JointVersions()
    for stages in members:
        alone, version = stages.joint, stages.newest
        joint.add(stages, version)
        alone.forget(id(stages))
