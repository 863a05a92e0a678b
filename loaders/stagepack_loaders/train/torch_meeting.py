"""How the processes of a training find each other, by a group of torch, before they have connections of their own to notice a loss by.

Until then, only that group connects them, and its errors do not say which process is gone. Process 0 knows whose connection broke, and
tells the others. The default group of torch is made here too, so that a process that is lost meanwhile is named.
"""

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed
from msgspec import Struct
from torch.distributed import ProcessGroup as TorchGroup

from stagepack.errors import GroupError, StageLostError, StagepackError, first_line
from stagepack.format.reader import Bundle
from stagepack.format.threads import start_in_thread
from stagepack_loaders.distributed.launch_environment import has_launcher, has_store_of_launcher, launched_address
from stagepack_loaders.distributed.meeting import (
    Identity,
    Members,
    Seat,
    StageFacts,
    check_identities,
    chosen_address,
    launched_seat,
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
from stagepack_loaders.distributed.watch import SilenceClock

_TAG = 5  # of messages while training starts; `schedules` and others have the ones below
# How long a send to a process that is gone too may take, and the connections to say which process is gone.
_SEND_SECONDS, _LOSS_SECONDS = 1.0, 2.0
_LOOPBACKS = ("127.0.0.1", "::1")
# Of the default group of torch.
_START_SECONDS = 300.0
_CHECK_SECONDS = 0.1
# How long process 0, which may have the store, lets the others read which process is gone.
_TELL_SECONDS = 1.0
_CONNECTED, _LOST = b"connected", "lost"
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
            self._received[rank] = start_in_thread(partial(_receive, self._group, rank), "training-start")

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


def _receive(group: TorchGroup | None, rank: int) -> bytes:
    length = torch.empty(1, dtype=torch.int64)
    torch.distributed.recv(length, group=group, group_src=rank, tag=_TAG)
    content = torch.empty(int(length), dtype=torch.uint8)
    torch.distributed.recv(content, group=group, group_src=rank, tag=_TAG)
    return content.numpy().tobytes()


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


class _Presence(Struct, frozen=True, kw_only=True):
    """A process that has come, on a machine."""

    host: str


def make_default_group(known_processes: KnownProcesses, silence_seconds: float) -> None:
    """Make the default process group of torch, and note the machines of the processes.

    By itself, torch 2.13 finds in the store of torchrun the addresses of processes that are gone, after these were started again.

    silence_seconds: how long a process may show no sign of life, in seconds.
    """
    if not has_launcher():  # one process, such as that of a debugger
        store_in_memory = torch.distributed.HashStore()  # type: ignore[attr-defined] # documented, and exported at run time
        torch.distributed.init_process_group(_backends(), store=store_in_memory, rank=0, world_size=1)
        return
    known_processes.hosts[FRONT_RANK] = launched_address()
    seat = launched_seat(_START_SECONDS, "training")
    # Another connection: one on which a thread waits lets no other one in. The group keeps the store itself, which may be the server. It is
    # made before the reports: a process that has reported may be lost, and its store with it, and a new connection waits for minutes then.
    sign_seat = replace(seat, store=seat.store.clone())  # type: ignore[attr-defined] # public, and not in its type hints
    try:
        presence = _Presence(host=host_name())
        processes = seat.exchange_reports("sign of life", presence, seconds=_START_SECONDS)
    except ConnectionLostError as error:
        raise known_processes.store_error(error) from None
    known_processes.hosts.update({process_rank: process.host for process_rank, process in enumerate(processes)})
    _connect(seat, _SignsOfLife(sign_seat, known_processes, silence_seconds), silence_seconds)


def _backends() -> str:
    """Those for the host and for the GPUs of this machine: by itself, torch makes none for the host where there is a GPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cpu":
        return "cpu:gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"


def _connect(seat: Seat, signs: "_SignsOfLife", silence_seconds: float) -> None:
    """Make the group. The processes show signs of life in the store meanwhile: torch would wait half an hour for one that is gone."""

    def connect() -> None:
        torch.distributed.init_process_group(_backends(), store=seat.store, rank=seat.rank, world_size=seat.size)

    try:
        finished(connect, signs.check)
    except RuntimeError as error:
        deadline = time.monotonic() + 2 * silence_seconds
        while time.monotonic() < deadline:
            signs.check()
            time.sleep(_CHECK_SECONDS)
        raise StageLostError(f"a process of the training is lost: {first_line(error)}") from None
    signs.finish()


class _SignsOfLife:
    """What the processes write into the store again and again until they are connected."""

    def __init__(self, seat: Seat, known_processes: KnownProcesses, silence_seconds: float) -> None:
        self._store = seat.store
        self._rank = seat.rank
        self._known_processes = known_processes
        self._silence_seconds = silence_seconds
        self._sign_count = 0
        self._signs = dict.fromkeys(set(range(seat.size)) - {seat.rank}, b"")
        self._silence = SilenceClock(self._signs, silence_seconds)

    def check(self) -> None:
        """Give a sign, and look for those of the others."""
        try:
            self._exchange()
            if self._store.check([_LOST]):
                raise msgspec.json.decode(self._store.get(_LOST), type=ProcessLost).rebuild()
            for rank, _ in self._silence.find_silent():
                raise self._tell(rank)
        except RuntimeError as error:
            raise self._known_processes.store_error(error) from None

    def finish(self) -> None:
        """This process is connected."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"sign/{self._rank}", _CONNECTED.decode())

    def _exchange(self) -> None:
        self._sign_count += 1
        self._store.set(f"sign/{self._rank}", str(self._sign_count))
        for rank, last_sign in self._signs.items():
            sign = self._store.get(f"sign/{rank}") if self._store.check([f"sign/{rank}"]) else b""
            if sign and (sign == _CONNECTED or sign != last_sign):
                self._signs[rank] = sign
                self._silence.hear(rank)

    def _tell(self, rank: int) -> StageLostError:
        """Tell the others which process is gone, before the store of this one may go too."""
        lost = self._known_processes.lost_error(rank, f"it has shown no sign of life for {self._silence_seconds:g} s")
        self._store.set(_LOST, msgspec.json.encode(ProcessLost.of(lost)).decode())
        time.sleep(_TELL_SECONDS if self._rank == FRONT_RANK else 0)
        return lost
