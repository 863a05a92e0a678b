"""Arguments of a graph as torch takes them, and attributes of torch by their names: dtypes, layouts, memory formats."""

from collections.abc import Callable
from typing import Any

import torch

from stagepack.errors import OperatorError
from stagepack.format.graph import Argument, DictArg, DtypeArg, LayoutArg, ListArg, MemoryFormatArg, SliceArg, TupleArg


def torch_attribute(attribute_name: str, kind: type) -> Any:
    """Return a dtype, layout or memory format of torch."""
    attribute = getattr(torch, attribute_name, None)
    if not isinstance(attribute, kind):
        raise OperatorError(f"torch {torch.__version__} has no {kind.__name__} {attribute_name!r}")
    return attribute


def torch_argument(argument: Argument, convert_leaf: Callable[[Argument], Any]) -> Any:
    """Return an argument as an operator of torch takes it.

    convert_leaf: returns all that is neither a container nor a dtype, layout or memory format: values, devices, subgraphs, complex numbers
        and constants.
    """
    match argument:
        case ListArg(items):
            return [torch_argument(item, convert_leaf) for item in items]
        case TupleArg(items):
            return tuple([torch_argument(item, convert_leaf) for item in items])
        case DictArg(items):
            return {key: torch_argument(item, convert_leaf) for key, item in items}
        case SliceArg(start, stop, step):
            return slice(*[torch_argument(bound, convert_leaf) for bound in (start, stop, step)])
        case DtypeArg(dtype_name):
            return torch_attribute(dtype_name, torch.dtype)
        case LayoutArg(layout_name):
            return torch_attribute(layout_name, torch.layout)
        case MemoryFormatArg(format_name):
            return torch_attribute(format_name, torch.memory_format)
        case _:
            return convert_leaf(argument)
