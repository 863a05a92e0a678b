"""How a model is trained, alike in all processes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from stagepack_train.microbatches import BatchDimensions

# The loss of a microbatch, of the result of the model and the target.
Loss = Callable[[Any, Any], torch.Tensor]
Reduction = Literal["mean", "sum"]
Recompute = Literal["regions", "stages"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How to train; see `stagepack.train`. `dimensions`: where tensors have the batch; `rank_of_stage`: the process of each stage."""

    loss: Loss
    microbatches: int
    schedule: str
    rank_of_stage: tuple[int, ...]
    dimensions: BatchDimensions
    loss_reduction: Reduction | None
    types: tuple[type, ...]
    allow_ops: tuple[str, ...]
    modules: bool
    recompute: Recompute
    seed: int
    out: str | os.PathLike[str] | None
    overwrite: bool
