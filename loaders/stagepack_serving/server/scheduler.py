"""A queue of calls, joined to batches, that run on one thread for each lane.

- Runs the stages of a bundle that is loaded in this process, for the scheduler.
- Runs a bundle whose stages are in processes of their own, for the scheduler.
"""

# Long because the queue and its two runners share the protocol of a batch.

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from stagepack.errors import StageLostError
from stagepack.format.contract import BoundArgument, check_values
from stagepack_loaders.base import stage_state
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import to_elements
from stagepack_loaders.pipeline import CallablePipeline, Pipeline
from stagepack_loaders.stage_errors import typed_stage_errors
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.sequences import RequestSequence

if TYPE_CHECKING:
    from stagepack_loaders.distributed.pipeline import DistributedPipeline


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedCall:
    """A call of the model that waits for its run.

    Attributes:
        inputs: the input arrays by name.
        batch_key: calls with equal keys may be joined to one batch; None runs alone.
        batch_size: the size of the first dimension of the inputs, where the call may be joined.
        sequence: the sequence whose state the call uses, for the runner; None for a model without state.
        ends_sequence: whether this is no call, but the end of its sequence.
        is_abandoned: whether nobody waits for the answer any more.
        arrival: when the call was made, in seconds of `time.monotonic`.
        answer: the output arrays by name.
    """

    inputs: Mapping[str, Array]
    batch_key: Hashable = None
    batch_size: int = 1
    sequence: Any = None
    ends_sequence: bool = False
    is_abandoned: bool = False
    arrival: float = field(default_factory=time.monotonic)
    answer: "Future[Mapping[str, Array]]" = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class CallBatch:
    """Calls that run together.

    Attributes:
        calls: the calls, in the order in which their inputs are concatenated.
        values: the values that the stages so far have produced, for the runner.
        start_time: when its run began, in seconds of `time.monotonic`.
        begin_time: when its inputs were converted.
        run_time: when its stages had run.
        end_time: when its outputs were converted.
    """

    calls: Sequence[QueuedCall]
    values: Any = None
    start_time: float = 0.0
    begin_time: float = 0.0
    run_time: float = 0.0
    end_time: float = 0.0


class BatchRunner(Protocol):
    """Runs the stages of a model on the inputs of a batch.

    Attributes:
        lanes: the stage numbers of each lane, in order. The stages of different lanes work at the same time.
        most_batches: how many batches may run at the same time. With few, calls gather meanwhile, and become larger batches.
    """

    lanes: Sequence[Sequence[int]]
    most_batches: int

    def begin(self, inputs: Mapping[str, Array]) -> Any:
        """Convert the inputs of a batch.

        Args:
            inputs: the input arrays by name.

        Returns:
            The values that the first stage starts from.
        """

    def run_stage(self, stage_number: int, values: Any, sequence: Any) -> "Future[Any] | None":
        """Run a stage.

        Args:
            stage_number: the stage.
            values: the values, which the stage updates.
            sequence: `QueuedCall.sequence` of the first call of the batch.

        Returns:
            None when the stage has run. The last stage may run elsewhere: then what tells when it has run. No thread waits for it; `finish`
            is called in the thread that sets it, and raises the error of the stage.
        """

    def finish(self, values: Any, sequence: Any) -> Mapping[str, Array]:
        """Convert the values after the last stage.

        Args:
            values: the values.
            sequence: `QueuedCall.sequence` of the first call of the batch.

        Returns:
            The output arrays by name.
        """

    def end_sequence(self, sequence: Any) -> None:
        """Free the state of a sequence. Called in the thread of the first lane, which has run it for the calls of the sequence.

        Args:
            sequence: `QueuedCall.sequence` of earlier calls.
        """

    def restart_count(self) -> int:
        """Return a number that changes when the state of all sequences is lost."""

    def process_statuses(self) -> Mapping[int, Any]:
        """Return what the processes of the stages report about themselves, by rank; empty if the stages run in this process."""

    def unavailable_reason(self) -> str:
        """Return why no batch can run now; empty if batches can."""

    def has_ended(self) -> bool:
        """Return whether no batch will run any more."""


