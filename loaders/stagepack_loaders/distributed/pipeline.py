"""A bundle whose stages run in other processes, as one callable."""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from stagepack.errors import StageLostError, StagepackError
from stagepack.format.manifest import format_stage_count
from stagepack.format.reader import Bundle
from stagepack_loaders import example
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.distributed.control import ControlKind
from stagepack_loaders.distributed.handshake import StageFacts
from stagepack_loaders.distributed.microbatches import Microbatches
from stagepack_loaders.distributed.pipeline_processes import GroupLauncher, PipelineProcesses
from stagepack_loaders.distributed.status import ProcessStatus
from stagepack_loaders.exchange import array_ops_of_call
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.torch.arrays import TORCH_ARRAYS


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
