"""Ranges of dynamic sizes that the code of a model does not allow, narrowed to those that it allows."""

import re
from typing import Any, Final

from torch.export import Dim

from stagepack.torch_internals import tree_leaves, tree_map

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
    declared = {leaf.__name__: leaf for leaf in tree_leaves(dynamic_shapes) if isinstance(leaf, Dim)}
    # A dimension that is derived from another, such as 2*batch, would have to be derived again.
    is_derived = any(hasattr(dim, "root") for dim in declared.values())
    if not ranges or len(ranges) < len(lines) or not ranges.keys() <= declared.keys() or is_derived:
        return None
    narrowed = {name: _narrowed(declared[name], found) for name, found in ranges.items()}
    if None in narrowed.values():
        return None
    return tree_map(lambda leaf: narrowed.get(leaf.__name__, leaf) if isinstance(leaf, Dim) else leaf, dynamic_shapes)


def _narrowed(dim: Dim, found: re.Match[str]) -> Dim | None:
    """A ``Dim`` with the part of its range that torch suggests; None for a part with less than two sizes, such as 0 to -2."""
    smallest = max(dim.min, int(found["min"] or 0))
    largest = min(dim.max, int(found["max"] or dim.max))
    return Dim(dim.__name__, min=smallest, max=largest) if smallest < largest else None
