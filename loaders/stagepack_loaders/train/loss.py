"""The loss of a microbatch: the function of the caller, given the result of the model in its containers and a part of the target."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from stagepack.errors import InputError, OptionError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, Tree, ValueLeaf, constant_value, unflatten_tree

# The mean loss of a microbatch, of the result of the model and the target.
Loss = Callable[[Any, Any], torch.Tensor]


class MicrobatchLoss:
    """The share of each microbatch in the mean loss of a batch.

    Attributes:
        losses: the shares of this step, so far.
    """

    def __init__(
        self, loss: Loss, result: Tree, edges: Sequence[Edge], types: Collection[type], microbatches: int
    ) -> None:
        """Take the function of the caller.

        Args:
            loss: the mean loss of a microbatch.
            result: the containers of the result of the model.
            edges: the values that the last stage returns.
            types: classes to build the result of.
            microbatches: the number of microbatches.
        """
        self._loss = loss
        self._result = result
        self._names = [edge.name for edge in edges]
        self._scalar_names = {edge.name for edge in edges if edge.dtype in SCALAR_DTYPES}
        self._types = types
        self._microbatches = microbatches
        self._targets: list[Any] = []
        self.losses: list[torch.Tensor] = []

    def begin(self) -> None:
        """Begin a step."""
        self.losses = []

    def set_target(self, target: Any) -> None:
        """Set the target of the next batch.

        Raises:
            InputError: the first dimension of a tensor is no multiple of the number of microbatches, or there is an object of another
                class than tensors, numbers, texts and their containers.
        """
        self._targets = _cut_target(target, self._microbatches)

    def __call__(self, results: tuple[torch.Tensor, ...], microbatch_index: torch.Tensor) -> torch.Tensor:
        """Return the loss of a microbatch, which is given by its number, divided by the number of microbatches."""
        loss = self._loss(self._unflattened(results), self._targets[int(microbatch_index)])
        if not isinstance(loss, torch.Tensor) or loss.dim():
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise OptionError(f"loss: expected a function that returns a tensor without dimensions, found {found}")
        if not loss.requires_grad and any(tensor.requires_grad for tensor in results):
            raise OptionError("loss: expected a tensor with a gradient function, found one without: was it detached?")
        share = loss / self._microbatches
        self.losses.append(share.detach())
        return share

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


def _cut_target(target: Any, microbatch_count: int) -> list[Any]:
    """The target of each microbatch. Tensors without dimensions, and what is no tensor, are the same for each.

    Raises:
        InputError: the first dimension of a tensor is no multiple of the number of microbatches, or there is an object of another class.
    """
    if isinstance(target, torch.Tensor) and target.dim():
        if len(target) % microbatch_count:
            raise InputError(f"target: expected a multiple of {microbatch_count} rows, found {len(target)}")
        return list(target.chunk(microbatch_count))
    if isinstance(target, Mapping):
        parts = {key: _cut_target(entry, microbatch_count) for key, entry in target.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(microbatch_count)]
    if isinstance(target, list | tuple):
        columns = [_cut_target(entry, microbatch_count) for entry in target]
        rows = [[column[index] for column in columns] for index in range(microbatch_count)]
        # The fields of a named tuple are arguments of their own.
        return [type(target)(*row) if hasattr(target, "_fields") else type(target)(row) for row in rows]
    if target is None or isinstance(target, torch.Tensor | bool | int | float | str):
        return [target] * microbatch_count
    raise InputError(f"target: expected tensors in lists, tuples and dicts, found {type(target).__name__}")
