"""Stages as they are in processes of their own: what one hands to another is copied, and no memory is shared."""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch

from stagepack.format.reader import Bundle
from stagepack_loaders.load_stage import load_stage
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.torch.stage import TorchStage


class Apart:
    """A stage that other stages give copies to."""

    def __init__(self, stage: TorchStage, copied: Sequence[bool]) -> None:
        """`copied` says which inputs come from other stages."""
        self._stage = stage
        self._copied = copied

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        return self._stage.run(
            [_copy(value) if copied else value for value, copied in zip(values, self._copied, strict=True)]
        )


def load_apart(
    bundle: Bundle, *, types: Collection[type], allow_ops: Collection[str], modules: bool = False
) -> Pipeline:
    """Load each stage of a bundle on its own."""
    given = {edge.name for edge in bundle.entry_point.edges if edge.producer is None}
    stages: list[Any] = [
        Apart(
            load_stage(bundle, number, modules=modules, types=types, allow_ops=allow_ops),
            [name not in given for name in entry.inputs],
        )
        for number, entry in enumerate(bundle.stages)
    ]
    return Pipeline(bundle, stages, types)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_conj() or value.is_neg():
        return value  # a copy would lose the bit
    return copy.deepcopy(value.detach())
