"""A bundle whose stages run in other processes, as one callable.

- The processes of a pipeline: started, started again when one is lost, and ended with the pipeline.
- Cut large batches into smaller ones, which go through the stages one behind the other, and join their results.
"""

# Long because the pipeline, its processes and its microbatches share the state of the requests under way.

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from stagepack.errors import OptionError, StageLostError, StagepackError, repeated_error
from stagepack.format.manifest import format_stage_count
from stagepack.format.reader import Bundle
from stagepack.format.tree import value_names
from stagepack.graph.rows.batch import batch_dimension, end_edges
from stagepack_loaders import example
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.batching import batch_limit
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.meeting import StageFacts
from stagepack_loaders.distributed.routes import ControlKind
from stagepack_loaders.distributed.status import ProcessStatus
from stagepack_loaders.exchange import array_ops_of_call
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

_LOGGER = logging.getLogger("stagepack")
# How long calls in flight have when the pipeline was not closed before this process ends, or before it is collected.
_FORGOTTEN_SECONDS = 1.0
# Between starts that fail, at first and at most.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# Sends values with the sizes of their symbols on their way.
SubmitValues = Callable[[Mapping[str, Any], Mapping[str, int]], "Future[dict[str, Any]]"]


class GroupLauncher(Protocol):
    """What starts the processes of a pipeline, and starts them again."""

    def start(self, report_loss: Callable[[StageLostError], None], check: Callable[[], None]) -> FrontProcess:
        """Return the front of a new group, when all processes have loaded their stages.

        Args:
            report_loss: called when a process of the group is lost.
            check: called while this process waits for the others; raises when there is no use in waiting.

        Raises:
            StagepackError: the processes could not be started, or could not load their stages.
        """

    def stop(self, *, wait: bool) -> None:
        """End the processes of the last group.

        Args:
            wait: they are about to end by themselves.
        """


