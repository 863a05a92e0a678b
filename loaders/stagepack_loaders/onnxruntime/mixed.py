"""Pipelines with stages in ONNX Runtime, and maybe others in torch."""

from collections.abc import Mapping
from typing import Any

from stagepack.format.contract import Given
from stagepack.format.manifest import Stage
from stagepack_loaders.onnxruntime.values import is_torch, to_numpy, to_torch
from stagepack_loaders.pipeline import LoadedStage, Pipeline


class MixedPipeline(Pipeline):
    """A pipeline whose stages hand on values of several runtimes; it gives torch tensors to a call with one, else numpy arrays."""

    def _run(self, stage: LoadedStage, entry: Stage, values: Mapping[str, Any]) -> tuple[Any, ...]:
        if stage.runtime == "torch":  # those of ONNX Runtime take anything
            values = {name: to_torch(values[name], self._dtypes[name]) for name in entry.inputs}
        return super()._run(stage, entry, values)

    def _results(self, values: Mapping[str, Any], bound: Mapping[str, Given]) -> Mapping[str, Any]:
        convert = to_torch if any(is_torch(given.value) for given in bound.values()) else to_numpy
        return {name: convert(value, self._dtypes[name]) for name, value in values.items()}

    @property
    def _dtypes(self) -> Mapping[str, str]:
        return {edge.name: edge.dtype for edge in self.manifest.edges}
