"""Runs the stages of a bundle that is loaded in this process, for the scheduler."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from stagepack.errors import StageLostError
from stagepack_loaders.base import stage_state
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import to_elements
from stagepack_loaders.pipeline import CallablePipeline, Pipeline
from stagepack_loaders.stage_errors import typed_stage_errors
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.sequences import RequestSequence


class StageRunner:
    """Runs a pipeline stage by stage on the arrays of requests. Implements `BatchRunner`."""

    def __init__(
        self, model_name: str, version: str, pipeline: Pipeline, interface: Interface, metrics: Metrics
    ) -> None:
        self.lanes: Sequence[Sequence[int]] = device_lanes(pipeline)
        # One in each lane, and one between two of them.
        self.most_batches = 2 * len(self.lanes) - 1
        self._pipeline = pipeline
        self._interface = interface
        self._lost_reason = ""
        self._stage_seconds = [
            metrics.stage_seconds.labels(model_name, version, str(stage_number))
            for stage_number in range(len(pipeline.stages))
        ]

    def begin(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Convert the inputs of a batch to the values that the first stage starts from."""
        return input_values(self._pipeline, self._interface, inputs)

    def run_stage(self, stage_number: int, values: dict[str, Any], sequence: RequestSequence | None) -> None:
        """Run a stage, and wait until its device has finished. When a device is lost, no batch runs any more.

        sequence: the sequence whose state the stage uses and updates; None for a model without state.
        """
        start_time = time.perf_counter()
        try:
            self._run_and_wait(stage_number, values, sequence)
        except StageLostError as error:
            self._lost_reason = str(error)
            raise
        self._stage_seconds[stage_number].observe(time.perf_counter() - start_time)

    def _run_and_wait(self, stage_number: int, values: dict[str, Any], sequence: RequestSequence | None) -> None:
        runtime, stage = self._pipeline.runtimes[stage_number], self._pipeline.stages[stage_number]
        with runtime.inference():
            if sequence is None:
                self._pipeline.run_stage(stage_number, values)
            else:
                with stage_state(stage, stage_number, sequence.stage_states):
                    self._pipeline.run_stage(stage_number, values)
            with typed_stage_errors(stage_number):
                runtime.wait(stage.device)

    def finish(self, values: dict[str, Any], sequence: RequestSequence | None) -> Mapping[str, Array]:
        """Convert the values after the last stage to the outputs of a batch.

        The result is the output arrays by name. Those of a sequence are copies: a value may be a view of the state that later calls write.
        """
        return output_arrays(self._interface, values, copies=sequence is not None)

    def end_sequence(self, sequence: RequestSequence) -> None:
        """See `BatchRunner`. The state is freed with the sequence."""

    def restart_count(self) -> int:
        """See `BatchRunner`."""
        return 0

    def process_statuses(self) -> Mapping[int, Any]:
        """See `BatchRunner`."""
        return {}

    def unavailable_reason(self) -> str:
        """See `BatchRunner`."""
        return self._lost_reason

    def has_ended(self) -> bool:
        """See `BatchRunner`."""
        return bool(self._lost_reason)


def device_lanes(pipeline: Pipeline) -> list[list[int]]:
    """Group the stages of a pipeline into lanes."""
    lanes: list[list[int]] = []
    for stage_number, device in enumerate(pipeline.devices):
        if lanes and pipeline.devices[stage_number - 1] == device:
            lanes[-1].append(stage_number)
        else:
            lanes.append([stage_number])
    return lanes


def input_values(pipeline: CallablePipeline, interface: Interface, inputs: Mapping[str, Array]) -> dict[str, Any]:
    """Convert the inputs of a batch to values by edge name."""
    return {
        input_name: pipeline.arrays.from_elements(array, interface.inputs[input_name].edge)
        for input_name, array in inputs.items()
    }


def output_arrays(interface: Interface, values: Mapping[str, Any], *, copies: bool) -> dict[str, Array]:
    """Convert the values after the last stage to the outputs of a batch, by output name."""
    outputs = {
        output_name: numpy.ascontiguousarray(to_elements(values[tensor.edge.name], tensor.edge))
        for output_name, tensor in interface.outputs.items()
    }
    return {output_name: array.copy() for output_name, array in outputs.items()} if copies else outputs
