"""What the modules of a model are called with, and what they give."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Called(NamedTuple):
    """What a module of the original was called with, and what it gave."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    made: bool  # else what it gave back is what it was given: a dropout that is off


@torch.no_grad()
def calls_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[Called]:
    """The calls of all modules of a model during one call of it, in the order of their ends."""
    found: list[Called] = []
    handles = []
    for name, module in model.named_modules():

        def keep(_: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            given = pytree.tree_leaves((args, kwargs))
            made = any(
                leaf is not None and not any(leaf is other for other in given) for leaf in pytree.tree_leaves(result)
            )
            kept = copy.deepcopy((args, dict(kwargs), result))  # later ones may write into them
            found.append(Called(name, *kept, made))

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return [call for call in found if call.name]


def is_equal(found: Any, expected: Any) -> bool:
    """Whether two results hold the same tensors, bit for bit."""
    ours, theirs = (
        [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)] for result in (found, expected)
    )
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )
