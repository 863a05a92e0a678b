"""A queue of calls, joined to batches, that an executor runs."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy

from stagepack.errors import StageLostError
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import to_elements
from stagepack_loaders.executor import CallOptions, Executor
from stagepack_loaders.lanes import thread_end_text
from stagepack_loaders.logs import current_trace
from stagepack_loaders.versions import CallSequence, StageVersion
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.access_log import RequestRecord, current_record
from stagepack_serving.server.metrics import RunTimes, Timeline
from stagepack_serving.server.sequences import RequestSequence

# The number of last runs that say how long a run takes at least.
_RUN_COUNT: Final = 16


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedCall:
    """A call of the model that waits for its run.

    Attributes:
        inputs: the input arrays by name, known to fit.
        sizes: the sizes of the symbols that they determine.
        batch_key: calls with equal keys may be joined to one batch; None runs alone.
        batch_size: the size of the first dimension of the inputs, where the call may be joined.
        version: the version of the weights that it runs on, unless it has a sequence, which has one.
        sequence: the sequence whose state the call uses; None for a model without state.
        ends_sequence: whether this is no call, but the end of its sequence.
        expiry: when nobody waits for the answer any more, in seconds of `time.monotonic`.
        is_abandoned: whether nobody does.
        finish: what makes the answer of the output arrays, for a call that runs alone; None for these themselves.
        arrival: when the call was made, in seconds of `time.monotonic`.
        record: the record of the request that the call is made for; None for a call for several requests, or for none.
        answer: the output arrays by name, or what `finish` makes of them.
        batch: the calls that it runs with, once it does.
    """

    inputs: Mapping[str, Array]
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch_key: Hashable = None
    batch_size: int = 1
    version: StageVersion | None = None
    sequence: RequestSequence | None = None
    ends_sequence: bool = False
    expiry: float = math.inf
    is_abandoned: bool = False
    finish: Callable[[Mapping[str, Array]], Any] | None = None
    arrival: float = field(default_factory=time.monotonic)
    record: RequestRecord | None = field(default_factory=current_record.get)
    answer: "Future[Any]" = field(default_factory=Future)
    batch: "CallBatch | None" = None

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of its request."""
        return None if self.record is None else self.record.timeline


@dataclass(slots=True, eq=False)
class CallBatch:
    """Calls that run together.

    Attributes:
        calls: the calls, in the order in which their inputs are concatenated.
        cancellation: done when nobody waits for any of the answers.
        times: those of its run.
    """

    calls: Sequence[QueuedCall]
    cancellation: "Future[None]" = field(default_factory=Future)
    times: RunTimes = field(default_factory=RunTimes)

    @property
    def size(self) -> int:
        """The size of the batch: a call may bring several of its rows."""
        return sum(call.batch_size for call in self.calls)


