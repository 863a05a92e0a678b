"""The loss of a step, which the process of the last stage sends to the others of its pipeline."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from stagepack.errors import InputError
from stagepack_loaders.train.loss_combination import Deviation, check_deviation
from stagepack_loaders.train.microbatches import CallInputs

_TAG = 2  # of losses; schedules use 0, gradients of shared parameters 1


class LossExchange:
    """Receives the loss while the schedule runs: the process of the last stage mostly ends its own part first."""

    def __init__(self, last_rank: int, group: ProcessGroup | None) -> None:
        self._group = group
        self._last_rank = last_rank
        self._rank = torch.distributed.get_rank(group)
        self._other_ranks = [rank for rank in range(torch.distributed.get_world_size(group)) if rank != last_rank]
        self._fingerprint = 0
        self._message = torch.zeros(3, dtype=torch.float64)
        self._works: list[torch.distributed.Work | None] = []

    def begin(self, fingerprint: int) -> None:
        """Receive the loss of the next step as soon as it is sent.

        fingerprint: the checksum of the batch, which must be the same in all processes.
        """
        self._wait()  # for what the last step has sent
        self._fingerprint = fingerprint
        if self._rank != self._last_rank:
            self._message = torch.zeros(3, dtype=torch.float64)
            self._works = [
                torch.distributed.irecv(self._message, group=self._group, group_src=self._last_rank, tag=_TAG)
            ]

    def finish(self, losses: Sequence[torch.Tensor], deviation: Deviation) -> torch.Tensor:
        """Return the loss of the batch, float64."""
        if self._rank == self._last_rank:
            batch_loss = torch.stack(list(losses)).sum().double().cpu()
            checks = torch.tensor([self._fingerprint, deviation], dtype=torch.float64)
            self._message = torch.cat([batch_loss[None], checks])
            self._works = [
                torch.distributed.isend(self._message, group=self._group, group_dst=rank, tag=_TAG)
                for rank in self._other_ranks
            ]
        else:
            self._wait()
        return self._message[0].clone()

    def _wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []

    def check(self) -> None:
        """Compare the batch of this process with that of the process of the last stage, after all exchanges of the step."""
        if int(self._message[1]) != self._fingerprint:
            raise InputError(
                f"expected the same batch in all processes of a pipeline, found another one in process {self._rank} than in process "
                f"{self._last_rank}: give the same seed to their samplers"
            )
        check_deviation(Deviation(int(self._message[2])))


def fingerprint_of(call: CallInputs, *, with_content: bool) -> int:
    """Return a checksum of a batch: of its sizes, and of its content if that is asked for."""
    checksum = zlib.crc32(repr(sorted(call.sizes.items())).encode())
    if with_content:
        for input_name, value in sorted(call.values.items()):
            tensor = value[0] if input_name in call.replicated else value
            content: Any = repr(tensor).encode()
            if isinstance(tensor, torch.Tensor):
                dense = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
                content = dense.reshape(-1).view(torch.uint8).numpy()
            checksum = zlib.crc32(content, checksum)
    return checksum
