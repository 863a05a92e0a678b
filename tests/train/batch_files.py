"""A batch in a file: what processes that train are called with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from stagepack.capture.inputs import Inputs


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
