"""Runs a bundle whose stages are in processes of their own, for the scheduler."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from stagepack.format.contract import BoundArgument, check_values
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.elements import Array
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.sequences import RequestSequence
from stagepack_serving.server.stage_runner import input_values, output_arrays

if TYPE_CHECKING:
    from stagepack_loaders.distributed.pipeline import DistributedPipeline


class ProcessRunner:
    """Sends batches to the processes of a pipeline. Implements `BatchRunner`, with all stages as one that runs elsewhere."""

    def __init__(self, pipeline: "DistributedPipeline", interface: Interface) -> None:
        self.lanes: Sequence[Sequence[int]] = ((0,),)
        # One that each process works on, one that it takes next, and one that is answered.
        self.most_batches = len({facts.rank for facts in pipeline.stage_facts}) + 2
        # Of stages in this process, a result may be a view of the state of a sequence, which its next call writes.
        self._runs_stages = any(facts.rank == FRONT_RANK for facts in pipeline.stage_facts)
        self._pipeline = pipeline
        self._interface = interface

    def begin(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """See `BatchRunner`."""
        return {"inputs": input_values(self._pipeline, self._interface, inputs)}

    def run_stage(
        self, stage_number: int, values: dict[str, Any], sequence: RequestSequence | None
    ) -> "Future[dict[str, Any]]":
        """See `BatchRunner`."""
        inputs = values["inputs"]
        sizes = check_values(
            [tensor.edge for tensor in self._interface.inputs.values()],
            {edge_name: BoundArgument(edge_name, value) for edge_name, value in inputs.items()},
            self._pipeline.entry_point.symbols,
        )
        if sequence is not None and not sequence.number:
            sequence.number = self._pipeline.begin_sequence()
        sequence_number = 0 if sequence is None else sequence.number
        values["answer"] = answer = self._pipeline.submit_values(
            inputs,
            sizes,
            sequence_number,
            copies_results=False,  # encoding an answer copies what other processes have sent
        )
        return answer

    def finish(self, values: dict[str, Any], sequence: RequestSequence | None) -> Mapping[str, Array]:
        """See `BatchRunner`."""
        copies = self._runs_stages and sequence is not None
        return output_arrays(self._interface, values["answer"].result(), copies=copies)

    def end_sequence(self, sequence: RequestSequence) -> None:
        """See `BatchRunner`."""
        if sequence.number:
            self._pipeline.end_sequence(sequence.number)

    def restart_count(self) -> int:
        """See `BatchRunner`."""
        return self._pipeline.restart_count

    def process_statuses(self) -> Mapping[int, Any]:
        """See `BatchRunner`."""
        return self._pipeline.statuses()

    def unavailable_reason(self) -> str:
        """See `BatchRunner`."""
        return "" if self._pipeline.lost is None else str(self._pipeline.lost)

    def has_ended(self) -> bool:
        """See `BatchRunner`."""
        return self._pipeline.has_ended
