"""Tables of decompositions of operators whose ONNX form answers otherwise than torch at some values.

torch's exporter writes ``log1p(x)`` as ``Log(x + 1)``, which is 0 for x = 1e-10, and ONNX Runtime runs some operators of ONNX otherwise
than torch at NaN. The exporter decomposes a program before it converts it, so these decompositions also apply to operators that
others decompose into. ``tools/operators/onnx_values.py`` compares all operators with torch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

NARROW = (torch.float16, torch.bfloat16)
_LEFT: set[Any] = set()


class NoOnnxFormError(Exception):
    """An operator has no ONNX form that answers as torch at all values."""


class Decompositions(dict[Any, Callable[..., Any]]):
    """Decompositions by operator; one that returns `NotImplemented` leaves a call to the exporter."""

    def register(self, *operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function the decomposition of operators."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            def decompose(*args: Any, **kwargs: Any) -> Any:
                return NotImplemented if _LEFT.intersection(operators) else function(*args, **kwargs)

            self.update(dict.fromkeys(operators, decompose))
            return function

        return decorate


@contextlib.contextmanager
def left_to_exporter(operator: Any) -> Iterator[None]:
    """Leave the calls of an operator to the exporter: a decomposition calls it."""
    added = {operator} - _LEFT
    _LEFT.update(added)
    try:
        yield
    finally:
        _LEFT.difference_update(added)


def in_float32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute a function of tensors of 16 bits in float32, as torch does, and one of integers too."""

    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        dtype = functools.reduce(torch.promote_types, (torch.result_type(tensor, 1.0) for tensor in tensors))
        computed = torch.float32 if dtype in NARROW else dtype
        widened = [arg.to(computed) if isinstance(arg, torch.Tensor) and arg.dtype != computed else arg for arg in args]
        result = function(*widened, **kwargs)
        return result if result.dtype == dtype else result.to(dtype)

    return wide


def number(value: float, tensor: torch.Tensor) -> torch.Tensor:
    """Return a number in the dtype of a tensor."""
    return torch.full((), value, dtype=tensor.dtype)
