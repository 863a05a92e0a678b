"""Runs the stages of a bundle in other processes, which it starts, starts again when one is lost, and ends."""

# Long because calls, updates and restarts are under one lock.

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from stagepack.errors import ClosedError, OptionError, StageLostError, StagepackError, repeated_error
from stagepack.format.reader import Bundle
from stagepack_loaders.adapter_changes import AdapterChange
from stagepack_loaders.base import ArrayOps, SharedObjects
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.group_launcher import GroupLauncher
from stagepack_loaders.distributed.group_versions import GroupVersions
from stagepack_loaders.distributed.meeting import StageFacts
from stagepack_loaders.distributed.routes import FRONT_RANK, ControlKind
from stagepack_loaders.distributed.status import ProcessStatus
from stagepack_loaders.executor import DEFAULT_CALL, CallOptions, Executor, StageObserver
from stagepack_loaders.joint_versions import JointStages
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.versions import (
    CallSequence,
    StageVersion,
    UpdateSource,
    same_model,
    version_identity,
    version_name,
)

_LOGGER = logging.getLogger("stagepack")
# How long calls in flight have when the pipeline was not closed before this process ends, or before it is collected.
_FORGOTTEN_SECONDS = 1.0
# Between starts that fail, at first and at most.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# Restarts before it do not count: a process that is lost once a week is no reason to end.
_RESTART_WINDOW_SECONDS = 3600.0
# Sends values with the sizes of their symbols on their way.
SubmitValues = Callable[[Mapping[str, Any], Mapping[str, int]], "Future[dict[str, Any]]"]


