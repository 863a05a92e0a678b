"""The processes of a training find each other beside the groups in which they train, so that they notice when one is gone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.distributed_c10d import Store

from stagepack.errors import GroupError, StageLostError, first_line
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.handshake import Identity, StageFacts, check_identities, own_identity
from stagepack_loaders.distributed.launch_environment import has_launcher, launched_address
from stagepack_loaders.distributed.network_address import chosen_address, reachable_address
from stagepack_loaders.distributed.process_group import (
    LOOPBACK,
    ConnectionLostError,
    ProcessGroup,
    host_name,
    open_store,
)
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.train.start_messages import Answer, Hello, KnownProcesses, StartMessages, finished


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
