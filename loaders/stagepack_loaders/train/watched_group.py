"""The processes of a training find each other beside the groups in which they train, so that they notice when one is gone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.distributed_c10d import Store

from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.handshake import (
    Identity,
    LoadReport,
    StageFacts,
    exchange_identities,
    exchange_reports,
    own_identity,
)
from stagepack_loaders.distributed.launch_environment import has_launcher, launched_address
from stagepack_loaders.distributed.network_address import chosen_address, reachable_address
from stagepack_loaders.distributed.process_group import LOOPBACK, ProcessGroup, host_name, open_store
from stagepack_loaders.torch.stage import TorchStage

_MEET_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProcesses:
    """The processes of a training, as `stagepack_loaders.distributed.group_watch.WatchedGroup` has them.

    Attributes:
        store: where they found each other.
        group: the connections for messages that tell whether they live.
        identities: what each process is, by rank.
        stage_facts: what they have loaded.
    """

    store: Store
    group: ProcessGroup
    identities: tuple[Identity, ...]
    stage_facts: tuple[StageFacts, ...]


def meet_processes(bundle: Bundle, stages: Mapping[int, TorchStage], group: TorchGroup | None) -> TrainingProcesses:
    """Connect this process with the others. All of them must call this at the same time.

    Args:
        bundle: the bundle.
        stages: the stages of this process, by stage number.
        group: the processes; None for all.

    Raises:
        GroupError: the processes have different bundles or versions, or cannot connect.
    """
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    address = chosen_address(launched_address()) if has_launcher() else LOOPBACK
    store: Any = None
    location: list[tuple[str, int]] = [("", 0)]
    if not rank:
        store = open_store(address or host_name())
        location = [(address or host_name(), store.port)]
    torch.distributed.broadcast_object_list(location, group=group, group_src=0)
    if store is None:
        store = open_store(*location[0])
    identity = own_identity(bundle, "", address)
    identities = exchange_identities(store, rank, size, identity, seconds=_MEET_SECONDS, check=lambda: None)
    report = LoadReport(stages=tuple(_facts(number, stage, rank) for number, stage in stages.items()))
    reports = exchange_reports(store, "loaded stages", rank, size, report, seconds=_MEET_SECONDS, check=lambda: None)
    address = reachable_address(address, [member.address for member in identities])
    return TrainingProcesses(
        store=store,
        group=ProcessGroup(store, rank, size, address=address),
        identities=tuple(identities),
        stage_facts=tuple(facts for other_report in reports for facts in other_report.stages),
    )


def _facts(stage_number: int, stage: TorchStage, rank: int) -> StageFacts:
    return StageFacts(
        stage=stage_number,
        rank=rank,
        host=host_name(),
        process_id=os.getpid(),
        runtime=stage.runtime,
        device=str(stage.device),
        files=(),
        bytes_read=0,
        seconds=0.0,
        written_inputs=(),
    )
