"""The names that the caller gave to dynamic dimensions."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import inputs_by_parameter
from stagepack.capture.programs import Capture
from stagepack.torch_internals import symbolic_expression, tree_leaves


def dimension_names(capture: Capture) -> dict[str, str]:
    """Return the names of the ``torch.export.Dim`` of a capture's dynamic shapes, by the name of torch's symbol."""
    dynamic_shapes = capture.inputs.dynamic_shapes
    if not dynamic_shapes or capture.model is None:
        return {}
    input_of_parameter = inputs_by_parameter(capture.model.forward, capture.inputs)
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(input_of_parameter, dynamic_shapes, strict=False))
    leaf_dims = [
        dims
        for parameter, example in input_of_parameter.items()
        for dims in _dims_of_leaves(example, dynamic_shapes.get(parameter))
    ]
    placeholders = [node for node in capture.program.graph.nodes if node.op == "placeholder"]
    dim_names: dict[str, str] = {}
    # The inputs follow the weights.
    for placeholder, dims in zip(placeholders[-len(leaf_dims) :], leaf_dims, strict=False):
        for axis, dim in dims.items():
            size = placeholder.meta["val"].shape[axis]
            if isinstance(dim, Dim) and isinstance(size, torch.SymInt):
                expression = symbolic_expression(size)
                # The size 4*h has the caller's name of h; a size that torch does not express by h has none.
                dim_name = dim.__name__ if expression.is_Symbol else getattr(dim, "root", dim).__name__
                if len(expression.free_symbols) == 1:
                    dim_names.setdefault(str(*expression.free_symbols), dim_name)
    return dim_names


def _dims_of_leaves(value: Any, shape_spec: Any) -> Iterator[Mapping[int, Any]]:
    """Yield the dynamic dimensions of each leaf of an input, from left to right, by axis."""
    if isinstance(value, torch.Tensor):
        yield dict(enumerate(shape_spec)) if isinstance(shape_spec, list | tuple) else shape_spec or {}
    elif isinstance(value, Mapping) and isinstance(shape_spec, Mapping):
        for key, child in value.items():
            yield from _dims_of_leaves(child, shape_spec.get(key))
    elif isinstance(shape_spec, list | tuple):  # of a list, a tuple or an object: one entry for each child
        for child, child_spec in zip(_children(value), shape_spec, strict=True):
            yield from _dims_of_leaves(child, child_spec)
    else:
        yield from ({} for _ in tree_leaves(value))


def _children(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else tree_leaves(value)
