"""Why a group fails whose processes a launcher such as torchrun has started: all of them give the reason of the first one.

torchrun tells each machine of its own processes alone, and ends the store of the group with the processes of one machine. So a process that
fails writes the reason into the store, and does not end before the others have read it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from stagepack.errors import GroupError, StageLostError, StagepackError, first_line
from stagepack_loaders.distributed.launch_environment import (
    launched_address,
    launched_rank,
    write_error_file,
)
from stagepack_loaders.distributed.meeting import Seat, launched_seat
from stagepack_loaders.distributed.process_group import host_name
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.distributed.status import ErrorReport, attribute_error, lost_error, rebuild_error, report_error
from stagepack_loaders.distributed.watch import SilenceClock

_FAILURE_KEY = "failure"
_INFORMED_KEY = "informed"
_POLL_SECONDS = 0.05
_SIGN_SECONDS = 0.5
_LAST_SIGN = 2**40
# While stages are loaded, a process may hold Python's lock for seconds: no sign for so long means that it has ended.
_SILENCE_SECONDS = 20.0
# The others may still import torch, which takes 2 s on an idle machine.
INFORM_SECONDS = 20.0
# How long process 0 gets to say which process is lost; it waits up to 4 s for heartbeats.
_VERDICT_SECONDS = 6.0


def launched_origin() -> str:
    """The name of this process in messages."""
    return f"process {launched_rank()} on {host_name()}"


class GroupFailure(Struct, frozen=True, kw_only=True):
    """The failure that ends a group. The message of the report names the process; `lost_count` processes cannot read it."""

    report: ErrorReport
    origin: str
    lost_count: int = 0

    @classmethod
    def of(cls, error: Exception, origin: str) -> "GroupFailure":
        """Return the failure that an error is. An error of stagepack gets the name of its process, unless it has one."""
        if not isinstance(error, StagepackError):
            error = GroupError(f"{type(error).__name__}: {first_line(error)}")
        attribute_error(error, origin)
        lost_count = 1 if isinstance(error, StageLostError) else 0
        return cls(report=report_error(error), origin=error.origin, lost_count=lost_count)

    def rebuild(self) -> StagepackError:
        """Return the error, for another process."""
        error = rebuild_error(self.report)
        if not isinstance(error, StagepackError):  # the group has another version of stagepack in that process
            error = GroupError()
        error.args = (self.report.message,)
        error.origin = self.origin
        return error


class LaunchFailures:
    """The failure of a group, as its processes tell it each other by their store. Its methods may be called from any thread.

    While the group starts, each process shows by signs that it lives: no connection between them is there yet that could break.

    Attributes:
        hosts: the hosts of the processes by rank, as far as they are known.
    """

    def __init__(self, seat: Seat) -> None:
        self.origin = launched_origin()
        self._store = seat.store
        self._rank = seat.rank
        self._size = seat.size
        self._failure: GroupFailure | None = None
        self._is_informed = False
        self._lock = threading.Lock()
        self._end_lock = threading.Lock()
        self.hosts: dict[int, str] = {}
        self._has_started = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look for the failure of another process in a thread, until the block ends: when the processes are connected."""
        thread = threading.Thread(target=self._watch, name="start", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._has_started.set()
            thread.join(_SIGN_SECONDS)

    def check(self) -> None:
        """Raise the failure of the group, if one is known."""
        if self._failure is not None:
            raise self._failure.rebuild()

    def tell(self, error: Exception) -> GroupFailure:
        """Tell the others why the group fails, unless one of them has told it; return the failure that all know."""
        failure = GroupFailure.of(error, self.origin)
        with contextlib.suppress(RuntimeError):  # the store has gone
            content = self._store.compare_set(_FAILURE_KEY, "", msgspec.json.encode(failure).decode())
            failure = msgspec.json.decode(content, type=GroupFailure)
        self._learn(failure)
        return failure

    def wait_until_informed(self, seconds: float = INFORM_SECONDS) -> None:
        """Wait until all others know the failure, before this process ends, and perhaps the store of the group with it."""
        failure, deadline = self._failure, time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while (
                failure is not None
                and self._store.add(_INFORMED_KEY, 0) < self._size - failure.lost_count
                and time.monotonic() < deadline
            ):
                time.sleep(_POLL_SECONDS)

    def find_lost(self, reason: str, seconds: float = _VERDICT_SECONDS) -> str:
        """Return which process is lost: process 0 says it; if it does not, it is lost itself.

        reason: how this process has noticed it.
        """
        # In a thread: the store may have gone without a word.
        thread = threading.Thread(target=self._await_failure, args=(seconds,), daemon=True)
        thread.start()
        thread.join(seconds)
        if self._failure is not None:
            return self._failure.report.message
        return str(self._front_lost(reason))

    def end_after_loss(self, reason: str, report: Callable[[str], None], seconds: float = _VERDICT_SECONDS) -> None:
        """Report which process is lost, once; further threads that notice it wait for the end of the process."""
        self._end_lock.acquire()
        message = self.find_lost(reason, seconds)
        report(message)
        write_error_file(message)

    def _await_failure(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self._find_failure() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _find_failure(self) -> bool:
        if self._failure is None and self._store.check([_FAILURE_KEY]):
            self._learn(msgspec.json.decode(self._store.get(_FAILURE_KEY), type=GroupFailure))
        return self._failure is not None

    def _learn(self, failure: GroupFailure) -> None:
        with self._lock:
            self._failure = self._failure or failure
            is_first, self._is_informed = not self._is_informed, True
        if is_first:
            with contextlib.suppress(RuntimeError):
                self._store.add(_INFORMED_KEY, 1)

    def _watch(self) -> None:
        """Show that this process lives, and look whether the others do, until the group has started or failed."""
        clock = SilenceClock((), _SILENCE_SECONDS)
        signs: dict[int, int] = {}
        try:
            self._store.set(f"host/{self._rank}", host_name())
            while not self._find_failure() and not self._has_started.wait(_SIGN_SECONDS):
                self._store.add(f"sign/{self._rank}", 1)
                # Process 0 looks after all, and the others after the store, which ends with it.
                for rank in range(1, self._size) if self._rank == FRONT_RANK else (FRONT_RANK,):
                    self._look_after(rank, clock, signs)
                for rank, seconds in clock.find_silent():
                    reason = f"is lost: it has shown no sign of life for {seconds:.0f} s while the group started"
                    self.tell(self._lost_error(rank, reason))
            self._store.add(f"sign/{self._rank}", _LAST_SIGN)
        except RuntimeError as error:
            if not self._has_started.is_set():
                self._learn(
                    GroupFailure.of(self._front_lost(f"the store of the group has gone: {first_line(error)}"), "")
                )

    def _look_after(self, rank: int, clock: SilenceClock, signs: dict[int, int]) -> None:
        if rank not in self.hosts:
            if not self._store.check([f"host/{rank}"]):
                return
            self.hosts[rank] = self._store.get(f"host/{rank}").decode()
        sign = self._store.add(f"sign/{rank}", 0)
        if sign >= _LAST_SIGN:
            clock.forget(rank)
        elif signs.get(rank) != sign:
            signs[rank] = sign
            clock.hear(rank)

    def _front_lost(self, reason: str) -> StageLostError:
        return self._lost_error(FRONT_RANK, f"is lost: {reason}")

    def _lost_error(self, rank: int, end_text: str) -> StageLostError:
        host = self.hosts.get(rank, launched_address() if rank == FRONT_RANK else "")
        error = lost_error(rank, end_text, host=host)
        error.origin = f"process {rank} on {host}"
        return error


# The failures of the last connection.
_OPENED: dict[int, LaunchFailures] = {}


def open_failures(seconds: float, connection: int) -> LaunchFailures:
    """Connect with the others of the group, unless this process is connected: the store may have gone since.

    By a connection of its own, so that it waits for no other thread's calls.

    connection: the number of the pipeline, from 0, among those that the processes connect one after the other.
    """
    if connection not in _OPENED:
        seat = launched_seat(seconds, f"{connection}/failures")
        _OPENED.clear()
        _OPENED[connection] = LaunchFailures(seat)
    return _OPENED[connection]


def tell_launched_failure(error: Exception) -> str:
    """Tell the other processes that a launcher has started why this one fails, and wait until they know; return its line.

    For programs whose first pipeline has failed, or does not begin.
    """
    failure = GroupFailure.of(error, launched_origin())
    with contextlib.suppress(StagepackError):
        failures = open_failures(INFORM_SECONDS, 0)
        first_failure = failures.tell(error)
        failures.wait_until_informed()
        if first_failure.report.message in failure.report.message:
            failure = first_failure
    return failure.report.message
