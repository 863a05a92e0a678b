"""Dynamic dimensions of an example: as the caller declares them, and in the narrower ranges that torch finds."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.export import Dim

from stagepack.capture.inputs import (
    Inputs,
    complete_dynamic_shapes,
    inputs_by_parameter,
)
from stagepack.torch_internals import (
    container_items,
    tree_leaves,
    tree_map,
)

# A line at the end of an error of torch, such as "batch = Dim('batch', min=2, max=63)"; others are "batch = 2" and "rows = 2*batch".
_SUGGESTION: Final = re.compile(r"(?P<name>\w+) = Dim\('(?P=name)'(?:, min=(?P<min>\d+))?(?:, max=(?P<max>\d+))?\)")


def is_range_violation(error: BaseException) -> bool:
    """Whether an error of ``torch.export.export`` is about the declared ranges of sizes."""
    return "Constraints violated" in str(error)


def narrowed_dynamic_shapes(error: BaseException, dynamic_shapes: Any) -> Any:
    """Return the dynamic shapes with the ranges that torch suggests in an error."""
    _, _, text = str(error).partition("Suggested fixes:")
    lines = text.strip().partition("\n\n")[0].splitlines()
    suggestions = [_SUGGESTION.fullmatch(line.strip()) for line in lines]
    ranges = {found["name"]: found for found in suggestions if found is not None}
    roots = [_root(leaf) for leaf in tree_leaves(dynamic_shapes) if isinstance(leaf, Dim)]
    declared = {root.__name__: root for root in roots}
    if not ranges or len(ranges) < len(lines) or not ranges.keys() <= declared.keys():
        return None
    narrowed = {name: _narrowed(declared[name], found) for name, found in ranges.items()}
    if None in narrowed.values():
        return None

    def narrow(leaf: Any) -> Any:
        if not isinstance(leaf, Dim) or _root(leaf).__name__ not in narrowed:
            return leaf
        root = narrowed[_root(leaf).__name__]
        return leaf.fn(root) if hasattr(leaf, "fn") else root

    return tree_map(narrow, dynamic_shapes)


def _root(dim: Any) -> Any:
    """The dimension that another one, such as ``2*batch``, is derived from; itself if it is derived from none."""
    return getattr(dim, "root", dim)


def _narrowed(dim: Dim, found: re.Match[str]) -> Dim | None:
    """A ``Dim`` with the part of its range that torch suggests; None for a part with less than two sizes, such as 0 to -2."""
    smallest = max(dim.min, int(found["min"] or 0))
    largest = min(dim.max, int(found["max"] or dim.max))
    return Dim(dim.__name__, min=smallest, max=largest) if smallest < largest else None


def declared_dims(forward: Callable[..., Any], inputs: Inputs) -> Iterator[tuple[Any, Mapping[int | None, Any]]]:
    """Yield each leaf of the inputs of a model with its dynamic dimensions by axis; an integer has none."""
    dynamic_shapes, input_of_parameter = complete_dynamic_shapes(forward, inputs), inputs_by_parameter(forward, inputs)
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(input_of_parameter, dynamic_shapes or (), strict=False))
    for parameter, value in input_of_parameter.items():
        yield from _dims_of_leaves(value, dynamic_shapes.get(parameter))


def _dims_of_leaves(value: Any, shape_spec: Any) -> Iterator[tuple[Any, Mapping[int | None, Any]]]:
    if isinstance(value, torch.Tensor):
        yield value, dict(enumerate(shape_spec)) if isinstance(shape_spec, list | tuple) else shape_spec or {}
    elif isinstance(value, Mapping) and isinstance(shape_spec, Mapping):
        for key, child in value.items():
            yield from _dims_of_leaves(child, shape_spec.get(key))
    elif isinstance(shape_spec, list | tuple):  # of a list, a tuple or an object: one entry for each child
        children = container_items(value) or ()
        for child, child_spec in zip(children, shape_spec, strict=True):
            yield from _dims_of_leaves(child, child_spec)
    elif type(value) is int and shape_spec is not None:
        yield value, {None: shape_spec}
    else:
        yield from ((leaf, {}) for leaf in tree_leaves(value))
