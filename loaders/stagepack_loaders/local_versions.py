"""The versions of stages in this process: the newest, and those before that calls and sequences still run on."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from stagepack.errors import UpdateError
from stagepack.format.reader import Bundle
from stagepack_loaders.adapter_changes import AdapterChange
from stagepack_loaders.base import LoadedStage, Loading, SharedObjects
from stagepack_loaders.joint_versions import JointStages
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import open_for_loading
from stagepack_loaders.stages import stage_driver
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import StageVersion, UpdateSource, same_model, version_identity, version_name
from stagepack_loaders.weight_changes import WeightChanges


class LocalVersions(JointStages):
    """The versions of the stages of a pipeline, or of a process of one.

    Attributes:
        loading: how stages are loaded.
    """

    def __init__(self, bundle: Bundle, stages: Mapping[int, LoadedStage], options: LoadOptions) -> None:
        drivers = {number: stage_driver(bundle.entry_point, number, stage) for number, stage in stages.items()}
        self.begin(StageVersion(name=version_name(bundle), bundle=bundle, stages=drivers))
        self.loading = Loading(options=options)

    @property
    def pauses(self) -> bool:
        """See `JointStages`: where buffers pass on."""
        return any(driver.has_state for driver in self.newest.stages.values())

    def stage(
        self,
        source: UpdateSource | AdapterChange,
        report: UpdateReport,
        shared: SharedObjects,
        running: StageVersion | None = None,
    ) -> StageVersion:
        """See `JointStages`. What keeps the stages from the version is found before a weight is read.

        running: the version that it will replace; None for the newest.
        """
        running = running or self.newest
        if isinstance(source, AdapterChange):
            with report.part("stage"):
                return self.adapted(source.apply(running.bundle), running)
        bundle = same_model(running.bundle, source)
        name = source.name or version_name(bundle)
        stages_of = running.stages_of_runtimes()
        for runtime, stages in stages_of.items():
            runtime.check_update(stages)
        if self.kept is not None and self.kept.identity == version_identity(bundle, name):
            with contextlib.suppress(UpdateError):  # its weights were written since: it is loaded again
                for runtime, stages in self.kept.stages_of_runtimes().items():
                    runtime.check_update(stages)
                return self.kept
        bundle = open_for_loading(bundle, self.loading.options.verify)
        loading = self._loading_beside(running, shared)
        changes, loaded = WeightChanges(running.bundle, bundle), dict[int, LoadedStage]()
        for runtime, stages in stages_of.items():
            loaded.update(runtime.stage_version(bundle, stages, changes, loading, report))
        drivers = {number: driver.of_version(loaded[number]) for number, driver in running.stages.items()}
        return StageVersion(name=name, bundle=bundle, stages=drivers)

    def _loading_beside(self, running: StageVersion, shared: SharedObjects) -> Loading:
        """How stages are loaded that take the place of others; as `prepare` does, stages of other runtimes may get other strides."""
        is_dense = not all(runtime.keeps_strides for runtime in running.stages_of_runtimes())
        return replace(self.loading, dense_inputs=is_dense, shared=shared)

    def adapted(self, bundle: Bundle, running: StageVersion) -> StageVersion:
        """Return a version with the adapters of a bundle, and the weights of the version `running`, which are in memory once."""
        loading, loaded = self._loading_beside(running, SharedObjects()), dict[int, LoadedStage]()
        for runtime, stages in running.stages_of_runtimes().items():
            loaded.update(runtime.adapt_stages(bundle, stages, loading))
        drivers = {number: driver.of_version(loaded[number]) for number, driver in running.stages.items()}
        return StageVersion(name=running.name, bundle=bundle, stages=drivers)

    def take_over(self, version: StageVersion) -> None:
        """See `JointStages`: the buffers of calls without a sequence."""
        for driver in version.stages.values():
            driver.take_over()

    def switch(self, version: StageVersion) -> None:
        """Let calls and sequences to come run on a version that is loaded."""
        self.take_over(version)
        self.newest = version
