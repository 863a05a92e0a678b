"""A pipeline at one version of its weights, for what makes several calls: of one entry point, or of two."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.executor import Executor
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.versions import StageVersion


class VersionedPipeline(Protocol):
    """What a `PinnedPipeline` needs of a `CallablePipeline`."""

    executor: Executor

    @property
    def inputs(self) -> Sequence[Edge]:
        """The inputs."""

    @property
    def arrays(self) -> ArrayOps:
        """The operations on its arrays."""

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients."""

    def sequences(self, count: int, version: StageVersion | None = None) -> list[PipelineSequence]:
        """Return several sequences on a version."""

    def call_version(self, version: StageVersion, inputs: Mapping[str, Any]) -> Any:
        """Call the pipeline on a version."""


class PinnedPipeline:
    """A pipeline whose calls run on one version of its weights.

    version: the version.
    """

    def __init__(self, pipeline: VersionedPipeline, version: StageVersion) -> None:
        self._pipeline = pipeline
        self._version = version

    @property
    def bundle(self) -> Bundle:
        """The bundle of the version."""
        return self._version.bundle

    @property
    def inputs(self) -> Sequence[Edge]:
        """See `CallablePipeline.inputs`."""
        return self._pipeline.inputs

    @property
    def arrays(self) -> ArrayOps:
        """See `CallablePipeline.arrays`."""
        return self._pipeline.arrays

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[None]:
        """See `CallablePipeline.inference`."""
        return self._pipeline.inference(for_autograd=for_autograd)

    def sequences(self, count: int) -> list[PipelineSequence]:
        """See `CallablePipeline.sequences`."""
        return self._pipeline.sequences(count, self._version)

    def __call__(self, **inputs: Any) -> Any:
        """See `CallablePipeline`."""
        return self._pipeline.call_version(self._version, inputs)


def pinned_together(pipeline: VersionedPipeline, other: VersionedPipeline) -> tuple[PinnedPipeline, PinnedPipeline]:
    """Return two pipelines at their newest versions: entry points of one bundle that were loaded together are at one version."""
    version, other_version = pipeline.executor.updated.newest_with(other.executor.updated)
    return PinnedPipeline(pipeline, version), PinnedPipeline(other, other_version)
