"""Example inputs of a model, and which of their dimensions may change."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stagepack.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Example inputs of a model, and which of their dimensions may change.

    On the command line, the functions that SOURCE and ``--inputs`` name return it.

    Attributes:
        args: the inputs that are passed by position.
        kwargs: the inputs that are passed by name.
        dynamic_shapes: the dimensions that may change, as ``torch.export.export`` takes them, except that parameters may be left out.
            None: all sizes are those of the example.

    Examples:
        >>> batch = torch.export.Dim("batch", min=1, max=64)
        >>> stagepack.Inputs(
        ...     args=(torch.zeros(4, 8),),
        ...     kwargs={"scale": 2.0},
        ...     dynamic_shapes={"x": {0: batch}},
        ... )
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None


def with_tensors(inputs: Inputs) -> Inputs:
    """Return the inputs with a tensor in the place of each numpy array, in whatever containers.

    Args:
        inputs: example inputs.

    Raises:
        CaptureError: an array has elements that no tensor has, such as objects.
    """
    if "numpy" not in sys.modules:
        return inputs
    args, kwargs = _map_arrays(inputs.args), _map_arrays(dict(inputs.kwargs))
    return replace(inputs, args=args, kwargs=kwargs)


def _map_arrays(value: Any) -> Any:
    import numpy  # noqa: PLC0415 - only where the caller has imported it
    import torch  # noqa: PLC0415 - slow to import

    if isinstance(value, numpy.ndarray | numpy.generic):
        try:
            return torch.as_tensor(value)
        except TypeError as error:
            raise CaptureError(f"example inputs: an array of {value.dtype} has no tensor: {error}") from None
    if type(value) is dict:
        return {key: _map_arrays(item) for key, item in value.items()}
    return type(value)(map(_map_arrays, value)) if type(value) in (list, tuple) else value


def required_parameters(forward: Callable[..., Any]) -> list[str]:
    """The parameters of a model's ``forward`` that have no default."""
    named_kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in named_kinds
    ]


def inputs_by_parameter(forward: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    """The example input of each parameter of a model's ``forward``, in the order of the call.

    Raises:
        CaptureError: ``forward`` does not take so many inputs by position.
    """
    try:
        bound = inspect.signature(forward).bind_partial(*inputs.args)
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit the model's forward: {error}") from None
    return {**bound.arguments, **inputs.kwargs}


def complete_dynamic_shapes(forward: Callable[..., Any], inputs: Inputs) -> Any:
    """The dynamic shapes with None for the parameters that are left out, as ``torch.export`` requires."""
    if not isinstance(inputs.dynamic_shapes, Mapping):
        return inputs.dynamic_shapes
    return dict.fromkeys(inputs_by_parameter(forward, inputs)) | dict(inputs.dynamic_shapes)
