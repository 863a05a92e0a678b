"""Parameters that stages of several processes use: each process has a copy, and the gradients of all copies are summed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle

_TAG, _FLAG_TAG = 1, 3  # of gradients, and of flags; the schedules use 0, losses 2
# Flags of parameters, by index, in each other process.
_Flags = dict[int, dict[int, bool]]


def find_shared_parameters(bundle: Bundle, rank_of_stage: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the processes that have each trainable parameter of several, ascending, by its first name; in the order of the names."""
    ranks_of_parameter: dict[str, set[int]] = {}
    for stage_number, rank in enumerate(rank_of_stage):
        for weight in bundle.graph_file(stage_number, module_calls=False).graph.weights:
            if weight.trainable:
                ranks_of_parameter.setdefault(weight.names[0], set()).add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in sorted(ranks_of_parameter.items()) if len(ranks) > 1}


class GradientSums:
    """Sums the gradients of shared parameters over the processes that have a copy."""

    def __init__(
        self,
        ranks_of_parameter: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, torch.nn.Parameter],
        group: ProcessGroup | None,
    ) -> None:
        self._group = group
        self._rank = torch.distributed.get_rank(group)
        self._names = [name for name, ranks in ranks_of_parameter.items() if self._rank in ranks]
        self._shared = [(parameters[name], ranks_of_parameter[name]) for name in self._names]
        self._other_ranks = sorted({rank for _, ranks in self._shared for rank in ranks} - {self._rank})
        self._earlier_gradients: list[torch.Tensor | None] = []
        self._await_requires_gradient: Callable[[], _Flags] = dict

    def begin(self) -> None:
        """Set aside gradients of earlier steps, which are sums already."""
        self._earlier_gradients = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None
        self._await_requires_gradient = self._exchange_flags([parameter.requires_grad for parameter, _ in self._shared])

    def finish(self) -> None:
        """Sum the gradients of a step, and add those of earlier steps.

        The processes exchange gradients in the group of the pipeline, so that no other group is needed.
        """
        self._check_frozen()
        own_flags = [parameter.grad is not None for parameter, _ in self._shared]
        await_flags = self._exchange_flags(own_flags)
        transfers: list[torch.distributed.P2POp] = []
        gradients_by_rank: list[dict[int, torch.Tensor]] = []
        for parameter, ranks in self._shared:
            gradients: dict[int, torch.Tensor] = {}
            gradients_by_rank.append(gradients)
            if not parameter.requires_grad:
                continue
            # In each process a convolution may have chosen another order in memory.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[self._rank] = gradient.contiguous()
            for other_rank in ranks:
                if other_rank != self._rank:
                    gradients[other_rank] = torch.empty_like(gradients[self._rank])
                    transfers.append(self._transfer(torch.distributed.isend, gradients[self._rank], other_rank))
                    transfers.append(self._transfer(torch.distributed.irecv, gradients[other_rank], other_rank))
        if transfers:
            for work in torch.distributed.batch_isend_irecv(transfers):
                work.wait()
        has_gradient = await_flags() | {self._rank: dict(enumerate(own_flags))}
        for index, (parameter, ranks) in enumerate(self._shared):
            # In one order in all processes, so that the copies stay equal. Where no process has a gradient there is none.
            addends = [gradients_by_rank[index][rank] for rank in ranks if has_gradient[rank][index]]
            earlier_gradient = self._earlier_gradients[index]
            if earlier_gradient is not None:
                addends.append(earlier_gradient)
            parameter.grad = sum(addends[1:], start=addends[0]) if addends else None

    def _exchange_flags(self, own_flags: Sequence[bool]) -> "Callable[[], _Flags]":
        """Send a flag for each parameter to the other processes that have it; the result waits for theirs."""
        pending = []
        for rank in self._other_ranks:
            common = [index for index, (_, ranks) in enumerate(self._shared) if rank in ranks]
            sent = torch.tensor([own_flags[index] for index in common], dtype=torch.uint8)
            received = torch.empty_like(sent)
            works: list[Any] = [
                torch.distributed.irecv(received, group=self._group, group_src=rank, tag=_FLAG_TAG),
                torch.distributed.isend(sent, group=self._group, group_dst=rank, tag=_FLAG_TAG),
            ]
            pending.append((rank, common, sent, received, works))

        def await_flags() -> _Flags:
            flags = {}
            for rank, common, _, received, works in pending:
                for work in works:
                    work.wait()
                flags[rank] = dict(zip(common, map(bool, received.tolist()), strict=True))
            return flags

        return await_flags

    def _check_frozen(self) -> None:
        """Compare with the other processes which parameters are frozen: they would wait for each other, and their copies differ."""
        for rank, flags in self._await_requires_gradient().items():
            for index, is_trained in flags.items():
                if is_trained != self._shared[index][0].requires_grad:
                    states = {True: "requires gradients", False: "is frozen"}
                    raise OptionError(
                        f"{self._names[index]} {states[is_trained]} in process {rank} of the pipeline, and "
                        f"{states[not is_trained]} in process {self._rank}: change requires_grad in all processes that have the parameter"
                    )

    def _transfer(self, function: Any, gradient: torch.Tensor, rank: int) -> torch.distributed.P2POp:
        return torch.distributed.P2POp(function, gradient, group=self._group, group_peer=rank, tag=_TAG)
