"""Notice that another process of a training is gone, and end what waits for it with an error that names it.

Process 0 hears all others (`GroupWatch`) and tells them which one is gone; they notice themselves when process 0 is.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch.distributed import ProcessGroup as TorchGroup

from stagepack.errors import StageLostError, repeated_error
from stagepack_loaders.distributed.meeting import Members
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.status import (
    ErrorReport,
    ProcessClosed,
    ProcessLost,
    ProcessStatus,
    StatusSender,
    receive_status,
    report_error,
)
from stagepack_loaders.distributed.watch import HEARTBEAT_SECONDS, LOST_STATUS, FrontWatch, GroupWatch, WatchEvents
from stagepack_train.torch_meeting import abort_group

# How long a step whose groups are closed may go on before the process is ended: it may wait where no error reaches it.
_END_SECONDS = 4.0
# How long an error of a group may be ahead of the message that says which process is gone.
_EXPLANATION_SECONDS = 2.0
_CLOSE_SECONDS = 1.0
_ENDED_TEXT = "has ended its training"


class ProcessWatch:
    """Hears whether the other processes of a training live. `lost` is the loss of one; None while all live."""

    def __init__(self, members: Members, groups: Sequence[TorchGroup | None], *, silence_seconds: float) -> None:
        self.lost: StageLostError | None = None
        self._members = members
        self._groups = groups
        self._is_in_step = False
        self._is_loss_expected = False
        self._is_closed = False
        self._lock = threading.Lock()
        # Threads that tell the other processes, by rank, which process is gone.
        self._tellers: dict[int, threading.Thread] = {}
        self._watch: GroupWatch | FrontWatch
        group = members.group
        if group.rank == FRONT_RANK:
            self._senders = {rank: StatusSender(group, rank) for rank in range(1, group.size)}
            events = WatchEvents(report_loss=self._lose, report_close=self._record_close)
            self._watch = GroupWatch(members, events, silence_seconds)
            self._threads = list(self._watch.threads)
        else:
            sender = StatusSender(group)
            self._senders = {FRONT_RANK: sender}
            self._watch = FrontWatch(
                sender,
                ProcessStatus,
                report_loss=lambda _: None,  # `_hear_front` says why
                report_silence=self._lose_silent_front,
                silence_seconds=silence_seconds,
            )
            self._threads = [*self._watch.threads, _start(self._hear_front)]
        # Threads that wait in gloo at the end of the interpreter would abort it.
        atexit.register(self.close)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run what waits for other processes in this context."""
        self.check()
        self._is_in_step = True
        try:
            yield
        except RuntimeError as error:
            self._await_explanation()
            if self.lost is None:
                raise
            raise repeated_error(self.lost) from error
        finally:
            self._is_in_step = False

    def close(self, error: BaseException | None = None) -> None:
        """Tell the others that this process ends, with the error that ends it, and stop to listen."""
        atexit.unregister(self.close)
        if self._is_closed:
            return
        self._is_closed = True
        error = error or getattr(sys, "last_value", None)
        report = report_error(error) if isinstance(error, Exception) else None
        if isinstance(self._watch, GroupWatch):
            self._watch.expect_close()
        else:
            self._watch.is_closed.set()
        closers = [_start(self._tell_close, rank, report) for rank in self._senders]
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in (*closers, *self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._members.group.abort()
        for thread in (*closers, *self._threads):
            thread.join(_CLOSE_SECONDS)

    def check(self) -> None:
        """Raise the error of a process that is gone."""
        if self.lost is not None:
            raise repeated_error(self.lost)

    def _await_explanation(self) -> None:
        deadline = time.monotonic() + _EXPLANATION_SECONDS
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 10)

    def _lose(self, lost: StageLostError, *, is_expected: bool = False) -> None:
        """Remember which process is gone, tell the others, and close all groups unless it has ended by itself."""
        with self._lock:
            if self._is_closed or (self.lost is not None and (is_expected or not self._is_loss_expected)):
                return
            if self._members.group.rank == FRONT_RANK:
                message = ProcessLost.of(lost, is_expected=is_expected)
                self._tellers = {rank: _start(_send_quietly, sender, message) for rank, sender in self._senders.items()}
            self._is_loss_expected = is_expected
            self.lost = lost  # last: this process may end as soon as it is seen, and the end waits for the tellers that are there
        if not is_expected:
            _start(self._end_step)

    def _lose_front(self, reason: str) -> None:
        self._lose(self._members.lost_error(FRONT_RANK, f"is lost: {reason}"))

    def _lose_silent_front(self, seconds: float) -> None:
        if self.lost is None:  # else process 0 may have ended by itself
            self._lose_front(f"it has taken no heartbeat for {seconds:.1f} s")

    def _end_step(self) -> None:
        """Close all groups, so that a step that waits in one ends with an error; after a while, end the process."""
        for group in self._groups:
            abort_group(group)
        deadline = time.monotonic() + _END_SECONDS
        while self._is_in_step:
            if time.monotonic() > deadline:
                sys.stderr.write(f"stagepack: {self.lost}\n")
                sys.stderr.flush()
                os._exit(LOST_STATUS)
            time.sleep(HEARTBEAT_SECONDS / 10)

    def _record_close(self, rank: int) -> None:
        """A process has ended by itself. It is an error only if others go on training."""
        _start(self._tell_close, rank, None)
        self._lose(self._members.lost_error(rank, _ENDED_TEXT), is_expected=True)

    def _tell_close(self, rank: int, error: ErrorReport | None) -> None:
        if rank in self._tellers:
            self._tellers[rank].join()  # else the other process would take the end of this one for the cause
        with contextlib.suppress(ConnectionLostError):
            self._senders[rank].close(error)

    def _hear_front(self) -> None:
        """Take what process 0 tells, until it ends."""
        try:
            while True:
                status = receive_status(self._members.group, FRONT_RANK)
                if isinstance(status, ProcessLost):
                    self._lose(status.rebuild(), is_expected=status.is_expected)
                elif isinstance(status, ProcessClosed):
                    break
        except ConnectionLostError as error:
            self._lose_front(str(error))
            return
        self._tell_close(FRONT_RANK, None)
        if status.error is None:
            self._lose(self._members.lost_error(FRONT_RANK, _ENDED_TEXT), is_expected=True)
        else:
            self._lose_front(f"it ended with {status.error.class_name}: {status.error.message}")


def _start(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name="training-watch", daemon=True)
    thread.start()
    return thread


def _send_quietly(sender: StatusSender, message: ProcessLost) -> None:
    with contextlib.suppress(ConnectionLostError):
        sender.send(message)
