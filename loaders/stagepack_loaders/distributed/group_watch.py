"""Hears whether the other processes of a pipeline live, and finds out which one is lost, and why."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stagepack.errors import StageLostError
from stagepack_loaders.distributed.group_trace import SpanReport
from stagepack_loaders.distributed.handshake import is_follower
from stagepack_loaders.distributed.membership import Membership
from stagepack_loaders.distributed.process_end import ProcessEnd, stages_text
from stagepack_loaders.distributed.process_group import ConnectionLostError
from stagepack_loaders.distributed.stage_process import HEARTBEAT_SECONDS
from stagepack_loaders.distributed.status import ProcessClosed, ProcessStatus, RequestError, receive_status

# A process that has sent no heartbeat for so long is lost: it was stopped, or its host is gone.
_SILENCE_SECONDS = 4.0
# How long the launcher gets to say with which status a process ended, after its connection broke.
_EXIT_SECONDS = 1.0
_CLOSE_SECONDS = 0.01


class GroupWatch:
    """The heartbeats of the other processes of a group.

    Attributes:
        lost: which process is lost; None while all live.
        statuses: what each process has told last, by rank.
        threads: those that hear the processes; they end when these have closed.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        find_end: Callable[[int], ProcessEnd | None] | None,
        find_stalled: Callable[[], tuple[int, float] | None],
        record_status: Callable[[int, ProcessStatus | RequestError | SpanReport], None],
        report_loss: Callable[[StageLostError], None],
    ) -> None:
        """Start the threads.

        Args:
            membership: this process in the group.
            find_end: returns how the process of a rank has ended, or None while it runs; None if that is not known here.
            find_stalled: returns a request that has been on its way for too long, and for how many seconds.
            record_status: called with what a process tells, and its rank.
            report_loss: called when a process is lost, once.
        """
        self.lost: StageLostError | None = None
        self._membership = membership
        self._find_end = find_end
        self._find_stalled = find_stalled
        self._record_status = record_status
        self._report_loss = report_loss
        self._lock = threading.Lock()
        self._last_numbers = dict.fromkeys(range(1, membership.group.size), 0)
        self._last_heard = dict.fromkeys(self._last_numbers, time.monotonic())
        self._is_closing = False
        self.threads = [
            threading.Thread(target=self._watch_silence, name="silence", daemon=True),
            *(
                threading.Thread(target=self._receive_statuses, args=(rank,), name=f"status-{rank}", daemon=True)
                for rank in self._last_numbers
            ),
        ]
        for thread in self.threads:
            thread.start()

    def expect_close(self) -> None:
        """The processes are about to close."""
        self._is_closing = True

    @contextmanager
    def reported_loss(self) -> Iterator[None]:
        """Report that a process is lost if the thread in the context cannot go on."""
        try:
            yield
        except ConnectionLostError as error:
            self.lose_unknown(error)
        except Exception as error:  # noqa: BLE001 - without this thread no request would be answered any more
            self._lose(None, f"{type(error).__name__}: {error}")

    def lose_unknown(self, error: ConnectionLostError) -> None:
        """Some process is gone. Its own connection says which one; if that says nothing, this is all that is known."""
        self._await_loss()
        self._lose(None, str(error))

    def _await_loss(self) -> None:
        """Wait a moment for another thread to find out which process is lost."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 10)

    def _receive_statuses(self, rank: int) -> None:
        """Take the heartbeats and errors of one process, until it ends."""
        try:
            while True:
                status = receive_status(self._membership.group, rank)
                self._last_heard[rank] = time.monotonic()
                if isinstance(status, ProcessClosed):
                    del self._last_heard[rank]
                    return
                if isinstance(status, ProcessStatus):
                    self._last_numbers[rank] = status.last_number
                self._record_status(rank, status)
        except ConnectionLostError as error:
            self._lose(rank, str(error))

    def _watch_silence(self) -> None:
        last_look = time.monotonic()
        while self._last_heard and self.lost is None:
            time.sleep(_CLOSE_SECONDS if self._is_closing else HEARTBEAT_SECONDS / 2)
            now = time.monotonic()
            if now - last_look > _SILENCE_SECONDS / 2:  # this process itself was stopped: hear the others first
                self._last_heard.update(dict.fromkeys(list(self._last_heard), now))
            last_look = now
            for rank, heard in list(self._last_heard.items()):
                if now - heard > _SILENCE_SECONDS:
                    self._lose(rank, f"it has sent no heartbeat for {now - heard:.1f} s")
            if (stalled := self._find_stalled()) is not None:
                number, seconds = stalled
                behind = (rank for rank, last_number in self._last_numbers.items() if last_number < number)
                self._lose(next(behind, None), f"no call was answered for {seconds:.1f} s")

    def _lose(self, rank: int | None, reason: str) -> None:
        if rank is not None and is_follower(self._membership.store, rank):
            reason = "it has lost its connection to another process"
            self._await_loss()
        if self.lost is not None:
            return
        lost = self._lost_error(rank, reason)
        with self._lock:
            if self.lost is not None:
                return
            self.lost = lost
        self._report_loss(lost)

    def _lost_error(self, rank: int | None, reason: str) -> StageLostError:
        rank, end = self._find_ended(rank)
        if rank is None:
            return StageLostError(f"a process of the pipeline is lost: {reason}")
        stages = tuple(facts.stage for facts in self._membership.stage_facts if facts.rank == rank)
        host = self._membership.identities[rank].host
        if end is not None:
            reason = end.reason
        message = f"process {rank} on {host}, which runs {stages_text(stages)}, is lost: {reason}"
        return StageLostError(message, stages=stages, host=host, exit_status=None if end is None else end.exit_status)

    def _find_ended(self, rank: int | None) -> tuple[int | None, ProcessEnd | None]:
        """The process that has ended, and how, as far as they are known; the connection breaks a moment before that."""
        if self._find_end is None:
            return rank, None
        ranks = list(self._last_heard) if rank is None else [rank]
        deadline = time.monotonic() + _EXIT_SECONDS
        while True:
            for other_rank in ranks:
                end = self._find_end(other_rank)
                if end is not None and not is_follower(self._membership.store, other_rank):
                    return other_rank, end
            is_silent = rank is not None and time.monotonic() - self._last_heard.get(rank, 0.0) > _SILENCE_SECONDS
            if is_silent or time.monotonic() > deadline:
                return rank, None
            time.sleep(HEARTBEAT_SECONDS / 10)
