"""The loss of a microbatch: the function of the caller, given the result of the model in its containers and a part of the target.

- The loss of a step, which the process of the last stage sends to the others of its pipeline.
- Cut the inputs of a call into microbatches of equal size.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from stagepack.errors import InputError, OptionError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, Tree, ValueLeaf, constant_value, unflatten_tree
from stagepack_loaders.train.batch_dimension import BatchDimensions
from stagepack_loaders.train.loss_combination import Deviation, LossCombination, Reduction, check_deviation
from stagepack_loaders.train.targets import Target

# The loss of a microbatch, of the result of the model and the target.
Loss = Callable[[Any, Any], torch.Tensor]
_TAG = 2  # of losses; schedules use 0, gradients of shared parameters 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInputs:
    """The inputs of a call, for a schedule that cuts the first dimension of every tensor.

    Attributes:
        values: the inputs by name, tensors with a new first dimension, of the microbatches.
        replicated: those that are the same for each microbatch.
        batch_size: the number of rows of all microbatches.
        sizes: the sizes of the symbols in each microbatch.
    """

    values: Mapping[str, Any]
    replicated: frozenset[str]
    batch_size: int
    sizes: Mapping[str, int]


def cut_inputs(
    entry_point: EntryPoint,
    arguments: Mapping[str, BoundArgument],
    dimensions: BatchDimensions,
    microbatch_count: int,
) -> CallInputs:
    """Return the inputs of a call for a number of microbatches."""
    values: dict[str, Any] = {}
    microbatch: dict[str, BoundArgument] = {}
    replicated: set[str] = set()
    batch: tuple[str, int] | None = None
    for edge in entry_point.inputs:
        argument = arguments[edge.name]
        value = argument.value
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise InputError(
                    f"{argument.location}: a step computes the gradients of parameters only, found a tensor that requires gradients: give "
                    "it detached"
                )
            dimension = _cut_dimension(edge, value, dimensions, microbatch_count)
            if dimension is None:
                replicated.add(edge.name)
                value = value.expand(microbatch_count, *value.shape)
            else:
                batch = _checked_batch(batch, argument.location, value.shape[dimension], microbatch_count)
                value = value.unflatten(dimension, (microbatch_count, batch[1] // microbatch_count)).movedim(
                    dimension, 0
                )
        values[edge.name] = value
        microbatch[edge.name] = BoundArgument(argument.location, value[0] if isinstance(value, torch.Tensor) else value)
    if batch is None and microbatch_count > 1:
        raise InputError(
            f"expected inputs that are {microbatch_count} times as large as in the bundle, in the dimension of the batch, found none"
        )
    sizes = check_values(entry_point.inputs, microbatch, entry_point.symbols, entry_point.guards)
    return CallInputs(values=values, replicated=frozenset(replicated), batch_size=batch[1] if batch else 0, sizes=sizes)


def _cut_dimension(edge: Edge, value: torch.Tensor, dimensions: BatchDimensions, microbatch_count: int) -> int | None:
    """The dimension in which an input is cut."""
    dimension = dimensions.inputs.get(edge.name)
    if dimension is None or dimension >= value.dim():
        return None
    # Of a fixed size, the size of the argument says whether it is a batch of several microbatches.
    return None if dimensions.size == value.shape[dimension] and microbatch_count > 1 else dimension


def _checked_batch(batch: tuple[str, int] | None, location: str, size: int, microbatch_count: int) -> tuple[str, int]:
    """The batch size, with the location of the argument that has it."""
    if batch is not None and size != batch[1]:
        raise InputError(f"{location}: expected {batch[1]} rows, the size of the batch in {batch[0]}, found {size}")
    if size % microbatch_count:
        raise InputError(
            f"{location}: expected a multiple of {microbatch_count} rows, one or more for each microbatch, found {size}: leave out the "
            "last batch, or choose another number of microbatches"
        )
    return batch or (location, size)


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
