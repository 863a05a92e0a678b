"""How the processes of a training find each other: by a process group of torch, which is made here where there is none."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed
from msgspec import Struct
from torch.distributed import ProcessGroup as TorchGroup

from stagepack.errors import GroupError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.launch_environment import has_launcher, launched_address
from stagepack_loaders.distributed.meeting import (
    Identity,
    Members,
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
    gloo_reason,
    host_name,
    open_store,
)
from stagepack_loaders.distributed.routes import FRONT_RANK, ConnectionLostError

# How long the processes wait for each other before they make the default group of torch.
_START_SECONDS = 300.0


class _Hello(Struct, frozen=True, kw_only=True):
    """What a process tells all others: what it is, the stages that it runs, and of process 0 the address and the port of its store."""

    identity: Identity
    stages: tuple[int, ...]
    store: tuple[str, int] = ("", 0)


class _Presence(Struct, frozen=True, kw_only=True):
    """A process that has come, on a machine."""

    host: str


def meet_processes(bundle: Bundle, stages: Sequence[int], group: TorchGroup | None) -> Members:
    """Connect this process with the others. All of them must call this at the same time. `group` is None for all processes.

    A process that is lost meanwhile is an error that does not name it: a launcher such as torchrun does, and ends the others.
    """
    try:
        return _meet_processes(bundle, stages, group)
    except (ConnectionLostError, RuntimeError) as error:
        reason = gloo_reason(error)
        if "Timed out" in reason:  # of gloo, after the timeout of the group
            raise GroupError(f"expected all processes to call stagepack.train at the same time: {reason}") from None
        raise StageLostError(f"a process of the training is lost: {reason}") from None


def _meet_processes(bundle: Bundle, stages: Sequence[int], group: TorchGroup | None) -> Members:
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    address = chosen_address(launched_address()) if has_launcher() else LOOPBACK
    own_store: Any = open_store(address or host_name()) if rank == FRONT_RANK else None
    hello = _Hello(
        identity=own_identity(bundle, size, "", address),
        stages=tuple(stages),
        store=("", 0) if own_store is None else (address or host_name(), own_store.port),
    )
    hellos = _exchange(hello, group)
    identities = [member.identity for member in hellos]
    check_identities(dict(enumerate(identities)))
    store = open_store(*hellos[FRONT_RANK].store) if own_store is None else own_store
    address = reachable_address(address, [identity.address for identity in identities])
    connections = ProcessGroup(store, rank, size, address=address)
    _exchange(hello, group)  # the others are watched from now on, when all are connected
    stage_facts = tuple(
        StageFacts(
            stage=stage_number,
            stored_stages=(stage_number,),
            rank=member_rank,
            host=member.identity.host,
            process_id=member.identity.process_id,
            runtime="torch",
            device="",
        )
        for member_rank, member in enumerate(hellos)
        for stage_number in member.stages
    )
    return Members(store=store, group=connections, identities=identities, stage_facts=stage_facts)


def _exchange(hello: _Hello, group: TorchGroup | None) -> list[_Hello]:
    """The hellos of all processes, in the order of their ranks."""
    content = torch.frombuffer(bytearray(msgspec.json.encode(hello)), dtype=torch.uint8)
    size = torch.distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    torch.distributed.all_gather(lengths, torch.tensor([len(content)]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(content)] = content
    contents = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(contents, padded, group=group)
    return [
        msgspec.json.decode(received[: int(length)].numpy().tobytes(), type=_Hello)
        for received, length in zip(contents, lengths, strict=True)
    ]


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


def make_default_group() -> None:
    """Make the default process group of torch. A process that has not come after five minutes is a `GroupError` that names it.

    By itself, torch 2.13 finds in the store of torchrun the addresses of processes that are gone, after these were started again.
    """
    if not has_launcher():  # one process, such as that of a debugger
        store_in_memory = torch.distributed.HashStore()  # type: ignore[attr-defined] # documented, and exported at run time
        torch.distributed.init_process_group(_backends(), store=store_in_memory, rank=0, world_size=1)
        return
    seat = launched_seat(_START_SECONDS, "training")
    try:
        seat.exchange_reports("presence", _Presence(host=host_name()), seconds=_START_SECONDS)
        torch.distributed.init_process_group(_backends(), store=seat.store, rank=seat.rank, world_size=seat.size)
    except (ConnectionLostError, RuntimeError) as error:
        raise StageLostError(f"a process of the training is lost: {gloo_reason(error)}") from None


def _backends() -> str:
    """Backends for the host and for the GPUs of this machine: by itself, torch makes none for the host where there is a GPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cpu":
        return "cpu:gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"
