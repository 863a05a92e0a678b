"""Data parallel training: several pipelines with the same stages work on batches of their own, and average their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from stagepack.errors import OptionError

_PIPELINE, _REPLICAS = "pp", "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroups:
    """The groups that a process trains in; None for the group of all processes."""

    pipeline: ProcessGroup | None  # among which the stages are divided
    replicas: ProcessGroup | None = None  # which have the same stages
    whole: ProcessGroup | None  # of all pipelines
    replica_count: int = 1  # of pipelines
    replica: int = 0  # the number of that of this process

    @property
    def all_groups(self) -> tuple[ProcessGroup | None, ...]:
        """The groups that there are."""
        return (self.pipeline, self.whole) if self.replica_count == 1 else (self.pipeline, self.replicas, self.whole)


def groups_of_mesh(mesh: DeviceMesh) -> TrainingGroups:
    """Return the groups of a mesh with a dimension ``pp``, and ``dp`` if there are several pipelines."""
    names = tuple(mesh.mesh_dim_names or ())
    if _PIPELINE not in names or not {_PIPELINE, _REPLICAS}.issuperset(names):
        raise OptionError(
            f"mesh: expected the dimensions {_PIPELINE!r}, for the stages, and {_REPLICAS!r}, for copies of the pipeline, found {names}"
        )
    process_count = torch.distributed.get_world_size()
    if mesh.size() != process_count:
        raise OptionError(f"mesh: expected all {process_count} processes, found {mesh.size()}")
    pipeline = mesh.get_group(_PIPELINE)
    if _REPLICAS not in names:
        return TrainingGroups(pipeline=pipeline, whole=None)
    return TrainingGroups(
        pipeline=pipeline,
        replicas=mesh.get_group(_REPLICAS),
        whole=None,
        replica_count=mesh[_REPLICAS].size(),
        replica=mesh.get_local_rank(_REPLICAS),
    )


def average_gradients(parameters: Sequence[torch.nn.Parameter], groups: TrainingGroups) -> None:
    """Average the gradients of several pipelines. Those of earlier steps, which are equal in all, stay as they are."""
    if not parameters:
        return
    device = parameters[0].device
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    has_gradient = has_gradient.to(device)
    torch.distributed.all_reduce(has_gradient, torch.distributed.ReduceOp.MAX, group=groups.replicas)
    works = []
    trained = [parameter for parameter, is_trained in zip(parameters, has_gradient.tolist(), strict=True) if is_trained]
    for parameter in trained:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = gradient.contiguous()
        works.append(torch.distributed.all_reduce(parameter.grad, group=groups.replicas, async_op=True))
    for parameter, work in zip(trained, works, strict=True):
        if work is not None:
            work.wait()
        assert parameter.grad is not None
        parameter.grad.div_(groups.replica_count)


def average_loss(mean_loss: torch.Tensor, groups: TrainingGroups) -> torch.Tensor:
    """Return the mean of the losses of all pipelines."""
    if groups.replica_count > 1:
        torch.distributed.all_reduce(mean_loss, group=groups.replicas)
        mean_loss /= groups.replica_count
    return mean_loss
