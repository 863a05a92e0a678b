"""What runs the stages of a loaded bundle on values that are known to fit: `Executor`, and the one whose stages are in this process."""

# Long because the documentation of the abstract executor is.
import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from stagepack.errors import ClosedError, StageLostError, StagepackError, repeated_error
from stagepack.format.aliasing import written_inputs
from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack.format.tree import value_names
from stagepack.partition.placement import Placement
from stagepack_loaders.adapter_changes import AdapterChange
from stagepack_loaders.base import ArrayOps, LoadedStage
from stagepack_loaders.joint_versions import JointStages
from stagepack_loaders.lanes import Tasks, device_lanes, end_threads, run_tasks, thread_end_text
from stagepack_loaders.local_versions import LocalVersions
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.spans import SpanRecorder
from stagepack_loaders.stages import StageDriver
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import CallSequence, StageVersion, UpdateSource

# Called with the number of a stage that has run, and for how many seconds.
StageObserver = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How a call is run.

    Attributes:
        copies_results: False for a caller who soon drops the results, and does not fork: large ones may be in memory that is shared with
            other processes, of which there is little.
        cancellation: done when nobody waits for the results any more. The call then ends before its next stage, with `CancelledError`.
        version: the version that a call without a sequence runs on; None for the newest.
    """

    copies_results: bool = True
    cancellation: "Future[None] | None" = None
    version: StageVersion | None = None

    def check(self) -> None:
        """Raise `CancelledError` if nobody waits for the results."""
        if self.cancellation is not None and self.cancellation.done():
            raise CancelledError


DEFAULT_CALL = CallOptions()


class Executor(ABC):
    """Runs the stages of a bundle on values that fit the boundary contract, and keeps the state of sequences.

    Attributes:
        version: the newest version of the stages, which calls and sequences to come run on.
        chosen: their placement, if it was chosen.
        written_inputs: the inputs of the model that a stage writes into.
        most_calls: how many calls at the same time keep all stages at work. With few, calls gather meanwhile, and become larger batches.
        lane_count: the number of devices or processes, each of which works on a call of its own.
        has_ended: whether no call will be answered any more.
        restart_count: changes when the state of all sequences is lost.
        returns_state: whether a result may be a view of the state of its sequence, which the next call writes.
    """

    version: StageVersion
    chosen: Placement | None = None
    written_inputs: frozenset[str] = frozenset()
    most_calls: int = 1
    lane_count: int = 1
    has_ended: bool = False
    restart_count: int = 0
    returns_state: bool = True

    @property
    def bundle(self) -> Bundle:
        """The bundle of the newest version, in the stages that run."""
        return self.version.bundle

    @property
    @abstractmethod
    def arrays(self) -> ArrayOps:
        """The operations on arrays of the runtime of the first stage."""

    @property
    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """The device of each stage."""

    @property
    def lost(self) -> StagepackError | None:
        """Why no call can be answered now; None while calls can."""
        return None

    @abstractmethod
    def submit(
        self,
        values: dict[str, Any],
        sizes: Mapping[str, int],
        sequence: CallSequence | None = None,
        options: CallOptions = DEFAULT_CALL,
    ) -> "Future[dict[str, Any]]":
        """Run all stages.

        Args:
            values: the inputs of the model by edge name; the executor may remove some.
            sizes: the sizes of the symbols that the inputs determine.
            sequence: what `begin_sequence` returned; None for the state of the stages themselves.
            options: how the call is run.

        Returns:
            The values after the last stage, with all results of the model. An error is set in the future, or raised at once.
        """

    def run(self, values: dict[str, Any], sizes: Mapping[str, int], version: StageVersion) -> dict[str, Any]:
        """Run all stages of a version, and wait for the values; see `submit`."""
        self.refuse_waiting()
        return self.submit(values, sizes, options=CallOptions(version=version)).result()

    def begin_sequence(self, version: StageVersion | None = None) -> CallSequence:
        """Return state of its own for a sequence of calls, on the newest version or another one."""
        return CallSequence(version=version or self.version)

    @abstractmethod
    def end_sequence(self, sequence: CallSequence) -> None:
        """Free the state of a sequence, of which no call is submitted any more."""

    def forget_sequence(self, sequence: CallSequence) -> None:
        """Free the state of a sequence that was collected. Called in any thread, which may hold any lock."""
        self.end_sequence(sequence)

    @property
    @abstractmethod
    def updated(self) -> JointStages:
        """The versions of its stages, which an update changes."""

    def update(self, source: UpdateSource | AdapterChange, report: UpdateReport) -> None:
        """Load a version beside the one that runs, and let calls and sequences to come run on it: here, and at the other entry points.

        Args:
            source: where its weights come from, or the adapter that it has more or less.
            report: gets the names of the versions, and the times of the parts.

        Raises:
            StagepackError: the version cannot be loaded; the one that runs is left as it is.
        """
        self.updated.joint.update(source, report)

    @abstractmethod
    def reset_state(self) -> None:
        """Set the state of the stages themselves to their content at loading."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the random generators of all runtimes."""

    @abstractmethod
    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients; see `Runtime.inference`."""

    @abstractmethod
    def trace(self) -> AbstractContextManager[RunTrace]:
        """Return a context in which each process records what it does for each call. At most one at a time."""

    @abstractmethod
    def overlapping(self, observe: StageObserver) -> "Executor":
        """Return an executor whose stages on different devices work on several calls at the same time, without gradients.

        observe: called for each stage that has run in this process.
        """

    def process_statuses(self) -> Mapping[int, Any]:
        """Return what the processes of the stages report about themselves, by rank. Default: none, for stages in this process."""
        return {}

    def check_open(self) -> None:
        """Raise `ClosedError` if the executor is closed."""
        if isinstance(self.lost, ClosedError):
            raise repeated_error(self.lost)

    def refuse_waiting(self) -> None:  # noqa: B027 - a default
        """Refuse to wait for an answer in a thread that answers calls. Default: no thread does."""

    def close(self) -> None:  # noqa: B027 - a default
        """Answer the calls in flight, and end the processes or threads. Default: there are none."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call on its way through the lanes."""

    call_number: int
    values: dict[str, Any]
    version: StageVersion
    states: dict[int, Any] | None
    options: CallOptions
    answer: "Future[dict[str, Any]]" = field(default_factory=Future)


