"""Hears whether the other processes of a pipeline live, and finds out which one is lost, and why."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from stagepack.errors import StageLostError
from stagepack_loaders.distributed.error_report import ProcessEnd, stages_text
from stagepack_loaders.distributed.group_trace import SpanReport
from stagepack_loaders.distributed.membership import Identity, StageFacts, find_lost_connection
from stagepack_loaders.distributed.process_group import ProcessGroup
from stagepack_loaders.distributed.routes import ConnectionLostError
from stagepack_loaders.distributed.stage_worker import HEARTBEAT_SECONDS
from stagepack_loaders.distributed.status import ProcessClosed, ProcessLost, ProcessStatus, RequestError, receive_status

# A process that has sent no heartbeat for so long is lost: it was stopped, or its host is gone.
_SILENCE_SECONDS = 4.0
# How long the launcher gets to say with which status a process ended, after its connection broke.
_EXIT_SECONDS = 1.0
_CLOSE_SECONDS = 0.01


class WatchedGroup(Protocol):
    """The processes that are watched; see `Membership`."""

    @property
    def store(self) -> Store:
        """Where the processes found each other."""

    @property
    def group(self) -> ProcessGroup:
        """The connections."""

    @property
    def identities(self) -> Sequence[Identity]:
        """What each process is, by rank."""

    @property
    def stage_facts(self) -> Sequence[StageFacts]:
        """What the processes have loaded."""


class GroupWatch:
    """The heartbeats of the other processes of a group.

    Attributes:
        lost: which process is lost; None while all live.
        threads: those that hear the processes; they end when these have closed.
    """

    def __init__(
        self,
        membership: WatchedGroup,
        *,
        find_end: Callable[[int], ProcessEnd | None] | None,
        find_stalled: Callable[[], tuple[int, float] | None],
        record_status: Callable[[int, ProcessStatus | RequestError | SpanReport], None],
        report_loss: Callable[[StageLostError], None],
        report_close: Callable[[int], None] = lambda _: None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        self.lost: StageLostError | None = None
        self._membership = membership
        self._find_end = find_end
        self._find_stalled = find_stalled
        self._record_status = record_status
        self._report_loss = report_loss
        self._report_close = report_close
        self._silence_seconds = silence_seconds
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

    def lose(self, lost: StageLostError) -> None:
        """The processes answer nothing more, for a reason; the first reason is reported."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = lost
        self._report_loss(lost)

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
                    with self._lock:
                        del self._last_heard[rank]
                    if status.error is not None:
                        self._lose(rank, f"it ended with {status.error.class_name}: {status.error.message}")
                    else:
                        self._report_close(rank)
                    return
                if isinstance(status, ProcessStatus):
                    self._last_numbers[rank] = status.last_number
                if not isinstance(status, ProcessLost):
                    self._record_status(rank, status)
        except ConnectionLostError as error:
            self._lose(rank, str(error))

    def _watch_silence(self) -> None:
        last_look = time.monotonic()
        while self._last_heard and self.lost is None:
            time.sleep(_CLOSE_SECONDS if self._is_closing else HEARTBEAT_SECONDS / 2)
            now = time.monotonic()
            if now - last_look > self._silence_seconds / 2:  # this process itself was stopped: hear the others first
                with self._lock:
                    self._last_heard.update(dict.fromkeys(self._last_heard, now))
            last_look = now
            for rank, heard in list(self._last_heard.items()):
                if now - heard > self._silence_seconds:
                    self._lose(rank, f"it has sent no heartbeat for {now - heard:.1f} s")
            if (stalled := self._find_stalled()) is not None:
                number, seconds = stalled
                behind = (rank for rank, last_number in self._last_numbers.items() if last_number < number)
                self._lose(next(behind, None), f"no call was answered for {seconds:.1f} s")

    def _lose(self, rank: int | None, reason: str) -> None:
        lost_connection = None if rank is None else find_lost_connection(self._membership.store, rank)
        if lost_connection is not None:
            reason = f"it has lost its connection to another process: {lost_connection}"
            self._await_loss()
        if self.lost is None:
            self.lose(self._lost_error(rank, reason))

    def _lost_error(self, rank: int | None, reason: str) -> StageLostError:
        rank, end = self._find_ended(rank)
        if rank is None:
            return StageLostError(f"a process of the pipeline is lost: {reason}")
        exit_status = None if end is None else end.exit_status
        return lost_error(self._membership, rank, f"is lost: {reason if end is None else end.reason}", exit_status)

    def _find_ended(self, rank: int | None) -> tuple[int | None, ProcessEnd | None]:
        """The process that has ended, and how, as far as they are known; the connection breaks a moment before that."""
        if self._find_end is None:
            return rank, None
        ranks = list(self._last_heard) if rank is None else [rank]
        deadline = time.monotonic() + _EXIT_SECONDS
        while True:
            for other_rank in ranks:
                end = self._find_end(other_rank)
                if end is not None and find_lost_connection(self._membership.store, other_rank) is None:
                    return other_rank, end
            is_silent = rank is not None and time.monotonic() - self._last_heard.get(rank, 0.0) > self._silence_seconds
            if is_silent or time.monotonic() > deadline:
                return rank, None
            time.sleep(HEARTBEAT_SECONDS / 10)


def lost_error(watched: WatchedGroup, rank: int, end_text: str, exit_status: int | None = None) -> StageLostError:
    """Return the error that names a process which is gone.

    exit_status: its exit status, negative for the number of a signal; None where it is not known.
    """
    stages = tuple(facts.stage for facts in watched.stage_facts if facts.rank == rank)
    host = watched.identities[rank].host
    message = f"process {rank} on {host}, which runs {stages_text(stages)}, {end_text}"
    return StageLostError(message, stages=stages, host=host, exit_status=exit_status)
