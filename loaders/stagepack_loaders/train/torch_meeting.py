"""How the processes of a training find each other, by a group of torch, before they have connections of their own to notice a loss by.

Until then, only that group connects them, and its errors do not say which process is gone. Process 0 knows whose connection broke, and
tells the others.
"""

import contextlib
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed
from msgspec import Struct
from torch.distributed import ProcessGroup as TorchGroup

from stagepack.errors import GroupError, StageLostError, StagepackError, first_line
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.launch_environment import has_launcher, has_store_of_launcher, launched_address
from stagepack_loaders.distributed.meeting import (
    Identity,
    Members,
    StageFacts,
    check_identities,
    chosen_address,
    own_identity,
    reachable_address,
)
from stagepack_loaders.distributed.process_group import (
    LOOPBACK,
    ProcessGroup,
    close_connections,
    finished,
    gloo_reason,
    host_name,
    open_store,
)
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError
from stagepack_loaders.distributed.status import ProcessLost, lost_error

_TAG = 5  # of messages while training starts; `schedules` and others have the ones below
# How long a send to a process that is gone too may take, and the connections to say which process is gone.
_SEND_SECONDS, _LOSS_SECONDS = 1.0, 2.0
_LOOPBACKS = ("127.0.0.1", "::1")
Message = TypeVar("Message", bound=Struct)


class Hello(Struct, frozen=True, kw_only=True):
    """What a process tells process 0: what it is, and the stages that it will run."""

    identity: Identity
    stages: tuple[int, ...]


class Answer(Struct, frozen=True, kw_only=True):
    """What process 0 tells all others: what all have told, and the address and port of its store; or which process is gone."""

    hellos: tuple[Hello, ...] = ()
    store: tuple[str, int] = ("", 0)
    lost: ProcessLost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProcesses:
    """The machine and the stages of each process, by rank, as far as they are known before the processes have met; for errors."""

    hosts: dict[int, str]
    stages: dict[int, tuple[int, ...]]

    def expect_stages(self, rank_of_stage: Sequence[int]) -> None:
        """Note which process will run each stage."""
        for stage_number, rank in enumerate(rank_of_stage):
            self.stages[rank] = tuple(sorted({*self.stages.get(rank, ()), stage_number}))

    def lost_error(self, rank: int, reason: str) -> StageLostError:
        """Return the error that names a process which is gone."""
        host = self.hosts.get(rank) or _host_in(reason)
        return lost_error(rank, f"is lost: {gloo_reason(reason)}", host=host, stages=self.stages.get(rank, ()))

    def store_error(self, error: Exception) -> StageLostError:
        """Return the error that says whose store has gone."""
        reason = f"the store of the group has gone: {first_line(error)}"
        if has_store_of_launcher():
            return StageLostError(f"the launcher is lost: {reason}", host=launched_address())
        return self.lost_error(FRONT_RANK, reason)


def meet_processes(
    bundle: Bundle, stages: Sequence[int], group: TorchGroup | None, known_processes: KnownProcesses
) -> Members:
    """Connect this process with the others. All of them must call this at the same time. `group` is None for all processes."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    address = chosen_address(launched_address()) if has_launcher() else LOOPBACK
    hello = Hello(identity=own_identity(bundle, size, "", address), stages=tuple(stages))
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
    check_identities(dict(enumerate(identities)))
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
    stage_facts = tuple(
        _facts(stage, member_rank, member.identity)
        for member_rank, member in enumerate(answer.hellos)
        for stage in member.stages
    )
    return Members(store=store, group=connections, identities=identities, stage_facts=stage_facts)


def _facts(stage_number: int, rank: int, identity: Identity) -> StageFacts:
    return StageFacts(
        stage=stage_number, rank=rank, host=identity.host, process_id=identity.process_id, runtime="torch", device=""
    )


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
        _send_quietly(self._group, FRONT_RANK, message)  # the answer says why it cannot be sent
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
                raise lost.rebuild()

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
            return GroupError(
                f"expected all processes to call stagepack.train at the same time: process {rank} has not: {reason}"
            )
        lost = self._known_processes.lost_error(rank, reason)
        if self._rank == FRONT_RANK:
            self.send_to_all(Answer(lost=ProcessLost.of(lost)), but=rank)
        abort_group(self._group)
        wait(self._received.values(), _LOSS_SECONDS)
        return lost


def _receive(group: TorchGroup | None, rank: int, received: Future[bytes]) -> None:
    try:
        length = torch.empty(1, dtype=torch.int64)
        torch.distributed.recv(length, group=group, group_src=rank, tag=_TAG)
        content = torch.empty(int(length), dtype=torch.uint8)
        torch.distributed.recv(content, group=group, group_src=rank, tag=_TAG)
        received.set_result(content.numpy().tobytes())
    except Exception as error:  # noqa: BLE001 - raised where it is waited for
        received.set_exception(error)


def _send_quietly(group: TorchGroup | None, rank: int, message: Struct) -> None:
    content = torch.frombuffer(bytearray(msgspec.json.encode(message)), dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        for tensor in (torch.tensor([len(content)]), content):
            torch.distributed.send(tensor, group=group, group_dst=rank, tag=_TAG)


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
    close_connections(
        set(range(torch_group.size())) - {torch_group.rank()},
        lambda rank, tag: torch.distributed.irecv(torch.empty(1), group=torch_group, group_src=rank, tag=tag),
    )
