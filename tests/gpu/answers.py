"""Answers of models on a device, and how they are compared."""

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stagepack.capture.inputs import Inputs
from stagepack.format.reader import Bundle

# Kernels of other devices add in another order.
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
DEFAULT_TOLERANCE = 2e-3


def inputs_on(inputs: Inputs, device: torch.device) -> Inputs:
    """The same inputs on a device."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), (tuple(inputs.args), dict(inputs.kwargs))
    )
    return dataclasses.replace(inputs, args=args, kwargs=kwargs)


def calls_on(calls: list[Inputs], device: torch.device) -> list[Inputs]:
    """The same calls on a device; those that share their inputs share them there."""
    moved = {id(inputs): inputs_on(inputs, device) for inputs in calls}
    return [moved[id(inputs)] for inputs in calls]


def draws_random_numbers(bundle: Bundle) -> bool:
    """Whether the answers depend on the random generator, which differs between devices."""
    return any(op.random for graph in bundle.graphs() for op in graph.ops)


def has_autocast(bundle: Bundle) -> bool:
    """Whether operators run in an autocast region, whose device torch does not change when it moves a program."""
    return any(context.autocast is not None for graph in bundle.graphs() for context in graph.contexts)


def assert_close(found: Any, expected: Any, tolerance: float | None = None) -> None:
    """Assert that the leaves of answers are the same within the rounding of other kernels, wherever they are."""
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs or abs(ours - theirs) < DEFAULT_TOLERANCE or ours != ours != theirs
            continue
        ours, theirs = ours.cpu(), theirs.cpu()
        if theirs.dtype.itemsize == 1 and theirs.is_floating_point():
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        if not theirs.is_floating_point() and not theirs.is_complex():
            assert torch.equal(ours, theirs)
            continue
        limit = tolerance or TOLERANCES.get(theirs.dtype, DEFAULT_TOLERANCE)
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit, equal_nan=True)


def assert_same_form(found: Any, expected: Any) -> None:
    """Assert that the leaves of answers have the same dtypes and shapes."""
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, torch.Tensor):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