class LocalExecutor(Executor):
    """Runs stages in this process, in the thread that submits a call.

    With `observe`, consecutive stages on one device are a lane, and each lane but the first one has a thread of its own: while the second
    lane runs a call, the first one runs the next.

    Attributes:
        versions: the versions of the stages, which all their executors share.
        spans: records what the stages do.
        call_numbers: the numbers of the calls to come.
    """

    def __init__(
        self,
        bundle: Bundle,
        stages: Sequence[LoadedStage],
        observe: StageObserver | None = None,
        versions: LocalVersions | None = None,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    ) -> None:
        entry_point = bundle.entry_point
        self.versions = versions or LocalVersions(bundle, dict(enumerate(stages)), options)
        self.spans = SpanRecorder()
        self._runtimes = tuple(dict.fromkeys(stage.runtime for stage in self.stages))
        if len(self.stages) > 1:  # stages of other runtimes than torch check the inputs that they write
            graphs = [
                graph for stage in self.stages if isinstance(graph := getattr(stage.loaded, "graph", None), Graph)
            ]
            self.written_inputs = frozenset().union(*map(written_inputs, graphs))
        results = set(value_names(entry_point.signature.result))
        self._last_uses: list[list[str]] = [[] for _ in entry_point.stages]
        for edge in entry_point.edges:
            if edge.consumers and edge.name not in results:
                self._last_uses[edge.consumers[-1]].append(edge.name)
        self.call_numbers = itertools.count(1)
        self._lost: StageLostError | None = None
        self._observe = observe
        self._lanes = [list(range(len(self.stages)))] if observe is None else device_lanes(self.devices)
        self.lane_count = len(self._lanes)
        # One in each lane, and one between two of them.
        self.most_calls = 2 * self.lane_count - 1
        self._queues: list[Tasks] = [SimpleQueue() for _ in self._lanes[1:]]
        self._ended_lanes: dict[int, StageLostError] = {}
        for lane_number, queue in enumerate(self._queues, 1):
            arguments = (queue, self._queues[lane_number : lane_number + 1])
            threading.Thread(target=run_tasks, args=arguments, name=f"lane-{lane_number}", daemon=True).start()
        # Only tasks refer to the executor: when nobody closes it, its threads end with it, after the calls in flight.
        self._end = weakref.finalize(self, end_threads, self._queues[:1])

    @property
    def version(self) -> StageVersion:  # type: ignore[override] # all executors of the stages have the same one
        """See `Executor`."""
        return self.versions.newest

    @property
    def stages(self) -> tuple[StageDriver, ...]:
        """The stages of the newest version, in order."""
        return tuple(self.version.stages.values())

    @property
    def arrays(self) -> ArrayOps:
        """See `Executor`."""
        return self.stages[0].runtime.arrays

    @property
    def devices(self) -> tuple[str, ...]:
        """See `Executor`."""
        return tuple(str(stage.loaded.device) for stage in self.stages)

    @property
    def lost(self) -> StageLostError | None:
        """See `Executor`: a device or a thread that is lost."""
        return self._lost

    def submit(
        self,
        values: dict[str, Any],
        sizes: Mapping[str, int],
        sequence: CallSequence | None = None,
        options: CallOptions = DEFAULT_CALL,
    ) -> "Future[dict[str, Any]]":
        """See `Executor`. Sequences of several threads take turns."""
        self.check_open()
        if sequence is None:
            call = _Call(next(self.call_numbers), values, options.version or self.version, None, options)
        else:
            call = _Call(next(self.call_numbers), values, sequence.version, sequence.states, options)
        self._advance(call, 0)
        return call.answer

    def run(self, values: dict[str, Any], sizes: Mapping[str, int], version: StageVersion) -> dict[str, Any]:
        """See `Executor`. Without a future, which takes as long as the smallest stage."""
        self.check_open()
        call_number = next(self.call_numbers)
        for stage in version.stages.values():
            self._run_stage(stage, call_number, values, None)
        return values

    def end_sequence(self, sequence: CallSequence) -> None:
        """See `Executor`."""
        sequence.states.clear()

    @property
    def updated(self) -> LocalVersions:
        """See `Executor`."""
        return self.versions

    def reset_state(self) -> None:
        """See `Executor`."""
        self.check_open()
        for stage in self.stages:
            stage.reset_state()

    def seed(self, seed: int) -> None:
        """See `Executor`."""
        self.check_open()
        for runtime in self._runtimes:
            runtime.seed(seed)

    @contextmanager
    def inference(self, *, for_autograd: bool = True) -> Iterator[None]:
        """See `Executor`."""
        with ExitStack() as contexts:
            for runtime in self._runtimes:
                contexts.enter_context(runtime.inference(for_autograd=for_autograd))
            yield

    @contextmanager
    def trace(self) -> Iterator[RunTrace]:
        """See `Executor`. Moving values to the device of a stage counts as compute, converting them as transfer."""
        self.check_open()
        run_trace = RunTrace(bundle=self.bundle.identity, processes={0: "process 0"})
        self.spans.start()
        try:
            yield run_trace
        finally:
            run_trace.spans += self.spans.stop()
            run_trace.dropped = self.spans.dropped

    def overlapping(self, observe: StageObserver) -> "LocalExecutor":
        """See `Executor`. A trace of either executor has the calls of both."""
        executor = LocalExecutor(self.bundle, (), observe, self.versions)
        executor.spans, executor.call_numbers = self.spans, self.call_numbers
        return executor

    def close(self) -> None:
        """End the threads of the lanes after the calls in flight. Later calls are refused."""
        self._lost, self.has_ended = self._lost or ClosedError("the pipeline is closed"), True
        self._end()

    def _run_in_lane(self, call: _Call, lane_number: int) -> None:
        """Run a call on a lane, in the thread of that."""
        if lane_number in self._ended_lanes:
            call.answer.set_exception(repeated_error(self._ended_lanes[lane_number]))
            return
        try:
            self._advance(call, lane_number)
        except Exception as error:  # noqa: BLE001 - the caller gets any error that the model raises
            call.answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - such as SystemExit; without a word, all calls would wait for ever
            self._ended_lanes[lane_number] = lost = StageLostError(thread_end_text(lane_number, error))
            self._lose(lost)
            call.answer.set_exception(repeated_error(lost))

    def _advance(self, call: _Call, lane_number: int) -> None:
        """Run a call on a lane; then pass it to the next lane, or answer it."""
        with nullcontext() if self._observe is None else self.inference(for_autograd=False):
            for stage_number in self._lanes[lane_number]:
                call.options.check()
                stage = call.version.stages[stage_number]
                self._run_stage(stage, call.call_number, call.values, call.states)
        if lane_number < len(self._queues):
            self._queues[lane_number].put(partial(self._run_in_lane, call, lane_number + 1))
        else:
            call.answer.set_result(call.values)

    def _run_stage(
        self, stage: StageDriver, call_number: int, values: dict[str, Any], states: dict[int, Any] | None
    ) -> None:
        start_time = time.perf_counter()
        with self.spans.span("transfer", call_number, stage.number):
            inputs = stage.take_inputs(values)
        waits = self._observe is not None or self.spans.is_on
        try:
            with self.spans.span("compute", call_number, stage.number):
                outputs = stage.run(inputs, states, waits=waits)
        except StageLostError as error:
            self._lose(error)
            raise
        values.update(zip(stage.outputs, outputs, strict=True))
        for edge_name in self._last_uses[stage.number]:  # their memory is freed
            del values[edge_name]
        if self._observe is not None:
            self._observe(stage.number, time.perf_counter() - start_time)

    def _lose(self, error: StageLostError) -> None:
        self._lost, self.has_ended = repeated_error(error), True  # its traceback has the values of the call
