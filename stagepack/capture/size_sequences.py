"""Sequences that a model makes of a size, such as ``torch.linspace(0, 1, steps=x.shape[1])``.

Schemas say that the length is a number and no size, so torch makes a number of it, which fixes it. A call with a size is the same
operator.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from stagepack.torch_internals import (
    OperatorOverload,
    operator_schema,
    recorded_call,
    without_recording,
)

_WINDOWS: Final = ("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window")
# The operators of functions.
_OPERATORS: Final = {
    **{
        getattr(torch, function_name): getattr(torch.ops.aten, function_name)
        for function_name in ("linspace", "logspace", *_WINDOWS)
    },
    torch.fft.fftfreq: torch.ops.aten.fft_fftfreq,
    torch.fft.rfftfreq: torch.ops.aten.fft_rfftfreq,
}
# The parameters that are the length, or decide it.
_LENGTHS: Final = ("steps", "window_length", "n")


def sequence_of_any_length(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what a function of torch makes in a trace, of numbers and a length that may change; None for any other call."""
    packet = _OPERATORS.get(function)
    if packet is None:
        return None
    options = {key: option for key, option in kwargs.items() if option is not None}
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    has_layout = options.pop("layout", torch.strided) != torch.strided
    has_flags = any([options.pop("pin_memory", False), options.pop("requires_grad", False)])
    if has_layout or has_flags:
        return None
    for overload_name in packet.overloads():
        operator: OperatorOverload = getattr(packet, overload_name)
        bound = _bound_arguments(operator, args, options)
        length = next((bound[key] for key in _LENGTHS if key in bound), None)
        if isinstance(length, torch.SymInt):
            with without_recording():
                size = length // 2 + 1 if function is torch.fft.rfftfreq else length
                result = torch.empty(size, dtype=dtype, device=device)
            memory = {"dtype": result.dtype, "device": result.device}
            return recorded_call(operator, tuple(bound.values()), memory, result)
    return None


def _bound_arguments(operator: OperatorOverload, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that an overload takes by parameter, but for dtype and device; none if it does not take these."""
    parameters = operator_schema(operator).arguments
    keys = [parameter.name for parameter in parameters if not parameter.kwarg_only]
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    bound = (
        {key: defaults[key] for key in keys if key in defaults} | dict(zip(keys, args, strict=False)) | dict(options)
    )
    is_functional = all(parameter.name != "out" and str(parameter.type) != "Tensor" for parameter in parameters)
    are_numbers = all(type(argument) in (bool, int, float, torch.SymInt) for argument in bound.values())
    is_fitting = len(args) <= len(keys) and bound.keys() == set(keys) and are_numbers
    return {key: bound[key] for key in keys} if is_functional and is_fitting else {}
