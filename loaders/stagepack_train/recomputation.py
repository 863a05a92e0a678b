"""Activation checkpointing: the values inside a region are computed again in the backward pass, and not kept from the forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from stagepack.format.aliasing import AliasClasses, alias_classes
from stagepack.format.graph import Weight
from stagepack.torch_internals import child_modules
from stagepack_loaders.torch.build import INPUT_TYPES
from stagepack_loaders.torch.stage import TorchStage

_REGION_PREFIX = "region_"


class _RecomputedModule(torch.nn.Module):
    """A module of a graph whose values are computed again in the backward pass, with the same random numbers."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Any) -> Any:
        return recomputed(self.module, *values)


def recomputed(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function; autograd keeps its arguments, and calls it again to find what it needs in the backward pass."""
    return checkpoint(function, *values, use_reentrant=False) if torch.is_grad_enabled() else function(*values)


def recompute_regions(stage: TorchStage) -> None:
    """Let each region of a stage be computed again in the backward pass, except those that touch memory that is written.

    The outermost regions are taken. A region that is computed again would update running statistics twice, or read what was written
    after it.
    """
    classes = alias_classes(stage.graph)
    remaining: list[torch.nn.Module] = [stage.graph_module]
    while remaining:
        children = child_modules(remaining.pop())
        for child_name, child in children.items():
            if isinstance(child, GraphModule) and child_name.startswith(_REGION_PREFIX):
                if not _touches_written_memory(child, classes):
                    children[child_name] = _RecomputedModule(child)
            elif child is not None:
                remaining.append(child)


def can_recompute_stage(stage: TorchStage) -> bool:
    """Whether a stage may be computed again: it writes none of its inputs and buffers."""
    classes = alias_classes(stage.graph)
    values = (*(value.name for value in stage.graph.inputs), *(weight.value for weight in stage.graph.weights))
    return not any(classes.is_written(value_name) for value_name in values)


def _touches_written_memory(region: GraphModule, classes: AliasClasses) -> bool:
    """Whether an input of a region, in its first call, is written anywhere in the stage."""
    values = (entry.value if isinstance(entry, Weight) else entry.name for entry in region.meta[INPUT_TYPES])
    return any(classes.is_written(value_name) for value_name in values)