class Scheduler:
    """Gathers calls to batches in a thread, and submits these to an executor.

    While stages run in other threads or processes, it submits further batches, as many as `Executor.most_calls`.

    Attributes:
        failure: why no call will run any more; empty while calls run.
    """

    def __init__(
        self,
        executor: Executor,
        interface: Interface,
        *,
        max_batch_size: int,
        batching_delay: float,
        on_start: Callable[[CallBatch], None],
        on_end: Callable[[CallBatch], None],
    ) -> None:
        self.failure = ""
        self._executor = executor
        self._interface = interface
        # The first dimension of all inputs, where calls may be joined.
        self._batch_symbol = next((dim for tensor in interface.inputs.values() for dim in tensor.edge.shape[:1]), None)
        self._max_batch_size = max_batch_size
        self._batching_delay = batching_delay
        self._on_start = on_start
        self._on_end = on_end
        self._waiting: deque[QueuedCall] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._running_batches: set[CallBatch] = set()
        # The times of the last batches, in seconds.
        self._run_times: deque[float] = deque(maxlen=_RUN_COUNT)
        # The thread also runs the stages of the first device of this process.
        self._thread = threading.Thread(target=self._run, name="lane-0", daemon=True)
        self._thread.start()

    @property
    def running_count(self) -> int:
        """The number of batches that run."""
        return len(self._running_batches)

    def submit(self, call: QueuedCall) -> None:
        """Put a call in the queue."""
        with self._changed:
            if self.failure:
                _refuse_calls([call], StageLostError(self.failure))
                return
            self._waiting.append(call)
            self._changed.notify()

    def abandon(self, call: QueuedCall) -> None:
        """Drop a call that nobody waits for. A batch of which all calls are dropped ends before its next stage."""
        with self._changed:
            call.is_abandoned = True
            batch = call.batch
            ends_batch = batch is not None and all(call.is_abandoned for call in batch.calls)
        if batch is not None and ends_batch and not batch.cancellation.done():
            batch.cancellation.set_result(None)

    def end_sequence(self, sequence: RequestSequence) -> None:
        """Free the state of a sequence after its calls that are in the queue: one of them would create the state again."""
        self.submit(QueuedCall(inputs={}, sequence=sequence, ends_sequence=True))

    def close(self, seconds: float) -> bool:
        """Run the calls in the queue, and end the thread.

        seconds: how long to wait for them.
        """
        end_time = time.monotonic() + seconds
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, end_time - time.monotonic()))
        with self._changed:
            has_ended = self._changed.wait_for(lambda: not self._running_batches, max(0.0, end_time - time.monotonic()))
        return has_ended and not self._thread.is_alive()

    def _run(self) -> None:
        batch = None
        try:
            while (batch := self._gather_batch()) is not None:
                try:
                    self._start(batch)
                except Exception as error:  # noqa: BLE001 - a bug here must not end the thread
                    self._refuse(batch, error)
                batch = None  # it may run elsewhere
        except BaseException as error:  # noqa: BLE001 - such as SystemExit; without a word, all calls would wait for ever
            lost = StageLostError(thread_end_text(0, error))
            with self._changed:
                self.failure = str(lost)
                _refuse_calls(self._waiting, lost)
                self._waiting.clear()
            if batch is not None:
                self._refuse(batch, lost)

    def _end_batch(self, batch: CallBatch) -> None:
        """Make place for another batch."""
        with self._changed:
            self._running_batches.discard(batch)
            for call in batch.calls:
                call.batch = None  # a cycle would keep the inputs until the garbage collector comes
            if self._waiting or self._is_closed:  # otherwise, the thread would wake up for nothing
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
                    is_alike = call.batch_key == first_call.batch_key and call.version is first_call.version
                    if is_alike and batch_size + call.batch_size <= self._max_batch_size:
                        self._waiting.remove(call)
                        if self._is_wanted(call):
                            calls.append(call)
                            batch_size += call.batch_size
                remaining = first_call.arrival + self._batching_delay - time.monotonic()
                if batch_size >= self._max_batch_size or remaining <= 0 or self._is_closed:
                    break
                self._changed.wait(remaining)
            batch = CallBatch(calls)
            for call in calls:
                call.batch = batch
            self._running_batches.add(batch)
        return batch

    def _take_oldest(self) -> QueuedCall | None:
        """Wait for a call that somebody waits for, and a place; None once the scheduler is closed and the queue empty."""
        while True:
            self._changed.wait_for(
                lambda: len(self._running_batches) < self._executor.most_calls and (self._waiting or self._is_closed)
            )
            if not self._waiting:
                return None
            call = self._waiting.popleft()
            if self._is_wanted(call):
                return call

    def _is_wanted(self, call: QueuedCall) -> bool:
        """Whether somebody will still wait for the answer to a call when it has run."""
        if call.is_abandoned or not (call.answer.running() or call.answer.set_running_or_notify_cancel()):
            return False
        # A run is too long for one call only if another one waits: how long runs take is learned from those that run.
        shortest_run = min(self._run_times, default=0.0) if self._waiting else 0.0
        if time.monotonic() + shortest_run > call.expiry:
            call.answer.set_exception(TimeoutError())
            return False
        return True

    def _start(self, batch: CallBatch) -> None:
        """Submit a batch, whose answers are set when it has run."""
        calls = batch.calls
        if calls[0].ends_sequence:
            if calls[0].sequence is not None and calls[0].sequence.state is not None:
                self._executor.end_sequence(calls[0].sequence.state)
            self._end_batch(batch)
            return
        try:
            batch.times.start = time.monotonic()
            self._on_start(batch)
            values = self._input_values(calls)
            batch.times.inputs = time.monotonic()
            # Logs name the first one of several requests.
            current_trace.set(None if calls[0].record is None else calls[0].record.trace)
            # Encoding an answer copies what other processes have sent.
            state = self._state(calls[0])
            version = self._known(calls[0].version) if state is None else state.version
            for call in calls:
                if call.record is not None:
                    call.record.weights = version
            options = CallOptions(copies_results=False, cancellation=batch.cancellation, version=version)
            answer = self._executor.submit(values, self._sizes(calls), state, options)
        except Exception as error:  # noqa: BLE001 - the caller gets any error that the model raises
            self._fail(batch, error)
            return
        del values
        answer.add_done_callback(lambda answer: self._answer(batch, answer))

    def _input_values(self, calls: Sequence[QueuedCall]) -> dict[str, Any]:
        """Convert the inputs of calls to values of one call, by edge name."""
        arrays = _concatenate([call.inputs for call in calls])
        return {
            input_name: self._executor.arrays.from_elements(array, self._interface.call_edges[input_name])
            for input_name, array in arrays.items()
        }

    def _sizes(self, calls: Sequence[QueuedCall]) -> Mapping[str, int]:
        if len(calls) == 1 or not isinstance(self._batch_symbol, str):
            return calls[0].sizes
        return {**calls[0].sizes, self._batch_symbol: sum(call.batch_size for call in calls)}

    def _known(self, version: StageVersion | None) -> StageVersion:
        """The version that a call is for. Processes that were started again have the newest one under another number."""
        newest = self._executor.version
        return newest if version in (None, newest) or version.identity == newest.identity else version

    def _state(self, call: QueuedCall) -> CallSequence | None:
        if call.sequence is None:
            return None
        if call.sequence.state is None:
            call.sequence.state = self._executor.begin_sequence(self._known(call.sequence.version))
        return call.sequence.state

    def _answer(self, batch: CallBatch, answer: "Future[dict[str, Any]]") -> None:
        """Set the answers of a batch whose stages have run."""
        batch.times.results = time.monotonic()
        try:
            # The value of a sequence may be a view of the state that later calls write.
            copies = self._executor.returns_state and batch.calls[0].sequence is not None
            outputs = _output_arrays(self._interface, answer.result(), copies=copies)
        except Exception as error:  # noqa: BLE001 - the caller gets any error that the model raises
            self._fail(batch, error)
            return
        batch.times.end = time.monotonic()
        self._run_times.append(batch.times.end - batch.times.start)
        try:
            self._on_end(batch)
            _set_answers(batch.calls, outputs)
        except Exception as bug:  # noqa: BLE001 - a bug here must not leave calls without an answer
            _refuse_calls(batch.calls, bug)
        self._end_batch(batch)

    def _fail(self, batch: CallBatch, error: Exception) -> None:
        """Refuse the only call of a batch, or run its calls alone, unless nobody waits for them."""
        if len(batch.calls) == 1:
            batch.calls[0].answer.set_exception(error)
        elif not batch.cancellation.done():
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
        calls[0].answer.set_result(outputs if calls[0].finish is None else calls[0].finish(outputs))
        return
    end_positions = itertools.accumulate(call.batch_size for call in calls)
    for call, end in zip(calls, end_positions, strict=True):
        answer = {output_name: array[end - call.batch_size : end] for output_name, array in outputs.items()}
        call.answer.set_result(answer)


def _output_arrays(interface: Interface, values: Mapping[str, Any], *, copies: bool) -> dict[str, Array]:
    """Convert the values after the last stage to the outputs of a batch, by output name."""
    outputs = {
        output_name: numpy.ascontiguousarray(to_elements(values[tensor.edge.name], tensor.edge))
        for output_name, tensor in interface.outputs.items()
    }
    return {output_name: array.copy() for output_name, array in outputs.items()} if copies else outputs
