"""Example inputs of a model, and which of their dimensions may change."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
