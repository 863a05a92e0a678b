"""Notice that another process of a training is gone, and end what waits for it with an error that names it.

Process 0 hears all others (`GroupWatch`) and tells them which one is gone; they notice themselves when process 0 is.

- The processes of a training find each other beside the groups in which they train, so that they notice when one is gone.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.distributed_c10d import Store

from stagepack.errors import GroupError, StageLostError, first_line
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.error_report import ErrorReport, report_error
from stagepack_loaders.distributed.group_watch import GroupWatch, lost_error
from stagepack_loaders.distributed.launch_environment import has_launcher, launched_address
from stagepack_loaders.distributed.membership import (
    Identity,
    StageFacts,
    check_identities,
    chosen_address,
    own_identity,
    reachable_address,
)
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, host_name, open_store
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.stage_worker import HEARTBEAT_SECONDS, LOST_STATUS
from stagepack_loaders.distributed.status import ProcessClosed, ProcessLost, ProcessStatus, StatusSender, receive_status
from stagepack_loaders.train.start_messages import Answer, Hello, KnownProcesses, StartMessages, abort_group, finished

# How long a step whose groups are closed may go on before the process is ended: it may wait where no error reaches it.
_END_SECONDS = 4.0
# How long an error of a group may be ahead of the message that says which process is gone.
_EXPLANATION_SECONDS = 2.0
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProcesses:
    """The processes of a training, as `stagepack_loaders.distributed.group_watch.WatchedGroup` has them.

    Attributes:
        store: where they found each other.
        group: the connections for messages that tell whether they live.
        identities: what each process is, by rank.
        stage_facts: what they run.
    """

    store: Store
    group: ProcessGroup
    identities: tuple[Identity, ...]
    stage_facts: tuple[StageFacts, ...]


def meet_processes(
    bundle: Bundle, stages: Sequence[int], group: TorchGroup | None, known_processes: KnownProcesses
) -> TrainingProcesses:
    """Connect this process with the others. All of them must call this at the same time.

    group: the processes; None for all.
    """
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    address = chosen_address(launched_address()) if has_launcher() else LOOPBACK
    hello = Hello(identity=own_identity(bundle, "", address), stages=tuple(stages))
    messages = StartMessages(group, known_processes)
    store: Any = None
    if rank == FRONT_RANK:
        hellos = (hello, *messages.gather(Hello))
        store = open_store(address or host_name())
        answer = Answer(hellos=hellos, store=(address or host_name(), store.port))
        messages.send_to_all(answer)
    else:
        answer = messages.ask(hello)
    identities = [member.identity for member in answer.hellos]
    check_identities(identities)
    known_processes.hosts.update({other_rank: identity.host for other_rank, identity in enumerate(identities)})
    known_processes.stages.update({member_rank: member.stages for member_rank, member in enumerate(answer.hellos)})
    messages.listen()
    try:
        store = store or finished(lambda: open_store(*answer.store), messages.check)
        address = reachable_address(address, [identity.address for identity in identities])
        connections = ProcessGroup(store, rank, size, address=address, check=messages.check)
    except (ConnectionLostError, GroupError, RuntimeError) as error:
        messages.await_loss()
        if isinstance(error, GroupError):
            raise
        raise StageLostError(f"a process of the training is lost: {first_line(error)}") from None
    if rank == FRONT_RANK:
        messages.gather(Hello)
        messages.send_to_all(Answer())
    else:
        messages.ask(hello)
    return TrainingProcesses(
        store=store,
        group=connections,
        identities=tuple(identities),
        stage_facts=tuple(
            _facts(stage, member_rank, member.identity)
            for member_rank, member in enumerate(answer.hellos)
            for stage in member.stages
        ),
    )


def _facts(stage_number: int, rank: int, identity: Identity) -> StageFacts:
    return StageFacts(
        stage=stage_number,
        rank=rank,
        host=identity.host,
        process_id=identity.process_id,
        runtime="torch",
        device="",
        files=(),
        bytes_read=0,
        seconds=0.0,
        written_inputs=(),
    )


class ProcessWatch:
    """Hears whether the other processes of a training live.

    Attributes:
        lost: which process is gone; None while all live.
    """

    def __init__(
        self, processes: TrainingProcesses, groups: Sequence[TorchGroup | None], *, silence_seconds: float
    ) -> None:
        self.lost: StageLostError | None = None
        self._processes = processes
        self._groups = groups
        self._silence_seconds = silence_seconds
        self._is_in_step = False
        self._is_loss_expected = False
        self._group_watch: GroupWatch | None = None
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._last_contact = time.monotonic()
        group = processes.group
        if group.rank == FRONT_RANK:
            self._senders = {rank: StatusSender(group, rank) for rank in range(1, group.size)}
            self._group_watch = GroupWatch(
                processes,
                find_end=None,
                find_stalled=lambda: None,
                record_status=lambda _, __: None,
                report_loss=self._lose,
                report_close=self._record_close,
                silence_seconds=silence_seconds,
            )
            self._threads = self._group_watch.threads
        else:
            self._senders = {FRONT_RANK: StatusSender(group)}
            self._threads = [
                threading.Thread(target=target, name=f"training-{target.__name__}", daemon=True)
                for target in (self._send_heartbeats, self._hear_front, self._watch_front)
            ]
            for thread in self._threads:
                thread.start()
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
            raise self._copied_loss() from error
        finally:
            self._is_in_step = False

    def close(self, error: BaseException | None = None) -> None:
        """Tell the others that this process ends, with the error that ends it, and stop to listen."""
        atexit.unregister(self.close)
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        error = error or getattr(sys, "last_value", None)
        report = report_error(error) if isinstance(error, Exception) else None
        if self._group_watch is not None:
            self._group_watch.expect_close()
        closers = [_start(self._tell_close, sender, report) for sender in self._senders.values()]
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in (*closers, *self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._processes.group.abort()
        for thread in (*closers, *self._threads):
            thread.join(_CLOSE_SECONDS)

    def check(self) -> None:
        """Raise the error of a process that is gone."""
        if self.lost is not None:
            raise self._copied_loss()

    def _copied_loss(self) -> StageLostError:
        """The loss as a new error, since each raise adds a traceback."""
        assert self.lost is not None
        return StageLostError(str(self.lost), stages=self.lost.stages, host=self.lost.host)

    def _await_explanation(self) -> None:
        deadline = time.monotonic() + _EXPLANATION_SECONDS
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 10)

    def _lose(self, lost: StageLostError, *, is_expected: bool = False) -> None:
        """Remember which process is gone, tell the others, and close all groups unless it has ended by itself."""
        with self._lock:
            if self._is_closed.is_set() or (self.lost is not None and (is_expected or not self._is_loss_expected)):
                return
            self.lost = lost
            self._is_loss_expected = is_expected
        if self._processes.group.rank == FRONT_RANK:
            message = ProcessLost(message=str(lost), stages=lost.stages, host=lost.host, is_expected=is_expected)
            for sender in self._senders.values():
                _start(_send_quietly, sender, message)
        if not is_expected:
            _start(self._end_step)

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
        _start(self._tell_close, self._senders[rank], None)
        self._lose(lost_error(self._processes, rank, "has ended its training"), is_expected=True)

    def _tell_close(self, sender: StatusSender, error: ErrorReport | None) -> None:
        with contextlib.suppress(ConnectionLostError):
            sender.close(error)

    def _send_heartbeats(self) -> None:
        with contextlib.suppress(ConnectionLostError):  # `_hear_front` says why
            while not self._is_closed.wait(HEARTBEAT_SECONDS):
                self._senders[FRONT_RANK].send(ProcessStatus())
                self._last_contact = time.monotonic()

    def _hear_front(self) -> None:
        """Take what process 0 tells, until it ends."""
        try:
            while True:
                status = receive_status(self._processes.group, FRONT_RANK)
                if isinstance(status, ProcessLost):
                    lost = StageLostError(status.message, stages=status.stages, host=status.host)
                    self._lose(lost, is_expected=status.is_expected)
                elif isinstance(status, ProcessClosed):
                    self._hear_close(status)
                    return
        except ConnectionLostError as error:
            self._lose(lost_error(self._processes, FRONT_RANK, f"is lost: {error}"))

    def _hear_close(self, status: ProcessClosed) -> None:
        self._tell_close(self._senders[FRONT_RANK], None)
        if status.error is None:
            self._lose(lost_error(self._processes, FRONT_RANK, "has ended its training"), is_expected=True)
        else:
            reason = f"is lost: it ended with {status.error.class_name}: {status.error.message}"
            self._lose(lost_error(self._processes, FRONT_RANK, reason))

    def _watch_front(self) -> None:
        """Notice that process 0 takes no heartbeats: it was stopped, or its machine is gone without a word."""
        last_look = time.monotonic()
        while not self._is_closed.wait(HEARTBEAT_SECONDS) and self.lost is None:
            now = time.monotonic()
            if now - last_look > self._silence_seconds / 2:  # this process itself was stopped
                self._last_contact = now
            last_look = now
            if now - self._last_contact > self._silence_seconds:
                reason = f"is lost: it has taken no heartbeat for {now - self._last_contact:.1f} s"
                self._lose(lost_error(self._processes, FRONT_RANK, reason))


def _start(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name="training-watch", daemon=True)
    thread.start()
    return thread


def _send_quietly(sender: StatusSender, message: ProcessLost) -> None:
    with contextlib.suppress(ConnectionLostError):
        sender.send(message)
