"""Messages between process 0 and each other process while training starts, by the group of torch.

Until the processes have connections of their own, only this group connects them, and its errors do not say which process is gone. Process 0
knows whose connection broke, and tells the others.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed
from msgspec import Struct
from torch.distributed import ProcessGroup as TorchGroup

from stagepack.errors import GroupError, StageLostError, StagepackError, first_line
from stagepack_loaders.distributed.error_report import stages_text
from stagepack_loaders.distributed.launch_environment import has_store_of_launcher, launched_address
from stagepack_loaders.distributed.membership import Identity
from stagepack_loaders.distributed.process_group import host_name
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.distributed.status import ProcessLost

_TAG = 5  # of messages while training starts; `trained_stage` and others have the ones below
# How long a send to a process that is gone too may take, and the connections to say which process is gone.
_SEND_SECONDS, _LOSS_SECONDS = 1.0, 2.0
_SHORTEST_TIMEOUT = timedelta(milliseconds=1)
_ABORT_TAG = 2**30  # of messages that are never sent
_LOOPBACKS = ("127.0.0.1", "::1")
_CHECK_SECONDS = 0.1
Message = TypeVar("Message", bound=Struct)
Result = TypeVar("Result")


class Hello(Struct, frozen=True, kw_only=True):
    """What a process tells process 0.

    Attributes:
        identity: what it is.
        stages: the stages that it will run.
    """

    identity: Identity
    stages: tuple[int, ...]


class Answer(Struct, frozen=True, kw_only=True):
    """What process 0 tells all others.

    Attributes:
        hellos: what all processes have told.
        store: the address and the port of the store of process 0.
        lost: the process that is gone instead.
    """

    hellos: tuple[Hello, ...] = ()
    store: tuple[str, int] = ("", 0)
    lost: ProcessLost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProcesses:
    """What is known of the processes of a training before they have met, for errors.

    Attributes:
        hosts: the machine of each process, by rank.
        stages: the stages of each process.
    """

    hosts: dict[int, str]
    stages: dict[int, tuple[int, ...]]

    def expect_stages(self, rank_of_stage: Sequence[int]) -> None:
        """Note which process will run each stage."""
        for stage_number, rank in enumerate(rank_of_stage):
            self.stages[rank] = tuple(sorted({*self.stages.get(rank, ()), stage_number}))

    def lost_error(self, rank: int, reason: str) -> StageLostError:
        """Return the error that names a process which is gone."""
        host = self.hosts.get(rank) or _host_in(reason)
        # Gloo begins with the line of its code, and ends with advice.
        reason = re.sub(r"^\[\S+\] |\. This is typically caused.*", "", reason)
        stages = self.stages.get(rank, ())
        on_host = f" on {host}" if host else ""
        runs = f", which runs {stages_text(stages)}," if stages else ""
        return StageLostError(f"process {rank}{on_host}{runs} is lost: {reason}", stages=stages, host=host)

    def store_error(self, error: Exception) -> StageLostError:
        """Return the error that says whose store has gone."""
        reason = f"the store of the group has gone: {first_line(error)}"
        if has_store_of_launcher():
            return StageLostError(f"the launcher is lost: {reason}", host=launched_address())
        return self.lost_error(FRONT_RANK, reason)


class StartMessages:
    """Messages between process 0 and each other process, by the group of torch."""

    def __init__(self, group: TorchGroup | None, known_processes: KnownProcesses) -> None:
        self._group = group
        self._known_processes = known_processes
        self._rank = torch.distributed.get_rank(group)
        other_ranks = range(1, torch.distributed.get_world_size(group))
        self._peers = list(other_ranks) if self._rank == FRONT_RANK else [FRONT_RANK]
        self._received: dict[int, Future[bytes]] = {}

    def listen(self) -> None:
        """Begin to receive the next message of each peer. Each has a thread, since nothing else wakes a wait of gloo."""
        for rank in self._peers:
            received: Future[bytes] = Future()
            self._received[rank] = received
            threading.Thread(
                target=_receive, args=(self._group, rank, received), name="training-start", daemon=True
            ).start()

    def gather(self, message_type: type[Message]) -> tuple[Message, ...]:
        """Return the message of each other process, in process 0."""
        self._await()
        received = [self._received.pop(rank) for rank in self._peers]
        return tuple(msgspec.json.decode(future.result(), type=message_type) for future in received)

    def ask(self, message: Struct) -> Answer:
        """Send a message to process 0, and return its answer."""
        with contextlib.suppress(RuntimeError):  # the answer says why
            _send(self._group, FRONT_RANK, message)
        self._await()
        return msgspec.json.decode(self._received.pop(FRONT_RANK).result(), type=Answer)

    def send_to_all(self, answer: Answer, *, but: int | None = None) -> None:
        """Send a message to all others; one that is gone is noticed later."""
        threads = [
            threading.Thread(target=_send_quietly, args=(self._group, rank, answer), daemon=True)
            for rank in self._peers
            if rank != but
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SEND_SECONDS)

    def check(self) -> None:
        """Raise the error of a process that is known to be gone."""
        for rank, received in self._received.items():
            if not received.done():
                continue
            error = received.exception()
            if error is not None:
                raise self._lose(rank, error)
            lost = msgspec.json.decode(received.result(), type=Answer).lost if self._rank != FRONT_RANK else None
            if lost is not None:
                raise StageLostError(lost.message, stages=lost.stages, host=lost.host)

    def await_loss(self) -> None:
        """Wait a moment for the connections to say which process is gone."""
        wait(self._received.values(), _LOSS_SECONDS, return_when="FIRST_COMPLETED")
        self.check()

    def _await(self) -> None:
        if not self._received:
            self.listen()
        wait(self._received.values(), return_when="FIRST_EXCEPTION")
        self.check()

    def _lose(self, rank: int, error: BaseException) -> StagepackError:
        """Tell the others which process is gone, and close the group, so that no thread waits in it any more."""
        reason = first_line(error)
        if "Timed out" in reason:  # of gloo, after the timeout of the group
            message = (
                f"expected all processes to call stagepack.train at the same time: process {rank} has not: {reason}"
            )
            return GroupError(message)
        lost = self._known_processes.lost_error(rank, reason)
        if self._rank == FRONT_RANK:
            answer = Answer(lost=ProcessLost(message=str(lost), stages=lost.stages, host=lost.host, is_expected=False))
            self.send_to_all(answer, but=rank)
        abort_group(self._group)
        wait(self._received.values(), _LOSS_SECONDS)
        return lost


def finished(function: Callable[[], Result], check: Callable[[], None]) -> Result:
    """Return the result of a function that waits for other processes where nothing wakes it."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised below
            result.set_exception(error)

    threading.Thread(target=run, name="training-connect", daemon=True).start()
    while not wait([result], _CHECK_SECONDS).done:
        check()
    return result.result()


