"""Sizes that are declared equal, known to be equal from the first operator of a trace on.

``torch.export`` gives each dimension a symbol of its own, also those that share a ``Dim``, and compares them at the end: until then it
cannot divide the sum of two of them by two.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs, inputs_by_parameter
from stagepack.torch_internals import assert_in_trace


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
