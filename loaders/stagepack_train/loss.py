"""The loss of a batch: the shares of its microbatches, and whether they add up to what one process computes.

The mean of the losses of microbatches is not the loss of their batch where that is a sum, is a mean over numbers of elements that differ
(`ignore_index`, weights, masks), or compares rows with each other. That may differ from batch to batch, so each step is checked.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from stagepack.errors import InputError, OptionError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.tree import Tree, ValueLeaf, fill_tree
from stagepack_train.microbatches import Target
from stagepack_train.random_numbers import forked_generators
from stagepack_train.training_options import TrainingOptions

_TAG = 2  # of losses; schedules use 0, gradients of shared parameters 1
# Units of rounding, for sums in another order. Losses that differ by more have their gradients compared, which do not cancel.
_ROUNDINGS = 16
_DEFINES = "or give loss_reduction='mean' to train with the mean of the losses of microbatches"


class Deviation(IntEnum):
    """How the loss of two microbatches together differs from the mean of theirs; a number, so that processes can tell each other."""

    NONE = 0
    SUM = 1
    UNEQUAL = 2
    RESULT = 3
    FAILED = 4


_TEXTS = {
    Deviation.SUM: "it is their sum: give loss_reduction='sum', or return a mean",
    Deviation.UNEQUAL: (
        "it is a mean over numbers of elements that differ, as with ignore_index, weights or masks, compares rows with each other, or "
        "draws random numbers: "
        "return the sum divided by the number of all elements of the batch, which is a tensor without dimensions in the target, and give "
        f"loss_reduction='sum'; {_DEFINES}"
    ),
    Deviation.RESULT: (
        "it uses a result without a batch dimension, which the model computes from all rows of a microbatch: compute the loss from results "
        f"that have rows, {_DEFINES}"
    ),
    Deviation.FAILED: f"it cannot be computed for two microbatches together: compute it for any number of rows, {_DEFINES}",
}


class _Microbatch(NamedTuple):
    """A microbatch whose loss is known; nothing has a gradient function."""

    results: tuple[torch.Tensor, ...]
    target: Any
    loss: torch.Tensor


class LossCombination:
    """Compares the loss of each two microbatches in a row with that of both together.

    The results of one microbatch are kept meanwhile, and not those of all, which may need much memory. `deviation` is of this step.
    """

    def __init__(
        self,
        loss: Callable[[tuple[torch.Tensor, ...], Any], torch.Tensor],
        dimensions: Sequence[int | None],
        *,
        is_checked: bool,
    ) -> None:
        self._loss = loss
        self._dimensions = dimensions
        self._is_checked = is_checked
        self._target: Any = None
        self._previous: _Microbatch | None = None
        self.deviation = Deviation.NONE

    def begin(self, target: Target) -> None:
        """Begin a step."""
        self._target = target
        self._previous = None
        self.deviation = Deviation.NONE

    def add(self, index: int, results: tuple[torch.Tensor, ...], loss: torch.Tensor) -> None:
        """Compare a microbatch with the one before it."""
        if not self._is_checked or self.deviation:
            return
        target = self._target.part(index, index + 1)
        microbatch = _Microbatch(tuple(result.detach() for result in results), target, loss.detach())
        if self._previous is not None:
            self.deviation = self._tried(self._previous, microbatch, self._target.part(index - 1, index + 1))
        self._previous = None if self.deviation else microbatch

    def _tried(self, first: _Microbatch, second: _Microbatch, target: Any) -> Deviation:
        # The function of the caller may draw random numbers.
        with forked_generators(result.device for result in second.results):
            try:
                return self._compare(first, second, target)
            except Exception:  # noqa: BLE001 - whatever the function of the caller raises
                return Deviation.FAILED

    def _compare(self, first: _Microbatch, second: _Microbatch, target: Any) -> Deviation:
        with torch.no_grad():
            joint_loss = self._loss(self._joined(first.results, second.results), target)
        losses = torch.stack([loss.double().cpu() for loss in (first.loss, second.loss, joint_loss)])
        rounding = _ROUNDINGS * _epsilon(joint_loss) * losses[losses.isfinite()].abs().sum()
        mean = losses[:2].mean()
        if torch.isclose(losses[2], mean, rtol=0, atol=float(rounding), equal_nan=True):
            return Deviation.NONE
        if torch.isclose(losses[2], 2 * mean, rtol=0, atol=float(rounding)):
            return Deviation.SUM
        if losses.isfinite().all() and self._has_equal_gradients(first, second, target):
            return Deviation.NONE
        has_unknown_result = None in self._dimensions and losses[2].isnan() and losses[:2].isfinite().all()
        return Deviation.RESULT if has_unknown_result else Deviation.UNEQUAL

    def _joined(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results of two microbatches together."""
        columns = zip(first, second, self._dimensions, strict=True)
        return tuple(_join(first_result, second_result, dim) for first_result, second_result, dim in columns)

    def _has_equal_gradients(self, first: _Microbatch, second: _Microbatch, target: Any) -> bool:
        """Whether rows get the same gradients together as from the mean of two losses, where the losses themselves are rounding only.

        A loss of terms that cancel, such as the divergence of two equal distributions, is larger in rounding than in value.
        """
        microbatches = first, second
        with torch.enable_grad():
            leaves = [tuple(_leaf(result) for result in microbatch.results) for microbatch in microbatches]
            losses = [self._loss(*pair) for pair in zip(leaves, (first.target, second.target), strict=True)]
            together = self._loss(self._joined(*leaves), target)
            inputs = [leaf for results in leaves for leaf in results if leaf.requires_grad]
            expected_gradients, joint_gradients = (
                torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
                for loss in (torch.stack(losses).mean(), together)
            )
        return all(
            _norm(ours - theirs) <= _ROUNDINGS * _epsilon(theirs) * _norm(theirs)
            for ours, theirs in zip(joint_gradients, expected_gradients, strict=True)
        )


