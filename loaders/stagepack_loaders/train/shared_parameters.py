"""Parameters that stages of several processes use: each process has a copy, and the gradients of all copies are summed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from stagepack.format.reader import Bundle

_TAG = 1  # of gradients; the schedules use 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """A parameter of which several processes have a copy.

    Attributes:
        name: its first name in the model.
        ranks: the processes that have a copy, ascending, as numbers in the group of the pipeline.
    """

    name: str
    ranks: tuple[int, ...]


def find_shared_parameters(bundle: Bundle, rank_of_stage: Sequence[int]) -> tuple[SharedParameter, ...]:
    """Return the trainable parameters that stages of several processes use, in the order of their names.

    Args:
        bundle: the bundle.
        rank_of_stage: the process of each stage.
    """
    ranks_of_parameter: dict[str, set[int]] = {}
    for stage_number, rank in enumerate(rank_of_stage):
        for weight in bundle.graph_file(stage_number, module_calls=False).graph.weights:
            if weight.trainable:
                ranks_of_parameter.setdefault(weight.names[0], set()).add(rank)
    return tuple(
        SharedParameter(name=name, ranks=tuple(sorted(ranks)))
        for name, ranks in sorted(ranks_of_parameter.items())
        if len(ranks) > 1
    )


class GradientSums:
    """Sums the gradients of shared parameters over the processes that have a copy."""

    def __init__(
        self,
        shared_parameters: Sequence[SharedParameter],
        parameters: Mapping[str, torch.nn.Parameter],
        group: ProcessGroup | None,
    ) -> None:
        """Select the shared parameters of this process.

        Args:
            shared_parameters: the shared parameters, alike in all processes.
            parameters: the parameters of this process, by name.
            group: the processes of the pipeline; None for all.
        """
        self._group = group
        self._rank = torch.distributed.get_rank(group)
        self._shared = [
            (parameters[parameter.name], parameter.ranks)
            for parameter in shared_parameters
            if self._rank in parameter.ranks
        ]
        self._earlier_gradients: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Set aside gradients of earlier steps, which are sums already."""
        self._earlier_gradients = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None

    def finish(self) -> None:
        """Sum the gradients of a step, and add those of earlier steps.

        The processes exchange gradients in the group of the pipeline, so that no other group is needed.
        """
        transfers: list[torch.distributed.P2POp] = []
        sums = []
        for (parameter, ranks), earlier_gradient in zip(self._shared, self._earlier_gradients, strict=True):
            if not parameter.requires_grad:
                continue
            # In each process a convolution may have chosen another order in memory.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients = {self._rank: gradient.contiguous()}
            for other_rank in ranks:
                if other_rank != self._rank:
                    gradients[other_rank] = torch.empty_like(gradients[self._rank])
                    transfers.append(self._transfer(torch.distributed.isend, gradients[self._rank], other_rank))
                    transfers.append(self._transfer(torch.distributed.irecv, gradients[other_rank], other_rank))
            # In one order in all processes, so that the copies stay equal.
            sums.append((parameter, [gradients[rank] for rank in ranks], earlier_gradient))
        if transfers:
            for work in torch.distributed.batch_isend_irecv(transfers):
                work.wait()
        for parameter, addends, earlier_gradient in sums:
            total = sum(addends[1:], start=addends[0])
            parameter.grad = total if earlier_gradient is None else total + earlier_gradient

    def _transfer(self, function: Any, gradient: torch.Tensor, rank: int) -> torch.distributed.P2POp:
        return torch.distributed.P2POp(function, gradient, group=self._group, group_peer=rank, tag=_TAG)
