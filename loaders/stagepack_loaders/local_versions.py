"""The versions of stages in this process: the newest, and those before that calls and sequences still run on."""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import replace

from stagepack.errors import UpdateError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import LoadedStage, Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import open_for_loading
from stagepack_loaders.stages import stage_driver
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import StageVersion, UpdateSource, same_model, version_name
from stagepack_loaders.weight_changes import WeightChanges


class LocalVersions:
    """The versions of the stages of a pipeline, or of a process of one.

    Attributes:
        newest: the version that calls and sequences to come run on.
        kept: the version before, if it is kept in memory.
        loading: how stages are loaded.
        refusal: why no version can take the place of the newest; empty if one can.
    """

    def __init__(self, bundle: Bundle, stages: Mapping[int, LoadedStage], options: LoadOptions) -> None:
        drivers = {number: stage_driver(bundle.entry_point, number, stage) for number, stage in stages.items()}
        self.newest = StageVersion(name=version_name(bundle), bundle=bundle, stages=drivers)
        self.kept: StageVersion | None = None
        self.loading = Loading(options=options)
        self.refusal = ""
        self._lock = threading.Lock()

    def update(self, source: UpdateSource, report: UpdateReport) -> None:
        """Stage a version, and switch to it; see `Executor.update`."""
        with self._lock:
            staged = self.stage(source, report)
            with report.part("switch"):
                previous = self.switch(staged)
            if any(driver.has_state for driver in staged.stages.values()):
                report.pause = report.switch
            self.kept = previous if source.keeps_previous else None
            report.version, report.previous = staged.name, previous.name

    def stage(self, source: UpdateSource, report: UpdateReport, running: StageVersion | None = None) -> StageVersion:
        """Load the stages of a version beside the version `running`, which it will replace; None for the newest.

        What keeps it from that is found before a weight is read.
        """
        running = running or self.newest
        if self.refusal:
            raise UpdateError(f"{running.bundle.location}: {self.refusal}")
        bundle = same_model(running.bundle, source)
        name = source.name or version_name(bundle)
        stages_of = running.stages_of_runtimes()
        for runtime, stages in stages_of.items():
            runtime.check_update(stages)
        if self.kept is not None and self.kept.identity == (bundle.digest, name):
            with contextlib.suppress(UpdateError):  # its weights were written since: it is loaded again
                for runtime, stages in self.kept.stages_of_runtimes().items():
                    runtime.check_update(stages)
                return self.kept
        bundle = open_for_loading(bundle, self.loading.options.verify)
        # As `prepare` does: stages of other runtimes may get other strides.
        loading = replace(self.loading, dense_inputs=not all(runtime.keeps_strides for runtime in stages_of))
        changes, loaded = WeightChanges(running.bundle, bundle), dict[int, LoadedStage]()
        for runtime, stages in stages_of.items():
            loaded.update(runtime.stage_version(bundle, stages, changes, loading, report))
        drivers = {number: driver.of_version(loaded[number]) for number, driver in running.stages.items()}
        return StageVersion(name=name, bundle=bundle, stages=drivers)

    def switch(self, staged: StageVersion) -> StageVersion:
        """Let calls and sequences to come run on a version. The result is the version before."""
        previous = self.newest
        try:
            for driver in staged.stages.values():
                driver.take_over()
        except BaseException:
            for driver in previous.stages.values():
                driver.take_over()
            raise
        self.newest = staged
        return previous
