"""Pipelines with stages in ONNX Runtime, and maybe others in torch."""

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from stagepack.format.manifest import Manifest, Stage
from stagepack.format.tree import value_names
from stagepack_loaders.onnxruntime.values import is_torch, to_numpy, to_torch
from stagepack_loaders.pipeline import LoadedStage, Pipeline


class MixedPipeline(Pipeline):
    """A pipeline whose stages hand on values of several runtimes; it gives torch tensors to a call with one, else numpy arrays."""

    def __init__(self, manifest: Manifest, stages: Sequence[LoadedStage], types: Collection[type] = ()) -> None:
        """See `Pipeline`."""
        super().__init__(manifest, stages, types)
        self._dtypes = {edge.name: edge.dtype for edge in manifest.edges}
        self._given_back = frozenset(value_names(manifest.signature.result))

    def _run(self, stage: LoadedStage, entry: Stage, values: MutableMapping[str, Any]) -> tuple[Any, ...]:
        if stage.runtime == "torch":  # those of ONNX Runtime take anything
            # Later stages get the same tensors: they are to see what this one writes.
            values.update({name: to_torch(values[name], self._dtypes[name]) for name in entry.inputs})
        return super()._run(stage, entry, values)

    def results(self, values: Mapping[str, Any], given: Iterable[Any]) -> Mapping[str, Any]:
        """The results by edge name: torch tensors for a caller who gave one, else numpy arrays."""
        convert = to_torch if any(map(is_torch, given)) else to_numpy
        return {name: convert(values[name], self._dtypes[name]) for name in self._given_back}