class Scheduler:
    """Runs calls in batches, with one thread for each lane.

    While the second lane runs a batch, the first one runs the next batch. No thread waits for stages that run in other processes.

    Attributes:
        failure: why no call will run any more; empty while calls run.
    """

    def __init__(
        self,
        runner: BatchRunner,
        *,
        max_batch_size: int,
        batching_delay: float,
        on_start: Callable[[CallBatch], None],
        on_end: Callable[[CallBatch], None],
    ) -> None:
        self.failure = ""
        self._runner = runner
        self._lanes = lanes = runner.lanes
        self._max_batch_size = max_batch_size
        self._batching_delay = batching_delay
        self._on_start = on_start
        self._on_end = on_end
        self._waiting: deque[QueuedCall] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._lane_inputs: list[SimpleQueue[CallBatch | None]] = [SimpleQueue() for _ in lanes[1:]]
        self._running_batches: set[CallBatch] = set()
        self._threads = [
            threading.Thread(target=self._run_lane, args=(lane_number,), name=f"lane-{lane_number}", daemon=True)
            for lane_number in range(len(lanes))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: QueuedCall) -> None:
        """Put a call in the queue."""
        with self._changed:
            if self.failure:
                _refuse_calls([call], StageLostError(self.failure))
                return
            self._waiting.append(call)
            self._changed.notify()

    def end_sequence(self, sequence: Any) -> None:
        """Free the state of a sequence after its calls that are in the queue: one of them would create the state again."""
        self.submit(QueuedCall(inputs={}, sequence=sequence, ends_sequence=True))

    def close(self, seconds: float) -> bool:
        """Run the calls in the queue, and end the threads.

        seconds: how long to wait for them.
        """
        end_time = time.monotonic() + seconds
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end_time - time.monotonic()))
        with self._changed:
            has_ended = self._changed.wait_for(lambda: not self._running_batches, max(0.0, end_time - time.monotonic()))
        return has_ended and not any(thread.is_alive() for thread in self._threads)

    def _run_lane(self, lane_number: int) -> None:
        batch = None
        try:
            while (batch := self._next_batch(lane_number)) is not None:
                try:
                    self._advance(batch, lane_number)
                except Exception as error:  # noqa: BLE001 - a bug here must not end the thread
                    self._refuse(batch, error)
                batch = None  # it may run elsewhere
        except BaseException as error:  # noqa: BLE001 - such as SystemExit; without a word, all calls would wait for ever
            self._end_lane(lane_number, batch, error)
        if lane_number < len(self._lane_inputs):
            self._lane_inputs[lane_number].put(None)

    def _end_lane(self, lane_number: int, batch: CallBatch | None, error: BaseException) -> None:
        """Refuse all calls, as a lane has ended; one that has batches before it takes these until the scheduler is closed."""
        failure = f"the thread of lane {lane_number} has ended: {type(error).__name__}: {error}".removesuffix(": ")
        with self._changed:
            self.failure = failure
            _refuse_calls(self._waiting, StageLostError(failure))
            self._waiting.clear()
        if batch is not None:
            self._refuse(batch, StageLostError(failure))
        while lane_number > 0 and (batch := self._lane_inputs[lane_number - 1].get()) is not None:
            self._refuse(batch, StageLostError(failure))

    def _next_batch(self, lane_number: int) -> CallBatch | None:
        if lane_number > 0:
            return self._lane_inputs[lane_number - 1].get()
        return self._gather_batch()

    def _end_batch(self, batch: CallBatch) -> None:
        """Make place for another batch."""
        # The future of a batch that runs elsewhere refers to the batch, and its values to the future; nothing else would free them soon.
        batch.values = None
        with self._changed:
            self._running_batches.discard(batch)
            if self._waiting or self._is_closed:  # otherwise, the first lane would wake up for nothing
                self._changed.notify_all()

    def _gather_batch(self) -> CallBatch | None:
        """Take the oldest call, and other calls that may be joined to it; None once the scheduler is closed and the queue empty."""
        with self._changed:
            first_call = self._take_oldest()
            if first_call is None:
                return None
            calls, batch_size = [first_call], first_call.batch_size
            while first_call.batch_key is not None:
                for call in list(self._waiting):
                    if call.batch_key == first_call.batch_key and batch_size + call.batch_size <= self._max_batch_size:
                        self._waiting.remove(call)
                        if call.answer.set_running_or_notify_cancel():
                            calls.append(call)
                            batch_size += call.batch_size
                remaining = first_call.arrival + self._batching_delay - time.monotonic()
                if batch_size >= self._max_batch_size or remaining <= 0 or self._is_closed:
                    break
                self._changed.wait(remaining)
            batch = CallBatch(calls)
            self._running_batches.add(batch)
        return batch

    def _take_oldest(self) -> QueuedCall | None:
        """Wait for a call whose answer is not cancelled, and a place; None once the scheduler is closed and the queue empty."""
        while True:
            self._changed.wait_for(
                lambda: len(self._running_batches) < self._runner.most_batches and (self._waiting or self._is_closed)
            )
            if not self._waiting:
                return None
            call = self._waiting.popleft()
            if call.answer.running() or call.answer.set_running_or_notify_cancel():
                return call

    def _advance(self, batch: CallBatch, lane_number: int) -> None:
        """Run a batch on a lane; then pass it to the next lane, or set the answers of its calls."""
        calls = batch.calls
        if calls[0].ends_sequence:
            self._runner.end_sequence(calls[0].sequence)
            self._end_batch(batch)
            return
        if all(call.is_abandoned for call in calls):
            self._end_batch(batch)
            return
        running_elsewhere = None
        try:
            if lane_number == 0:
                batch.start_time = time.monotonic()
                self._on_start(batch)
                batch.values = self._runner.begin(_concatenate([call.inputs for call in calls]))
                batch.begin_time = time.monotonic()
            for stage_number in self._lanes[lane_number]:
                running_elsewhere = self._runner.run_stage(stage_number, batch.values, calls[0].sequence)
        except Exception as error:  # noqa: BLE001 - the caller gets any error that the model raises
            self._fail(batch, error)
            return
        if lane_number < len(self._lane_inputs):
            self._lane_inputs[lane_number].put(batch)
        elif running_elsewhere is None:
            self._answer(batch)
        else:
            running_elsewhere.add_done_callback(lambda _: self._answer(batch))

    def _answer(self, batch: CallBatch) -> None:
        """Set the answers of a batch whose stages have run."""
        batch.run_time = time.monotonic()
        try:
            outputs = self._runner.finish(batch.values, batch.calls[0].sequence)
        except Exception as error:  # noqa: BLE001 - the caller gets any error that the model raises
            self._fail(batch, error)
            return
        batch.end_time = time.monotonic()
        try:
            self._on_end(batch)
            _set_answers(batch.calls, outputs)
        except Exception as bug:  # noqa: BLE001 - a bug here must not leave calls without an answer
            _refuse_calls(batch.calls, bug)
        self._end_batch(batch)

    def _fail(self, batch: CallBatch, error: Exception) -> None:
        """Refuse the only call of a batch, or run its calls alone."""
        if len(batch.calls) == 1:
            batch.calls[0].answer.set_exception(error)
        else:
            self._retry_alone(batch.calls)
        self._end_batch(batch)

    def _refuse(self, batch: CallBatch, error: Exception) -> None:
        _refuse_calls(batch.calls, error)
        self._end_batch(batch)

    def _retry_alone(self, calls: Sequence[QueuedCall]) -> None:
        """Put the calls of a failed batch back to run alone, so that the inputs of one do not fail the others."""
        for call in calls:
            call.batch_key = None
        with self._changed:
            if self.failure:  # nothing takes them any more
                _refuse_calls(calls, StageLostError(self.failure))
                return
            self._waiting.extendleft(reversed(calls))
            self._changed.notify()


def _refuse_calls(calls: Sequence[QueuedCall], error: Exception) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(error)


def _concatenate(inputs: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    if len(inputs) == 1:
        return inputs[0]
    return {input_name: numpy.concatenate([arrays[input_name] for arrays in inputs]) for input_name in inputs[0]}


def _set_answers(calls: Sequence[QueuedCall], outputs: Mapping[str, Array]) -> None:
    """Split the outputs of a batch along the first dimension, and answer its calls."""
    if len(calls) == 1:
        calls[0].answer.set_result(outputs)
        return
    end_positions = itertools.accumulate(call.batch_size for call in calls)
    for call, end in zip(calls, end_positions, strict=True):
        answer = {output_name: array[end - call.batch_size : end] for output_name, array in outputs.items()}
        call.answer.set_result(answer)


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
