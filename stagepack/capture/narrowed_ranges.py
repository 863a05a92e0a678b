"""Ranges of dynamic sizes that the code of a model does not allow, narrowed to those that it allows.

- Sizes that are declared equal, known to be equal from the first operator of a trace on. ``torch.export`` gives each dimension a symbol
  of its own, also those that share a ``Dim``, and compares them at the end: until then it cannot divide the sum of two of them by two.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs, inputs_by_parameter
from stagepack.torch_internals import assert_in_trace, tree_leaves, tree_map

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


@contextlib.contextmanager
def equal_from_the_start(model: torch.nn.Module, dynamic_shapes: Any) -> Iterator[None]:
    """Compare, at each call of a model within the ``with`` block, the sizes of its inputs that share a ``Dim``."""

    def compare(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first_sizes: dict[str, Any] = {}
        for name, size in _declared_sizes(module.forward, Inputs(args=args, kwargs=kwargs), dynamic_shapes):
            assert_in_trace(first_sizes.setdefault(name, size) == size)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _declared_sizes(forward: Callable[..., Any], inputs: Inputs, dynamic_shapes: Any) -> Iterator[tuple[str, Any]]:
    """The sizes with a ``Dim``, by its name."""
    if isinstance(dynamic_shapes, Mapping):
        yield from _sizes(inputs_by_parameter(forward, inputs), dynamic_shapes)
    else:
        yield from _sizes([*inputs.args, *inputs.kwargs.values()], dynamic_shapes)


def _sizes(value: Any, shapes: Any) -> Iterator[tuple[str, Any]]:
    if shapes is None:
        return
    if isinstance(value, torch.Tensor):
        for position, dim in shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes):
            if isinstance(dim, Dim) and not hasattr(dim, "root"):
                yield dim.__name__, value.shape[position]
    elif isinstance(value, Mapping) and isinstance(shapes, Mapping):
        for key, item in value.items():
            yield from _sizes(item, shapes.get(key))
    elif isinstance(value, list | tuple) and isinstance(shapes, list | tuple):
        for item, item_shapes in zip(value, shapes, strict=False):
            yield from _sizes(item, item_shapes)
