"""Batches for models of the zoo, also in files for processes that train, a loss for all of them, and the gradients of one process."""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case

MICROBATCHES = 4
# The vocabulary of the models of text: their results of this width are logits.
_VOCABULARY = 128


class _FloatsAsDoubles(TorchFunctionMode):
    """Computes in float64 what models compute in float32 whatever the dtype of their weights: norms, softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        args, kwargs = pytree.tree_map(
            lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {})
        )
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@contextlib.contextmanager
def precision(*, single: bool) -> Iterator[None]:
    """Run and export models as they are, or in float64 throughout."""
    with contextlib.nullcontext() if single else _FloatsAsDoubles():
        yield


def is_single(case: Case) -> bool:
    """Whether a model is trained in float32: torch multiplies groups of matrices in no larger type."""
    return case.row == "mixture of experts"


def build_model(case: Case, *, single: bool) -> tuple[torch.nn.Module, Inputs]:
    """A model of the zoo and its example, as they are or in float64, always with the same weights."""
    torch.manual_seed(0)
    model, inputs = case.build()
    if single:
        return model, inputs
    args, kwargs = pytree.tree_map(_as_double, (tuple(inputs.args), dict(inputs.kwargs)))
    return model.double(), Inputs(args=args, kwargs=kwargs, dynamic_shapes=inputs.dynamic_shapes)


def _as_double(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if is_float else leaf


def microbatches_of(inputs: Inputs, seed: int = 0) -> list[Inputs]:
    """Inputs like an example, with other numbers in the tensors that have its first dimension."""
    leaves, spec = pytree.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
    rows = next(len(leaf) for leaf in leaves if _has_rows(leaf))
    generator = torch.Generator().manual_seed(seed)

    def other_numbers(leaf: Any) -> Any:
        if not _has_rows(leaf) or len(leaf) != rows:
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        if leaf.dtype == torch.bool:
            return leaf
        numbers = torch.randint(int(leaf.min()), int(leaf.max()) + 1, leaf.shape, generator=generator)
        return numbers.to(leaf.dtype)

    microbatches = []
    for _ in range(MICROBATCHES):
        args, kwargs = pytree.tree_unflatten([other_numbers(leaf) for leaf in leaves], spec)
        microbatches.append(Inputs(args=args, kwargs=kwargs))
    return microbatches


def joined(microbatches: Sequence[Inputs]) -> Inputs:
    """The batch of some microbatches: tensors in which they differ are concatenated."""
    columns = zip(*(pytree.tree_leaves((m.args, m.kwargs)) for m in microbatches), strict=True)
    leaves = [
        torch.cat(column) if _has_rows(column[0]) and column[0] is not column[1] else column[0] for column in columns
    ]
    _, spec = pytree.tree_flatten((microbatches[0].args, microbatches[0].kwargs))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return Inputs(args=args, kwargs=kwargs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def loss_of(result: Any, target: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean loss of a microbatch: cross entropy where the target is labels, the mean square elsewhere."""
    losses = []
    for leaf, expected in zip(_predictions(result), target, strict=True):
        if expected.dtype == torch.int64:
            losses.append(torch.nn.functional.cross_entropy(leaf.flatten(0, -2), expected.flatten()))
        else:
            losses.append((leaf - expected).square().mean())
    return torch.stack(losses).sum()


def _predictions(result: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(result) if _has_rows(leaf)]
    return [
        torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        for leaf in leaves
        if leaf.is_complex() or leaf.is_floating_point()
    ]


def targets_for(results: Sequence[Any]) -> list[torch.Tensor]:
    """Random targets of a batch, given the results for its microbatches; 0 for results without a row for each of the batch."""
    generator = torch.Generator().manual_seed(1)
    targets = []
    rows = len(_predictions(results[0])[0])
    for column in zip(*map(_predictions, results), strict=True):
        if len(column[0]) % rows:
            targets.append(torch.zeros((), dtype=column[0].dtype))
        elif column[0].shape[-1] == _VOCABULARY and column[0].dim() == 3:
            shape = [sum(map(len, column)), *column[0].shape[1:-1]]
            targets.append(torch.randint(0, _VOCABULARY, shape, generator=generator))
        else:
            shape = [sum(map(len, column)), *column[0].shape[1:]]
            targets.append(torch.randn(shape, generator=generator, dtype=column[0].dtype))
    return targets


def new_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One step in one process: the mean loss of the microbatches, and the gradients of the parameters by name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def make_targets(model: torch.nn.Module, microbatches: Sequence[Inputs]) -> list[torch.Tensor]:
    """Random targets for a batch; the model stays as it is."""
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        return targets_for([_call(duplicate, microbatch) for microbatch in microbatches])


def reference_step(
    model: torch.nn.Module, microbatches: Sequence[Inputs], targets: Sequence[torch.Tensor]
) -> Reference:
    """Run a model forward and backward, one microbatch after the other, as stages do."""
    count = len(microbatches)
    target_parts = [target.chunk(count) if target.dim() else [target] * count for target in targets]
    losses = []
    for index, microbatch in enumerate(microbatches):
        loss = loss_of(_call(model, microbatch), [parts[index] for parts in target_parts]) / count
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(loss=torch.stack(losses).sum(), gradients=gradients)


def _call(model: torch.nn.Module, microbatch: Inputs) -> Any:
    """Call a model with copies, since it may write its inputs."""
    args, kwargs = copy.deepcopy((tuple(microbatch.args), dict(microbatch.kwargs)))
    torch.manual_seed(0)
    return model(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of a model, and the target of the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: list[torch.Tensor]


def write_batch(path: Path, inputs: Inputs, targets: Sequence[torch.Tensor]) -> None:
    """Write a batch; arguments that are no tensors go into the metadata."""
    leaves, spec = pytree.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
    tensors = {f"argument.{index}": leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    tensors |= {f"target.{index}": target for index, target in enumerate(targets)}
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    metadata = {"spec": pytree.treespec_dumps(spec), "constants": json.dumps(constants)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def read_batch(path: Path) -> Batch:
    """Read what `write_batch` has written."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        metadata = file.metadata()
    constants = json.loads(metadata["constants"])
    leaves = [tensors.get(f"argument.{index}", constant) for index, constant in enumerate(constants)]
    args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(metadata["spec"]))
    targets = [tensors[f"target.{index}"] for index in range(len(tensors)) if f"target.{index}" in tensors]
    return Batch(args=args, kwargs=kwargs, targets=targets)
