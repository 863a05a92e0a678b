"""Whether the mean of the losses of microbatches is the loss of their batch, as one process computes it.

It is not where the loss is a sum, is a mean over numbers of elements that differ (`ignore_index`, weights, masks), or compares rows with
each other. That may differ from batch to batch, so each step is checked.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch

from stagepack.errors import OptionError
from stagepack_loaders.train.targets import Target

Reduction = Literal["mean", "sum"]

# Of rounding, for sums in another order. Losses that differ by more have their gradients compared, which do not cancel.
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

    The results of one microbatch are kept meanwhile, and not those of all, which may need much memory.

    Attributes:
        deviation: what was found in this step.
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
        devices = {result.device for result in second.results if result.device.type != "cpu"}
        device_type = next((device.type for device in devices), "cuda")
        # The function of the caller may draw random numbers.
        with torch.random.fork_rng(list(devices), device_type=device_type):
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