def _receive(group: TorchGroup | None, rank: int, received: Future[bytes]) -> None:
    try:
        length = torch.empty(1, dtype=torch.int64)
        torch.distributed.recv(length, group=group, group_src=rank, tag=_TAG)
        content = torch.empty(int(length), dtype=torch.uint8)
        torch.distributed.recv(content, group=group, group_src=rank, tag=_TAG)
        received.set_result(content.numpy().tobytes())
    except Exception as error:  # noqa: BLE001 - raised where it is waited for
        received.set_exception(error)


def _send(group: TorchGroup | None, rank: int, message: Struct) -> None:
    content = torch.frombuffer(bytearray(msgspec.json.encode(message)), dtype=torch.uint8)
    for tensor in (torch.tensor([len(content)]), content):
        torch.distributed.send(tensor, group=group, group_dst=rank, tag=_TAG)


def _send_quietly(group: TorchGroup | None, rank: int, message: Struct) -> None:
    with contextlib.suppress(RuntimeError):
        _send(group, rank, message)


def _host_in(reason: str) -> str:
    """The machine that an error of gloo names by its address; empty if it names none."""
    address = re.search(r"\[([0-9A-Fa-f.:%]+)\]:[0-9]+", reason)
    if address is None:
        return ""
    return host_name() if address[1] in _LOOPBACKS else address[1]


def abort_group(group: TorchGroup | None) -> None:
    """Close the connections of a group, so that all that waits in it ends with an error."""
    torch_group = torch.distributed.group.WORLD if group is None else group
    if torch_group is None:
        return
    if torch.distributed.get_backend(torch_group) != "gloo":
        torch_group.abort()
        return
    for rank in set(range(torch_group.size())) - {torch_group.rank()}:
        # Gloo has no call for it, but closes a connection when a wait times out.
        with contextlib.suppress(RuntimeError):
            work = torch.distributed.irecv(torch.empty(1), group=torch_group, group_src=rank, tag=_ABORT_TAG)
            if work is not None:
                work.wait(_SHORTEST_TIMEOUT)
