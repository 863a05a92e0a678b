"""A bundle whose stages run in other processes, as one callable."""

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from stagepack.errors import OptionError, StageLostError, StagepackError
from stagepack.format.reader import Bundle
from stagepack_loaders import example
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.callable_pipeline import CallablePipeline
from stagepack_loaders.distributed.control import ControlKind
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.handshake import StageFacts
from stagepack_loaders.distributed.microbatches import Microbatches
from stagepack_loaders.distributed.status import ProcessStatus
from stagepack_loaders.exchange import array_ops_of_call
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.torch.arrays import TORCH_ARRAYS


class GroupLauncher(Protocol):
    """What starts the processes of a pipeline, and starts them again."""

    def start(self, report_loss: Callable[[StageLostError], None]) -> FrontProcess:
        """Return the front of a new group, when all processes have loaded their stages.

        Args:
            report_loss: called when a process of the group is lost.

        Raises:
            StagepackError: the processes could not be started, or could not load their stages.
        """

    def stop(self, *, wait: bool) -> None:
        """End the processes of the last group.

        Args:
            wait: they are about to end by themselves.
        """


class DistributedPipeline(CallablePipeline):
    """A bundle whose stages run in other processes: called like the model, it returns what the model returns.

    It may be called from many threads at once; then stages work on several requests at the same time. Requests are answered in their
    order. Random operators of different stages draw from generators of their own.

    Attributes:
        manifest: the manifest of the bundle.
        bundle: the bundle.
        generation: how often the processes were started again. The state of sequences is lost each time.
        has_ended: whether no call will be answered any more: a process is lost, and is not started again.

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
    ) -> None:
        """Start the processes, and run the recorded example in them.

        Args:
            bundle: the bundle.
            launcher: starts the processes.
            types: classes that results may be built of, where the bundle names them.
            max_restarts: how often the processes are started again after one was lost.
            microbatch_size: batches of more rows are cut into parts of at most so many; None to leave them whole.

        Raises:
            OptionError: the rows of a batch depend on each other, so that it cannot be cut.
            StagepackError: the processes could not be started, or could not load their stages.
        """
        super().__init__(bundle.manifest, types)
        self.bundle = bundle
        self._launcher = launcher
        self.generation = 0
        self.has_ended = False
        self._is_state_lost = False
        self._restarts_left = max_restarts
        self._sequence_numbers = itertools.count(1)
        self._generation_of_sequence: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: StagepackError | None = None
        self._starting_thread: int | None = None
        self._microbatches: Microbatches | None = None
        with self._lock:  # a process that is lost meanwhile is not started again: the caller gets the error
            try:
                self._start()
                if microbatch_size is not None:
                    self._microbatches = Microbatches(bundle, self, microbatch_size)
            except BaseException:
                self._is_closed = True
                launcher.stop(wait=False)
                raise

    @property
    def arrays(self) -> ArrayOps:
        """See `CallablePipeline`."""
        return TORCH_ARRAYS

    @property
    def devices(self) -> tuple[str, ...]:
        """See `CallablePipeline`."""
        return tuple(facts.device for facts in self._front.stage_facts)

    @property
    def stage_facts(self) -> tuple[StageFacts, ...]:
        """Where each stage runs, and what its process has read, in the order of the stages."""
        return self._front.stage_facts

    @property
    def lost(self) -> StagepackError | None:
        """Why no call can be answered now; None while all processes live and have run the example."""
        return self._failure or self._front.lost

    def run_values(self, values: dict[str, Any], sizes: Mapping[str, int]) -> None:
        """See `CallablePipeline`."""
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

    def sequence(self) -> "PipelineSequence":
        """Return the pipeline with state of its own, for models that keep state between calls, such as key-value caches."""
        return PipelineSequence(self, next(self._sequence_numbers))

    def submit_values(
        self, values: Mapping[str, Any], sizes: Mapping[str, int], sequence: int = 0
    ) -> "Future[dict[str, Any]]":
        """Send a request on its way; see `FrontProcess.submit`. A large batch goes in parts, if it may be cut."""
        if self._microbatches is not None and not sequence:
            return self._microbatches.submit(values, sizes, self._submit_values)
        return self._submit_values(values, sizes, sequence)

    def _submit_values(
        self, values: Mapping[str, Any], sizes: Mapping[str, int], sequence: int = 0
    ) -> "Future[dict[str, Any]]":
        front = self._front  # before the generation is looked at: if it is replaced meanwhile, it answers nothing
        self._check_started()
        if not sequence and self._is_state_lost:
            raise StageLostError("the state of the pipeline was lost with a process: call reset_state() to begin anew")
        if sequence and self._generation_of_sequence.setdefault(sequence, self.generation) != self.generation:
            raise StageLostError("the state of the sequence was lost with a process: begin another one")
        return front.submit(values, sizes, sequence)

    def end_sequence(self, sequence: int) -> None:
        """Free the state of a sequence. That of a lost process is free."""
        self._generation_of_sequence.pop(sequence, None)
        with suppress(StageLostError):
            self._command(ControlKind.END_SEQUENCE, sequence=sequence)

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what each process has told last, by rank."""
        return self._front.statuses()

    def inference(self) -> AbstractContextManager[None]:
        """See `CallablePipeline`. Calls never compute gradients."""
        return nullcontext()

    @contextmanager
    def trace(self) -> Iterator[RunTrace]:
        """See `CallablePipeline`. Requests that are in flight at its begin are not in it.

        Raises:
            OptionError: a trace is on.
            StageLostError: a process is lost.
        """
        self._check_started()
        front = self._front
        run_trace = RunTrace(bundle=self.bundle.digest, processes=front.process_names)
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
        """Answer the calls in flight, and end the processes. Later calls fail."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._launcher.stop(wait=self._front.close())

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
        result: Future[Any] = Future()

        def finish(answer: "Future[dict[str, Any]]") -> None:
            try:
                result.set_result(self._build_result(answer.result(), arrays))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                result.set_exception(error)

        self.submit_values(values, sizes, sequence).add_done_callback(finish)
        return result

    def _command(self, kind: ControlKind, *, sequence: int = 0, seed: int = 0) -> None:
        self._check_started()
        self._front.command(kind, sequence=sequence, seed=seed)

    def _check_started(self) -> None:
        """Refuse calls while the processes are started, but for those of the example.

        Raises:
            StagepackError: why the processes are not there.
        """
        if self._failure is not None and threading.get_ident() != self._starting_thread:
            raise self._failure

    def _start(self) -> None:
        """Start the processes, and run the recorded example in them."""
        self._starting_thread = threading.get_ident()
        try:
            self._front = self._launcher.start(self._restart)
            self._is_state_lost = False
            if self.bundle.example is not None:
                inputs, _ = example.read_example(self, self.bundle)
                example.run_on_inputs(self, inputs)
                self.reset_state()
        finally:
            self._starting_thread = None

    def _restart(self, lost: StageLostError) -> None:
        """Start all processes again, in a thread: the caller is a thread of the front that is lost."""
        threading.Thread(target=self._start_again, args=(lost,), name="restart", daemon=True).start()

    def _start_again(self, lost: StageLostError) -> None:
        with self._lock:
            if self._is_closed or self._front.lost is not lost:  # of a group that has been replaced since
                return
            self._failure = lost
            while self._restarts_left:
                self._restarts_left -= 1
                self._launcher.stop(wait=False)
                try:
                    self._start()
                except StagepackError as error:
                    self._failure = error
                except Exception as error:  # noqa: BLE001 - of the system; without this thread nobody would be told
                    self._failure = StageLostError(f"the processes could not be started again: {error}")
                else:
                    self._is_state_lost = any(stage.state for stage in self.bundle.stages)
                    self.generation += 1
                    self._failure = None
                    return
            self._launcher.stop(wait=False)
            self.has_ended = True


class PipelineSequence:
    """A distributed pipeline with state of its own. Made by `DistributedPipeline.sequence`.

    Examples:
        >>> with pipeline.sequence() as chat:
        ...     logits = chat(prompt, position)
    """

    def __init__(self, pipeline: DistributedPipeline, number: int) -> None:
        """Name the state that is used."""
        self._pipeline = pipeline
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline; see `CallablePipeline`."""
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call the pipeline without waiting for the result; see `DistributedPipeline.submit`."""
        if not self._number:
            raise OptionError("the sequence is closed: make another one by pipeline.sequence()")
        return self._pipeline.submit_call(args, kwargs, self._number)

    def close(self) -> None:
        """Free the state."""
        number, self._number = self._number, 0
        if number:
            self._pipeline.end_sequence(number)

    def __enter__(self) -> Self:
        """Return the sequence itself; `close` is called at the end of the context."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free the state."""
        self.close()