def _join(first: torch.Tensor, second: torch.Tensor, dimension: int | None) -> torch.Tensor:
    """A result of two microbatches together. One without rows is not known if it differs: NaN says whether the loss uses it."""
    if dimension is not None:
        return torch.cat([first, second], dimension)
    is_known = torch.equal(first, second) or not (second.is_floating_point() or second.is_complex())
    return second if is_known else torch.full_like(second, torch.nan)


def _leaf(result: torch.Tensor) -> torch.Tensor:
    leaf = result.detach()
    return leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.complex128 if tensor.is_complex() else torch.float64))


def _epsilon(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def check_deviation(deviation: Deviation) -> None:
    """Refuse a loss whose mean over microbatches is not that of the batch."""
    if deviation:
        raise OptionError(
            f"loss: the loss of a batch is not the mean of those of its microbatches: {_TEXTS[deviation]}. The gradients of this step are "
            "not those of one process"
        )


class MicrobatchLoss:
    """The share of each microbatch in the loss of a batch. `losses` are those of this step, so far."""

    def __init__(self, result: Tree, edges: Mapping[str, Edge], options: TrainingOptions) -> None:
        self._result = result
        self._names = list(edges)
        self._scalar_names = {edge.name for edge in edges.values() if edge.dtype in SCALAR_DTYPES}
        self._options = options
        self._divisor = 1 if options.loss_reduction == "sum" else options.microbatches
        self._target = Target(None, 1, 0, ())
        self.combination = LossCombination(
            self._call,
            [options.dimensions.results.get(edge_name) for edge_name in edges],
            is_checked=options.loss_reduction is None,
        )
        self.losses: list[torch.Tensor] = []

    def begin(self, target: Any, batch_size: int) -> None:
        """Begin a step."""
        dimensions = self._options.dimensions.target_dimensions
        self._target = Target(target, self._options.microbatches, batch_size, dimensions)
        self.losses = []
        self.combination.begin(self._target)

    def __call__(self, results: tuple[torch.Tensor, ...], microbatch_index: torch.Tensor) -> torch.Tensor:
        """Return the share of a microbatch, which is given by its number."""
        index = int(microbatch_index)
        loss = self._call(results, self._target.part(index, index + 1))
        if not loss.requires_grad and any(tensor.requires_grad for tensor in results):
            raise OptionError("loss: expected a tensor with a gradient function, found one without: was it detached?")
        self.combination.add(index, results, loss)
        share = loss / self._divisor
        self.losses.append(share.detach())
        return share

    def _call(self, results: tuple[torch.Tensor, ...], target: Any) -> torch.Tensor:
        try:
            loss = self._options.loss(self._unflattened(results), target)
        except Exception as error:
            if target is None:
                error.add_note("training.step was called without a target: pass target= if the loss needs one")
            raise
        if not isinstance(loss, torch.Tensor) or loss.dim():
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise OptionError(f"loss: expected a function that returns a tensor without dimensions, found {found}")
        return loss

    def _unflattened(self, results: tuple[torch.Tensor, ...]) -> Any:
        """The result of the model in its containers."""
        if isinstance(self._result, ValueLeaf) and not self._scalar_names:
            return results[0]
        result_values = {
            edge_name: value.item() if edge_name in self._scalar_names else value
            for edge_name, value in zip(self._names, results, strict=True)
        }
        return fill_tree(self._result, result_values, self._options.types)


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
        """Receive the loss of the next step as soon as it is sent. The fingerprint of the batch must be the same in all processes."""
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