class ProcessExecutor(JointStages, Executor):
    """Runs stages in processes of their own. Calls of many threads are answered in their order.

    Attributes:
        front: sends calls to the processes that were started last.
        restart_count: how often they were started again. The state of sequences is lost each time.
        has_ended: whether one is lost, and they are not started again.
        divide: sends a batch in parts; None to send each as a whole.
    """

    front: FrontProcess
    divide: "Callable[[Mapping[str, Any], Mapping[str, int], SubmitValues], Future[dict[str, Any]]] | None" = None

    def __init__(
        self, bundle: Bundle, launcher: GroupLauncher, max_restarts: int, run_example: Callable[[], None]
    ) -> None:
        self._versions = GroupVersions()
        self.begin(StageVersion(name=version_name(bundle), bundle=bundle))
        self._launcher = launcher
        self._max_restarts = max_restarts
        self._restart_times: deque[float] = deque(maxlen=max_restarts)
        # A method of a pipeline, which may be collected while this executor starts its processes again.
        self._run_example = weakref.WeakMethod(run_example)
        self._has_state = any(stage.state for stage in bundle.stages)
        self._has_started = False
        self._is_state_lost = False
        self._sequence_numbers = itertools.count(1)
        self._forgotten_sequences: deque[int] = deque()
        # The last reference to the pipeline may go in the thread that has the lock, which then calls `end`.
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._is_closed = False
        self._failure: StagepackError | None = None
        self._starting_thread: int | None = None
        self._process_id = os.getpid()

    @property
    def version(self) -> StageVersion:  # type: ignore[override] # the processes may be started again
        """See `Executor`."""
        return self.newest

    @property
    def arrays(self) -> ArrayOps:
        """See `Executor`."""
        return TORCH_ARRAYS

    @property
    def stage_facts(self) -> tuple[StageFacts, ...]:
        """Where each stage runs, and what its process has read, in the order of the stages."""
        return self.front.stage_facts

    @property
    def devices(self) -> tuple[str, ...]:
        """See `Executor`."""
        return tuple(facts.device for facts in self.stage_facts)

    @property
    def lost(self) -> StagepackError | None:
        """See `Executor`: None while all processes live and have run the example."""
        return self._failure or self.front.lost

    def submit(
        self,
        values: dict[str, Any],
        sizes: Mapping[str, int],
        sequence: CallSequence | None = None,
        options: CallOptions = DEFAULT_CALL,
    ) -> "Future[dict[str, Any]]":
        """See `Executor` and `FrontProcess.submit`. Waits while as many calls as allowed are in flight."""
        # For all parts of a batch.
        version = sequence.version if sequence is not None else options.version or self.version
        options = replace(options, version=version)
        if self.divide is not None and sequence is None:
            return self.divide(values, sizes, partial(self._submit_whole, options=options))
        return self._submit_whole(values, sizes, sequence, options)

    def _submit_whole(
        self,
        values: Mapping[str, Any],
        sizes: Mapping[str, int],
        sequence: CallSequence | None = None,
        options: CallOptions = DEFAULT_CALL,
    ) -> "Future[dict[str, Any]]":
        with suppress(IndexError):
            while True:
                self._end_sequence(self._forgotten_sequences.popleft())
        # Before the restarts are counted: if it is replaced meanwhile, it answers nothing.
        front = self.front
        self._check_ready()
        if sequence is None and self._is_state_lost:
            raise StageLostError("the state of the pipeline was lost with a process: call reset_state() to begin anew")
        if options.version is not None and options.version.group != self.version.group:
            lost = "version of the call" if sequence is None else "state of the sequence"
            raise StageLostError(f"the {lost} was lost with a process: begin another one")
        return front.submit(values, sizes, 0 if sequence is None else sequence.number, options)

    def begin_sequence(self, version: StageVersion | None = None) -> CallSequence:
        """See `Executor`. It has a number that the processes know."""
        return CallSequence(version=version or self.version, number=next(self._sequence_numbers))

    def end_sequence(self, sequence: CallSequence) -> None:
        """See `Executor`. The state of a lost process is free."""
        self._end_sequence(sequence.number)

    def forget_sequence(self, sequence: CallSequence) -> None:
        """See `Executor`."""
        self._forgotten_sequences.append(sequence.number)

    def _end_sequence(self, number: int) -> None:
        with suppress(StagepackError):
            self._command(ControlKind.END_SEQUENCE, sequence=number)

    @property
    def updated(self) -> JointStages:
        """See `Executor`."""
        return self

    def update(self, source: UpdateSource | AdapterChange, report: UpdateReport) -> None:
        """See `Executor`. The processes free the version before, unless a call is on its way there."""
        super().update(source, report)
        self._end_versions()

    def stage(self, source: UpdateSource | AdapterChange, report: UpdateReport, shared: SharedObjects) -> StageVersion:
        """See `JointStages`. When a process is lost meanwhile, all of them have the version before, also those that are started again."""
        self._check_ready()
        front, running, kept = self.front, self.newest, self.kept
        front.refuse_waiting()
        try:
            if isinstance(source, AdapterChange):
                return self._versions.stage_adapters(front, running, source.apply(running.bundle), report)
            bundle = same_model(running.bundle, source)
            name = source.name or version_name(bundle)
            if kept is not None and kept.identity == version_identity(bundle, name):
                return kept
            with report.part("fetch"):
                place = self._launcher.find_version(bundle)
            return self._versions.stage_weights(front, running, bundle, name, place, report)
        finally:
            self._end_versions()

    def switching(self) -> AbstractContextManager[object]:
        """See `JointStages`: processes that are started again change it."""
        return self._lock

    def take_over(self, version: StageVersion) -> None:
        """See `JointStages`."""
        self._check_ready()
        if version.group != self.newest.group:
            raise StageLostError("the processes were started again")
        self.front.command(ControlKind.SWITCH_VERSION, version=version.number)
        if self.front.lost is not None:
            raise repeated_error(self.front.lost)
        self._launcher.use_version(version.bundle)

    def _end_versions(self) -> None:
        """Have the processes free the versions that nothing refers to."""
        with suppress(StagepackError):
            self._versions.end_unused(lambda number: self._command(ControlKind.END_VERSION, version=number))

    def reset_state(self) -> None:
        """See `Executor`."""
        self._command(ControlKind.RESET_STATE)
        self._is_state_lost = False

    def seed(self, seed: int) -> None:
        """See `Executor`. The generators of all processes get the same seed."""
        self._command(ControlKind.SEED, seed=seed)

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[None]:
        """See `Executor`. Calls never compute gradients."""
        return nullcontext()

    @contextmanager
    def trace(self) -> Iterator[RunTrace]:
        """See `Executor`."""
        self._check_ready()
        front = self.front
        front.refuse_waiting()
        run_trace = RunTrace(bundle=self.bundle.identity, processes=front.process_names)
        front.trace.start()
        try:
            yield run_trace
        except BaseException:
            with suppress(StageLostError):
                run_trace.spans, run_trace.dropped = front.trace.stop()
            raise
        run_trace.spans, run_trace.dropped = front.trace.stop()

    def overlapping(self, observe: StageObserver) -> "ProcessExecutor":
        """See `Executor`. The stages of different processes always do."""
        return self

    def process_statuses(self) -> dict[int, ProcessStatus]:
        """Return what each process has told last, by rank."""
        return self.front.statuses()

    def refuse_waiting(self) -> None:
        """See `Executor`."""
        self.front.refuse_waiting()

    def start(self) -> None:
        """Start the processes, and again while some are lost before they are ready, as often as allowed."""
        with self._lock:
            try:
                try:
                    self._start()
                except StageLostError as lost:
                    if (failure := self._try_again(repeated_error(lost))) is not None:
                        raise failure from None
            except BaseException:
                self._is_closed = True
                self._launcher.stop(wait=False)
                raise

    def _check_ready(self) -> None:
        """Refuse calls while the processes are started, but for those that prepare them, and calls of a fork of this process."""
        if self._is_forked():
            raise OptionError(
                "this process is a fork of the one that has loaded the pipeline: load the bundle here, too"
            )
        failure = self._failure
        if failure is not None and threading.get_ident() != self._starting_thread:
            raise repeated_error(failure)  # its traceback has the values of the call

    def close(self) -> None:
        """Answer the calls in flight, and end the processes. A start that is under way is given up."""
        if self._is_forked():
            return
        if not self._is_closed:
            self.front.refuse_waiting()
        self._give_up_start()
        with self._lock:
            if self._is_closed:
                return
            try:
                is_orderly = self.front.close()
                self._launcher.stop(wait=is_orderly)
            except BaseException:  # such as KeyboardInterrupt: the calls in flight are lost
                self._launcher.stop(wait=False)
                raise
            finally:
                self._is_closed = True
            self.front.join_threads()

    def end(self) -> None:
        """End the processes soon: nobody waits for their answers any more."""
        if self._is_forked():
            return
        self._give_up_start()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._launcher.stop(wait=self.front.close(_FORGOTTEN_SECONDS))
            self.front.join_threads()

    def _is_forked(self) -> bool:
        """Whether this is a fork of the process that has the threads and uses the connections."""
        return os.getpid() != self._process_id

    def _start(self) -> None:
        self._starting_thread = threading.get_ident()
        try:
            self.front = self._launcher.start(self._restart, self._check_open)
            self.chosen = self._launcher.chosen
            self.kept, self.newest = None, self._versions.begin_group(self.newest.name, self.front.bundle)
            self.front.after_answer = self._end_versions
            try:
                self._check_open()
                self._prepare()
            except BaseException:
                self._launcher.stop(wait=False)
                self.front.join_threads()
                raise
        finally:
            self._starting_thread = None

    def _prepare(self) -> None:
        """Run the recorded example in processes that have been started."""
        ranks = [facts.rank for facts in self.stage_facts]
        # One that each process works on, one that it takes next, and one that is answered.
        self.lane_count = len(set(ranks))
        self.most_calls = self.lane_count + 2
        self.returns_state = FRONT_RANK in ranks
        is_first_start = not self._has_started
        self._is_state_lost = False
        if (run_example := self._run_example()) is not None and self.bundle.example is not None:
            run_example()
            self.reset_state()
        # Each process has memory of its own for an input, also where two share theirs here.
        self.written_inputs = frozenset().union(*(facts.written_inputs for facts in self.stage_facts))
        self._is_state_lost = self._has_state and not is_first_start
        self._has_started = True

    def _command(self, kind: ControlKind, **fields: int) -> None:
        self._check_ready()
        self.front.command(kind, **fields)

    def _give_up_start(self) -> None:
        self._is_closing.set()
        if self._starting_thread is not None:  # it may run the example
            self.front.abort("the pipeline is closed")

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise ClosedError("the pipeline is closed")

    def _restart(self, lost: StageLostError) -> None:
        """Start all processes again, in a thread: the caller is a thread of the front that is lost."""
        threading.Thread(target=self._start_again, args=(lost,), name="restart", daemon=True).start()

    def _may_restart(self) -> bool:
        """Whether fewer restarts than allowed are within the window."""
        is_full = len(self._restart_times) == self._max_restarts
        return not is_full or (
            self._max_restarts > 0 and time.monotonic() - self._restart_times[0] > _RESTART_WINDOW_SECONDS
        )

    def _start_again(self, lost: StageLostError) -> None:
        with self._lock:
            if self._is_closed or self.front.lost is not lost:  # of a group that has been replaced since
                return
            self._launcher.stop(wait=False)
            self.front.join_threads()
            if self._try_again(lost) is not None:
                self._launcher.stop(wait=False)
                self.has_ended = True

    def _try_again(self, failure: StagepackError) -> StagepackError | None:
        """Start all processes again, as often as allowed, after a failure; return the last one, or None when they are ready."""
        self._failure = failure
        pause_seconds, start_time = 0.0, time.monotonic()
        while self._may_restart() and not self._is_closing.wait(pause_seconds):
            _LOGGER.warning("%r: %s; all processes are started again", str(self.bundle.path), self._failure)
            self._restart_times.append(time.monotonic())
            pause_seconds = min(max(2 * pause_seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._launcher.stop(wait=False)
            try:
                if isinstance(self._failure, StageLostError):
                    self._launcher.leave_out(self._failure)
                self._start()
            except StagepackError as error:
                self._failure = repeated_error(error)  # without its traceback, which has the pipeline
            except Exception as error:  # noqa: BLE001 - of the system; without this thread nobody would be told
                self._failure = StageLostError(f"the processes could not be started again: {error}")
            else:
                self.restart_count, self._failure = self.restart_count + 1, None
                seconds = time.monotonic() - start_time
                _LOGGER.info("%r: all processes are ready again, after %.1f s", str(self.bundle.path), seconds)
                return None
        return self._failure