class PipelineProcesses:
    """The processes of one pipeline.

    Attributes:
        front: sends calls to the processes that were started last.
        restart_count: how often they were started again.
        has_ended: whether one is lost, and they are not started again.
    """

    front: FrontProcess

    def __init__(self, title: str, launcher: GroupLauncher, max_restarts: int, prepare: Callable[[], None]) -> None:
        self.restart_count = 0
        self.has_ended = False
        self._title = title
        self._launcher = launcher
        self._restarts_left = max_restarts
        self._prepare = weakref.WeakMethod(prepare)
        # The last reference to the pipeline may go in the thread that has the lock, which then calls `end`.
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._is_closed = False
        self._failure: StagepackError | None = None
        self._starting_thread: int | None = None
        self._process_id = os.getpid()

    @property
    def lost(self) -> StagepackError | None:
        """Why no call can be answered now; None while all processes live and are prepared."""
        return self._failure or self.front.lost

    def start(self) -> None:
        """Start the processes."""
        with self._lock:  # a process that is lost meanwhile is not started again: the caller gets the error
            try:
                self._start()
            except BaseException:
                self._is_closed = True
                self._launcher.stop(wait=False)
                raise

    def check_ready(self) -> None:
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
            try:
                self._check_open()
                if (prepare := self._prepare()) is not None:
                    prepare()
            except BaseException:
                self._launcher.stop(wait=False)
                self.front.join_threads()
                raise
        finally:
            self._starting_thread = None

    def _give_up_start(self) -> None:
        self._is_closing.set()
        if self._starting_thread is not None:  # it may run the example
            self.front.abort("the pipeline is closed")

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise StageLostError("the pipeline is closed")

    def _restart(self, lost: StageLostError) -> None:
        """Start all processes again, in a thread: the caller is a thread of the front that is lost."""
        threading.Thread(target=self._start_again, args=(lost,), name="restart", daemon=True).start()

    def _start_again(self, lost: StageLostError) -> None:
        with self._lock:
            if self._is_closed or self.front.lost is not lost:  # of a group that has been replaced since
                return
            self._failure = lost
            pause_seconds, start_time = 0.0, time.monotonic()
            while self._restarts_left and not self._is_closing.wait(pause_seconds):
                _LOGGER.warning("%s: %s; all processes are started again", self._title, self._failure)
                self._restarts_left -= 1
                pause_seconds = min(max(2 * pause_seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                self._launcher.stop(wait=False)
                self.front.join_threads()
                try:
                    self._start()
                except StagepackError as error:
                    self._failure = repeated_error(error)  # without its traceback, which has the pipeline
                except Exception as error:  # noqa: BLE001 - of the system; without this thread nobody would be told
                    self._failure = StageLostError(f"the processes could not be started again: {error}")
                else:
                    if self._is_closed:
                        return
                    self.restart_count += 1
                    self._failure = None
                    seconds = time.monotonic() - start_time
                    _LOGGER.info("%s: all processes are ready again, after %.1f s", self._title, seconds)
                    return
            self._launcher.stop(wait=False)
            self.front.join_threads()
            self.has_ended = True


class Microbatches:
    """Cuts batches of more than some rows, for a model whose rows do not depend on each other."""

    def __init__(self, bundle: Bundle, pipeline: CallablePipeline, size: int) -> None:
        edges = end_edges(bundle)
        symbol = batch_dimension(bundle, edges)
        if isinstance(symbol, str):
            raise OptionError(f"microbatch_size: batches of the model cannot be cut: {symbol}")
        if reason := batch_limit(bundle, edges, 2, pipeline).reason:
            raise OptionError(f"microbatch_size: batches of the model cannot be cut: {reason}")
        least = max(1, symbol.min or 0)
        if size < 2 * least - 1:
            raise OptionError(
                f"microbatch_size: expected at least {2 * least - 1}, so that each part has {least} rows, found {size}"
            )
        self._size = size
        self._symbol = symbol.name
        self._inputs = tuple(edge.name for edge in edges if edge.producer is None)
        results = set(value_names(bundle.entry_point.signature.result))
        self._results = tuple(edge.name for edge in edges if edge.name in results)

    def submit(
        self, values: Mapping[str, Any], sizes: Mapping[str, int], submit: SubmitValues
    ) -> "Future[dict[str, Any]]":
        """Send a batch on its way, in parts of as equal size as possible."""
        row_count = sizes[self._symbol]
        part_count = max(1, -(-row_count // self._size))
        if part_count == 1:
            return submit(values, sizes)
        bounds = [row_count * number // part_count for number in range(part_count + 1)]
        answers = [
            submit(
                dict(values) | {name: values[name][start:end] for name in self._inputs},
                dict(sizes) | {self._symbol: end - start},
            )
            for start, end in itertools.pairwise(bounds)
        ]
        return _joined(answers, lambda parts: dict(values) | self._join(parts))

    def _join(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            name: torch.cat([torch.as_tensor(part[name]) for part in parts])
            for name in self._results
            if name not in self._inputs
        }


def _joined(
    answers: "Sequence[Future[dict[str, Any]]]", join: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> "Future[dict[str, Any]]":
    """The answer of all parts together."""
    joined_answer: Future[dict[str, Any]] = Future()
    lock = threading.Lock()
    remaining = len(answers)

    def finish(_: "Future[dict[str, Any]]") -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if remaining:
                return
        try:
            joined_answer.set_result(join([answer.result() for answer in answers]))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            joined_answer.set_exception(error)

    for answer in answers:
        answer.add_done_callback(finish)
    return joined_answer


class CallFuture(Future[Any]):
    """The result of a call that was submitted. It cannot be cancelled: the stages work on it already."""

    def __init__(self, refuse_waiting: Callable[[], None]) -> None:
        super().__init__()
        self._refuse_waiting = refuse_waiting
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of the call; see `concurrent.futures.Future`."""
        if not self.done():
            self._refuse_waiting()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call; see `concurrent.futures.Future`."""
        if not self.done():
            self._refuse_waiting()
        return super().exception(timeout)


class DistributedPipeline(CallablePipeline):
    """A bundle whose stages run in other processes: called like the model, it returns what the model returns.

    It may be called from many threads at once; then stages work on several requests at the same time. Requests are answered in their
    order. Random operators of different stages draw from generators of their own.

    Attributes:
        bundle: the bundle, at the entry point that runs.
        entry_point: the entry point.

    Examples:
        >>> with stagepack.load("m.stagepack", processes=True) as pipeline:
        ...     logits = pipeline(input_ids)
        ...     answers = [pipeline.submit(ids) for ids in batches]
        ...     results = [answer.result() for answer in answers]
    """

    def __init__(
        self,
        bundle: Bundle,
        launcher: GroupLauncher,
        types: Collection[type] = (),
        max_restarts: int = 0,
        microbatch_size: int | None = None,
        limit: ValueLimit | None = None,
    ) -> None:
        super().__init__(bundle, types, limit)
        self._is_state_lost = False
        self._is_restarted = False
        self._sequence_numbers = itertools.count(1)
        self._restart_count_of_sequence: dict[int, int] = {}
        self._forgotten_sequences: deque[int] = deque()
        self._microbatches: Microbatches | None = None
        self._processes = PipelineProcesses(repr(str(bundle.path)), launcher, max_restarts, self._prepare)
        self._processes.start()
        # At the end of this process, too, whose threads must not wait for the other processes then.
        weakref.finalize(self, self._processes.end)
        # Each process has memory of its own for an input, also where two share theirs here.
        self._written_inputs = frozenset(name for facts in self.stage_facts for name in facts.written_inputs)
        if microbatch_size is not None:
            try:
                self._microbatches = Microbatches(bundle, self, microbatch_size)
            except BaseException:
                self.close()
                raise

    def __repr__(self) -> str:
        """The folder of the bundle, and whether calls are answered."""
        state = "ended" if self.has_ended else f"lost: {self.lost}" if self.lost else "ready"
        return f"<DistributedPipeline {self.bundle.location!r}, {format_stage_count(len(self.bundle.stages))}, {state}>"

    @property
    def restart_count(self) -> int:
        """How often the processes were started again. The state of sequences is lost each time."""
        return self._processes.restart_count

    @property
    def has_ended(self) -> bool:
        """Whether no call will be answered any more: a process is lost, and is not started again."""
        return self._processes.has_ended

    @property
    def arrays(self) -> ArrayOps:
        """See `CallablePipeline`."""
        return TORCH_ARRAYS

    @property
    def devices(self) -> tuple[str, ...]:
        """See `CallablePipeline`."""
        return tuple(facts.device for facts in self._processes.front.stage_facts)

    @property
    def stage_facts(self) -> tuple[StageFacts, ...]:
        """Where each stage runs, and what its process has read, in the order of the stages."""
        return self._processes.front.stage_facts

    @property
    def lost(self) -> StagepackError | None:
        """Why no call can be answered now; None while all processes live and have run the example."""
        return self._processes.lost

    def run_values(self, values: dict[str, Any], sizes: Mapping[str, int]) -> None:
        """See `CallablePipeline`."""
        self._processes.front.refuse_waiting()
        values.update(self.submit_values(values, sizes).result())

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call the pipeline without waiting for the result. Waits while as many calls as allowed are in flight.

        Args:
            *args: the arguments of the model. They must not be written before the result is there.
            **kwargs: its keyword arguments.

        Returns:
            The result of the model, or the error of the call.

        Raises:
            InputError: the call does not fit the signature, or an input does not fit its type, shape or range.
            StageLostError: a process is lost.
        """
        return self.submit_call(args, kwargs, sequence=0)

    def sequence(self) -> PipelineSequence:
        """See `CallablePipeline`. Sequences of several threads run at the same time, in different stages."""
        number = self.begin_sequence()
        return PipelineSequence(
            partial(self.submit_call, sequence=number),
            partial(self.end_sequence, number),
            partial(self._forgotten_sequences.append, number),
        )

    def submit_values(
        self, values: Mapping[str, Any], sizes: Mapping[str, int], sequence: int = 0, *, copies_results: bool = True
    ) -> "Future[dict[str, Any]]":
        """Send a request on its way; see `FrontProcess.submit`. A large batch goes in parts, if it may be cut."""
        if self._microbatches is not None and not sequence:
            return self._microbatches.submit(values, sizes, self._submit_values)
        return self._submit_values(values, sizes, sequence, copies_results=copies_results)

    def _submit_values(
        self, values: Mapping[str, Any], sizes: Mapping[str, int], sequence: int = 0, *, copies_results: bool = True
    ) -> "Future[dict[str, Any]]":
        with suppress(IndexError):
            while True:
                self.end_sequence(self._forgotten_sequences.popleft())
        # Before the restarts are counted: if it is replaced meanwhile, it answers nothing.
        front = self._processes.front
        self._processes.check_ready()
        if not sequence and self._is_state_lost:
            raise StageLostError("the state of the pipeline was lost with a process: call reset_state() to begin anew")
        if sequence and self._restart_count_of_sequence.setdefault(sequence, self.restart_count) != self.restart_count:
            raise StageLostError("the state of the sequence was lost with a process: begin another one")
        return front.submit(values, sizes, sequence, copies_results=copies_results)

    def begin_sequence(self) -> int:
        """Return the number of a new sequence, for `submit_values` and `end_sequence`."""
        return next(self._sequence_numbers)

    def end_sequence(self, sequence: int) -> None:
        """Free the state of a sequence, of which no request is submitted any more. That of a lost process is free."""
        self._restart_count_of_sequence.pop(sequence, None)
        with suppress(StagepackError):
            self._command(ControlKind.END_SEQUENCE, sequence=sequence)

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what each process has told last, by rank."""
        return self._processes.front.statuses()

    def inference(self) -> AbstractContextManager[None]:
        """See `CallablePipeline`. Calls never compute gradients."""
        return nullcontext()

    @contextmanager
    def trace(self) -> Iterator[RunTrace]:
        """See `CallablePipeline`. Requests that are in flight at its begin are not in it.

        Raises:
            OptionError: a trace is on, or this is a callback of a call.
            StageLostError: a process is lost.
        """
        self._processes.check_ready()
        front = self._processes.front
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

    def seed(self, seed: int) -> None:
        """See `CallablePipeline`. The generators of all processes get the same seed."""
        self._command(ControlKind.SEED, seed=seed)

    def reset_state(self) -> None:
        """See `CallablePipeline`."""
        self._command(ControlKind.RESET_STATE)
        self._is_state_lost = False

    def close(self) -> None:
        """Answer the calls in flight, and end the processes. Later calls fail.

        Raises:
            OptionError: this is a callback of a call.
        """
        self._processes.close()

    def __enter__(self) -> Self:
        """Return the pipeline itself; `close` is called at the end of the context."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pipeline."""
        self.close()

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse to be pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError("a pipeline cannot be pickled: pass on the path of the bundle, and load it there")

    def submit_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequence: int) -> "Future[Any]":
        """Call the pipeline with the state of a sequence; see `submit`."""
        values, sizes = self._bind_values(args, kwargs)
        arrays = array_ops_of_call(values.values(), self.arrays)
        result = CallFuture(self._processes.front.refuse_waiting)

        def finish(answer: "Future[dict[str, Any]]") -> None:
            try:
                result.set_result(self._build_result(answer.result(), arrays))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                result.set_exception(error)

        self.submit_values(values, sizes, sequence).add_done_callback(finish)
        return result

    def _command(self, kind: ControlKind, *, sequence: int = 0, seed: int = 0) -> None:
        self._processes.check_ready()
        self._processes.front.command(kind, sequence=sequence, seed=seed)

    def _prepare(self) -> None:
        """Run the recorded example in processes that have been started."""
        self._is_state_lost = False
        if self.bundle.example is not None:
            inputs, _ = example.read_example(self, self.bundle)
            example.run_on_inputs(self, inputs)
            self.reset_state()
        self._is_state_lost = self._is_restarted and any(stage.state for stage in self.bundle.stages)
        self._is_restarted = True
