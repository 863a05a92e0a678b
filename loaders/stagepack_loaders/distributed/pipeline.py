"""A bundle whose stages run in other processes, as one callable."""

import weakref
from collections.abc import Collection
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from stagepack.errors import DeviceError, StagepackError
from stagepack.format.manifest import format_stage_count
from stagepack.format.reader import Bundle
from stagepack_loaders import example
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.distributed.group_launcher import GroupLauncher
from stagepack_loaders.distributed.meeting import StageFacts
from stagepack_loaders.distributed.microbatches import Microbatches
from stagepack_loaders.distributed.process_executor import ProcessExecutor
from stagepack_loaders.distributed.status import ProcessStatus
from stagepack_loaders.options import ProcessOptions
from stagepack_loaders.pipeline import CallablePipeline


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

    executor: ProcessExecutor

    def __init__(
        self,
        bundle: Bundle,
        launcher: GroupLauncher,
        types: Collection[type] = (),
        options: ProcessOptions = ProcessOptions(),  # noqa: B008 - frozen
        limit: ValueLimit | None = None,
    ) -> None:
        executor = ProcessExecutor(bundle, launcher, options.max_restarts, self._run_example)
        super().__init__(bundle, executor, types, limit)
        self.executor.start()
        # At the end of this process, too, whose threads must not wait for the other processes then.
        weakref.finalize(self, self.executor.end)
        if options.microbatch_size is not None:
            try:
                self.executor.divide = Microbatches(self, options.microbatch_size).submit
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
        return self.executor.restart_count

    @property
    def has_ended(self) -> bool:
        """Whether no call will be answered any more: a process is lost, and is not started again."""
        return self.executor.has_ended

    @property
    def stage_facts(self) -> tuple[StageFacts, ...]:
        """Where each stage runs, and what its process has read, in the order of the stages."""
        return self.executor.stage_facts

    @property
    def lost(self) -> StagepackError | None:
        """Why no call can be answered now; None while all processes live and have run the example."""
        return self.executor.lost

    def to(self, devices: Any) -> Self:
        """Refuse to move the stages; only stages in this process can be moved.

        Args:
            devices: see `Pipeline.to`.

        Raises:
            DeviceError: always.
        """
        raise DeviceError(
            f"cannot move to {devices}: the stages run in processes of their own: load the bundle again with devices="
        )

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
        return self._submit(None, args, kwargs)

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what each process has told last, by rank."""
        return self.executor.process_statuses()

    def close(self) -> None:
        """Answer the calls in flight, and end the processes. Later calls fail.

        Raises:
            OptionError: this is a callback of a call.
        """
        self.executor.close()

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

    def _run_example(self) -> None:
        inputs, _ = example.read_example(self)
        example.run_on_inputs(self, inputs)
