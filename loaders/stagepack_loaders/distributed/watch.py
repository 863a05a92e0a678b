"""Notice that another process of a group is gone: each tells process 0 that it lives, and process 0 hears all.

`GroupWatch` is the side of process 0; it finds out which process is lost, and why. `FrontWatch` is the side of the others.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stagepack.errors import StageLostError
from stagepack_loaders.distributed.meeting import Members, find_lost_connection
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.status import (
    ProcessClosed,
    ProcessEnd,
    ProcessLost,
    ProcessStatus,
    RecordedStatus,
    StatusSender,
    receive_status,
)

HEARTBEAT_SECONDS = 0.5
# The exit status of a process that has lost another one; the launcher starts it again.
LOST_STATUS = 75
# A process that has sent no heartbeat for so long is lost: it was stopped, or its host is gone.
_SILENCE_SECONDS = 4.0
# How long the launcher gets to say with which status a process ended, after its connection broke.
_EXIT_SECONDS = 1.0
_CLOSE_SECONDS = 0.01


class SilenceClock:
    """How long other processes have been silent. The time in which this process itself was stopped does not count."""

    def __init__(self, ranks: Iterable[int], longest_seconds: float) -> None:
        now = time.monotonic()
        self._longest_seconds = longest_seconds
        self._last_heard = dict.fromkeys(ranks, now)
        self._last_look = now
        self._lock = threading.Lock()

    @property
    def ranks(self) -> list[int]:
        """The processes that are listened for."""
        return list(self._last_heard)

    def hear(self, rank: int) -> None:
        """A process has shown that it lives."""
        self._last_heard[rank] = time.monotonic()

    def forget(self, rank: int) -> None:
        """A process has ended by itself."""
        with self._lock:
            self._last_heard.pop(rank, None)

    def is_silent(self, rank: int) -> bool:
        """Whether a process has been silent for too long."""
        return time.monotonic() - self._last_heard.get(rank, 0.0) > self._longest_seconds

    def find_silent(self) -> list[tuple[int, float]]:
        """Return the processes that have been silent for too long, and for how many seconds. To be called again and again."""
        now = time.monotonic()
        if now - self._last_look > self._longest_seconds / 2:  # this process itself was stopped: hear the others first
            with self._lock:
                self._last_heard.update(dict.fromkeys(self._last_heard, now))
        self._last_look = now
        silences = [(rank, now - heard) for rank, heard in list(self._last_heard.items())]
        return [(rank, seconds) for rank, seconds in silences if seconds > self._longest_seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvents:
    """What a watch asks and tells its owner; the methods are called in its threads.

    find_end: how a process has ended, as far as its launcher knows; None if no launcher does.
    find_stalled: the oldest request, and for how many seconds none was answered, if that is too long.
    """

    report_loss: Callable[[StageLostError], None]
    report_close: Callable[[int], None] = lambda _: None
    record_status: Callable[[int, RecordedStatus], None] = lambda _, __: None
    find_end: Callable[[int], ProcessEnd | None] | None = None
    find_stalled: Callable[[], tuple[int, float] | None] = lambda: None


class GroupWatch:
    """The heartbeats of the other processes of a group.

    Attributes:
        lost: which process is lost; None while all live.
        threads: those that hear the processes; they end when these have closed.
    """

    def __init__(self, members: Members, events: WatchEvents, silence_seconds: float = _SILENCE_SECONDS) -> None:
        self.lost: StageLostError | None = None
        self._members = members
        self._events = events
        self._lock = threading.Lock()
        self._last_numbers = dict.fromkeys(range(1, members.group.size), 0)
        self._silence = SilenceClock(self._last_numbers, silence_seconds)
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
        self._events.report_loss(lost)

    def _await_loss(self) -> None:
        """Wait a moment for another thread to find out which process is lost."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 10)

    def _receive_statuses(self, rank: int) -> None:
        """Take the heartbeats and errors of one process, until it ends."""
        try:
            while True:
                status = receive_status(self._members.group, rank)
                self._silence.hear(rank)
                if isinstance(status, ProcessClosed):
                    self._silence.forget(rank)
                    if status.error is not None:
                        self._lose(rank, f"it ended with {status.error.class_name}: {status.error.message}")
                    else:
                        self._events.report_close(rank)
                    return
                if isinstance(status, ProcessStatus):
                    self._last_numbers[rank] = status.last_number
                if not isinstance(status, ProcessLost):
                    self._events.record_status(rank, status)
        except ConnectionLostError as error:
            self._lose(rank, str(error))

    def _watch_silence(self) -> None:
        while self._silence.ranks and self.lost is None:
            time.sleep(_CLOSE_SECONDS if self._is_closing else HEARTBEAT_SECONDS / 2)
            for rank, seconds in self._silence.find_silent():
                self._lose(rank, f"it has sent no heartbeat for {seconds:.1f} s")
            if (stalled := self._events.find_stalled()) is not None:
                number, seconds = stalled
                behind = (rank for rank, last_number in self._last_numbers.items() if last_number < number)
                self._lose(next(behind, None), f"no call was answered for {seconds:.1f} s")

    def _lose(self, rank: int | None, reason: str) -> None:
        lost_connection = None if rank is None else find_lost_connection(self._members.store, rank)
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
        return self._members.lost_error(rank, f"is lost: {reason if end is None else end.reason}", exit_status)

    def _find_ended(self, rank: int | None) -> tuple[int | None, ProcessEnd | None]:
        """The process that has ended, and how, as far as they are known; the connection breaks a moment before that."""
        if self._events.find_end is None:
            return rank, None
        ranks = self._silence.ranks if rank is None else [rank]
        deadline = time.monotonic() + _EXIT_SECONDS
        while True:
            for other_rank in ranks:
                end = self._events.find_end(other_rank)
                if end is not None and find_lost_connection(self._members.store, other_rank) is None:
                    return other_rank, end
            if (rank is not None and self._silence.is_silent(rank)) or time.monotonic() > deadline:
                return rank, None
            time.sleep(HEARTBEAT_SECONDS / 10)


class FrontWatch:
    """Tells process 0 that this process lives, until it is closed, and notices when process 0 takes no heartbeats.

    Process 0 was stopped then, or its host is gone without a word.
    """

    def __init__(
        self,
        statuses: StatusSender,
        make_status: Callable[[], ProcessStatus],
        *,
        report_loss: Callable[[ConnectionLostError], None],
        report_silence: Callable[[float], None],
        silence_seconds: float,
    ) -> None:
        self.is_closed = threading.Event()
        self._statuses = statuses
        self._make_status = make_status
        self._report_loss = report_loss
        self._report_silence = report_silence
        self._silence = SilenceClock([FRONT_RANK], silence_seconds)
        self.threads = [
            threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True),
            threading.Thread(target=self._watch_silence, name="silence", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _send_heartbeats(self) -> None:
        try:
            while not self.is_closed.wait(HEARTBEAT_SECONDS):
                self._statuses.send(self._make_status())
                self._silence.hear(FRONT_RANK)
        except ConnectionLostError as error:
            self._report_loss(error)

    def _watch_silence(self) -> None:
        while not self.is_closed.wait(HEARTBEAT_SECONDS):
            for _, seconds in self._silence.find_silent():
                self._report_silence(seconds)
                return
