"""Parameters that stages of several processes use: each process has a copy, and the gradients of all copies are summed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from stagepack.format.reader import Bundle


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
    """Sums the gradients of shared parameters over the processes that have a copy.

    Attributes:
        groups: the groups of such processes that this process is in.
    """

    def __init__(
        self,
        shared_parameters: Sequence[SharedParameter],
        parameters: Mapping[str, torch.nn.Parameter],
        group: ProcessGroup | None,
    ) -> None:
        """Make a group for each set of processes. Those that have a copy of one parameter must call this at the same time.

        Args:
            shared_parameters: the shared parameters, alike in all processes.
            parameters: the parameters of this process, by name.
            group: the processes of the pipeline; None for all.
        """
        rank = torch.distributed.get_rank(group)
        groups = {
            ranks: torch.distributed.new_group(
                [_global_rank(group, member) for member in ranks], use_local_synchronization=True
            )
            for ranks in sorted({parameter.ranks for parameter in shared_parameters})
            if rank in ranks
        }
        self.groups = tuple(groups.values())
        self._shared = [
            (parameters[parameter.name], groups[parameter.ranks])
            for parameter in shared_parameters
            if rank in parameter.ranks
        ]
        self._earlier_gradients: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Set aside gradients of earlier steps, which are sums already."""
        self._earlier_gradients = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None

    def finish(self) -> None:
        """Sum the gradients of a step, and add those of earlier steps."""
        for (parameter, group), earlier_gradient in zip(self._shared, self._earlier_gradients, strict=True):
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # In each process a convolution may have chosen another order in memory.
                gradient = gradient.contiguous()
                torch.distributed.all_reduce(gradient, group=group)
                parameter.grad = gradient if earlier_gradient is None else gradient + earlier_gradient


def _global_rank(group: ProcessGroup | None, rank: int) -> int:
    return rank if group is None else torch.distributed.get_global_rank(group, rank)
