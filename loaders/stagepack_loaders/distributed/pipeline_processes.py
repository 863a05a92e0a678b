"""The processes of a pipeline: started, started again when one is lost, and ended with the pipeline."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from stagepack.errors import OptionError, StageLostError, StagepackError, repeated_error
from stagepack_loaders.distributed.front import FrontProcess

_LOGGER = logging.getLogger("stagepack")
# How long calls in flight have when the pipeline was not closed before this process ends, or before it is collected.
_FORGOTTEN_SECONDS = 1.0
# Between starts that fail, at first and at most.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0


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
