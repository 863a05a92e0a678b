"""The loss of a microbatch: the function of the caller, given the result of the model in its containers and a part of the target."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from stagepack.errors import OptionError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, Tree, ValueLeaf, constant_value, unflatten_tree
from stagepack_loaders.train.batch_dimension import BatchDimensions
from stagepack_loaders.train.loss_combination import LossCombination, Reduction
from stagepack_loaders.train.targets import Target

# The loss of a microbatch, of the result of the model and the target.
Loss = Callable[[Any, Any], torch.Tensor]


class MicrobatchLoss:
    """The share of each microbatch in the loss of a batch.

    Attributes:
        losses: the shares of this step, so far.
        combination: whether the loss of the batch is what the shares add up to.
    """

    def __init__(
        self,
        loss: Loss,
        result: Tree,
        edges: Mapping[str, Edge],
        types: Collection[type],
        *,
        microbatches: int,
        reduction: Reduction | None,
        dimensions: BatchDimensions,
    ) -> None:
        self._loss = loss
        self._result = result
        self._names = list(edges)
        self._scalar_names = {edge.name for edge in edges.values() if edge.dtype in SCALAR_DTYPES}
        self._types = types
        self._microbatches = microbatches
        self._divisor = 1 if reduction == "sum" else microbatches
        self._dimensions = dimensions
        self._target = Target(None, 1, 0, ())
        self.combination = LossCombination(
            self._call, [dimensions.results.get(edge_name) for edge_name in edges], is_checked=reduction is None
        )
        self.losses: list[torch.Tensor] = []

    def begin(self, target: Any, batch_size: int) -> None:
        """Begin a step."""
        self._target = Target(target, self._microbatches, batch_size, self._dimensions.target_dimensions)
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
            loss = self._loss(self._unflattened(results), target)
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

        def leaf_value(leaf: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return result_values[leaf.name] if isinstance(leaf, ValueLeaf) else constant_value(leaf)

        return unflatten_tree(self._result, leaf_value, self._types)
