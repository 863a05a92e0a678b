"""The stages of a loaded bundle, as the scheduler runs them."""

import time
from collections.abc import Mapping
from typing import Any

import numpy

from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import to_elements
from stagepack_loaders.pipeline import Pipeline
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.protocol.value_errors import raises_input_errors
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.sequences import RequestSequence


class StageRunner:
    """Runs a pipeline stage by stage, on arrays as they travel. One for each model."""

    def __init__(self, name: str, pipeline: Pipeline, interface: Interface, metrics: Metrics) -> None:
        """`name` is that of the model, for the metrics."""
        self._pipeline = pipeline
        self._interface = interface
        self._seconds = [metrics.stage_seconds.labels(name, str(number)) for number in range(len(pipeline.stages))]

    def begin(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """The values that the first stage starts from."""
        arrays = self._pipeline.arrays
        return {name: arrays.from_elements(array, self._interface.inputs[name].edge) for name, array in inputs.items()}

    def run_stage(self, stage: int, values: dict[str, Any], sequence: RequestSequence | None) -> None:
        """Run a stage; it changes the values, and what the sequence has written."""
        loaded = self._pipeline.stages[stage]
        started = time.perf_counter()
        runtime = self._pipeline.runtimes[stage]
        with runtime.inference():
            if sequence is None:
                self._run_stage(stage, values)
            else:
                held = loaded.swap_state(
                    sequence.stage_states[stage] if stage in sequence.stage_states else loaded.fresh_state()
                )
                try:
                    self._run_stage(stage, values)
                finally:
                    sequence.stage_states[stage] = loaded.swap_state(held)
            runtime.wait(loaded.device)
        self._seconds[stage].observe(time.perf_counter() - started)

    def _run_stage(self, stage: int, values: dict[str, Any]) -> None:
        with raises_input_errors(stage):
            self._pipeline.run_stage(stage, values)

    def finish(self, values: dict[str, Any], sequence: RequestSequence | None) -> Mapping[str, Array]:
        """The outputs by name; they are not on memory that a later call of the sequence writes."""
        outputs = {
            name: numpy.ascontiguousarray(to_elements(values[spec.edge.name], spec.edge))
            for name, spec in self._interface.outputs.items()
        }
        return outputs if sequence is None else {name: array.copy() for name, array in outputs.items()}
