"""Stages that draw random numbers: the distributions of their answers in two runtimes, which draw different numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stagepack_loaders.comparison import Tolerance

# Operators of ONNX that draw random numbers; `Dropout` is in a model only where it does.
RANDOM_OPERATORS: Final = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
# How many standard errors two means may be apart. Of Student's distribution with the 126 degrees of freedom of 64 calls in each runtime,
# 1e-17 is beyond.
DRAWS: Final = "draws random numbers"  # and their distributions are those in torch
_MAX_STANDARD_ERRORS: Final = 10
_MIN_CALLS, _MAX_CALLS, _MIN_DRAWS = 64, 256, 8192
# Answers with more elements than these are compared by blocks of neighbours, in fewer calls: 10 standard errors are still beyond 1e-10,
# and 64 calls would take 64 times the memory of one.
_MAX_ELEMENTS: Final = 1 << 16
_MAX_CALL_BYTES: Final = 1 << 23
_BLOCKS, _CALLS_OF_LARGE = 64, 16


def call_count(elements: int, call_bytes: int = 0) -> int:
    """Return how many calls in each runtime a comparison takes: the answer may be a mean of all values of a call."""
    if elements > _MAX_ELEMENTS or call_bytes > _MAX_CALL_BYTES:
        return _CALLS_OF_LARGE
    return min(max(_MIN_DRAWS // max(elements, 1), _MIN_CALLS), _MAX_CALLS)


@dataclass(frozen=True, slots=True)
class Draw:
    """An answer to a call, as far as it is compared."""

    type: str
    # Its elements as numbers of float64, in one dimension: all, or blocks of neighbours.
    elements: torch.Tensor

    @classmethod
    def of(cls, answer: torch.Tensor) -> "Draw":
        """Return what is compared of an answer; a complex number is two elements."""
        elements = (torch.view_as_real(answer) if answer.is_complex() else answer).flatten()
        if elements.numel() > _MAX_ELEMENTS:
            length = _MAX_ELEMENTS // _BLOCKS
            starts = torch.linspace(0, elements.numel() - length, _BLOCKS, dtype=torch.float64).long()
            elements = elements[(starts[:, None] + torch.arange(length)).flatten()]
        dtype_name = str(answer.dtype).removeprefix("torch.")
        return cls(f"{dtype_name}{list(answer.shape)}", elements.to(torch.float64))


def compare_draws(first: Sequence[Draw], second: Sequence[Draw], tolerance: Tolerance | None) -> str:
    """Say how the answers of several calls in a runtime differ from those in torch, by means and spreads; empty if they do not."""
    onnx_types, torch_types = ({draw.type for draw in draws} for draws in (first, second))
    if onnx_types != torch_types:
        return f"its answers are {', '.join(sorted(onnx_types))}, and {', '.join(sorted(torch_types))} in torch"
    if not second[0].elements.numel():
        return ""
    rtol, atol = (tolerance or Tolerance()).of_dtype(second[0].type.partition("[")[0])
    draws = [torch.stack([draw.elements for draw in calls]) for calls in (first, second)]
    center = torch.cat([values.nan_to_num(0, 0, 0) for values in draws]).mean(0)
    quantities: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "share of finite values": lambda values: values.isfinite().to(torch.float64),
        "mean": lambda values: values.nan_to_num(0, 0, 0),
        "mean distance from the mean": lambda values: (values.nan_to_num(0, 0, 0) - center).abs(),
        # Draws may depend on one another: choices without replacement, or one draw for several elements.
        "share of elements that equal the next": lambda values: (values == values.roll(-1, 1)).to(torch.float64),
    }
    for title, quantity in quantities.items():
        onnx_values, torch_values = map(quantity, draws)
        for pooled in (False, True):
            pair = [values.mean(1, keepdim=True) if pooled else values for values in (onnx_values, torch_values)]
            index = _largest_difference(pair[0], pair[1], rtol, atol)
            if index is not None:
                means = [float(values.mean(0)[index]) for values in pair]
                subject = "all elements" if pooled else "an element"
                return f"the {title} of {subject} is {means[0]:g} over {len(first)} calls, in torch {means[1]:g}"
    return ""


def _largest_difference(first: torch.Tensor, second: torch.Tensor, rtol: float, atol: float) -> int | None:
    """The element whose means over calls, [call, element], differ by more than chance and more than rounding; None if there is none."""
    difference = (first.mean(0) - second.mean(0)).abs()
    standard_error = ((first.var(0) + second.var(0)) / len(first)).sqrt()
    excess = difference - (_MAX_STANDARD_ERRORS * standard_error + atol + rtol * second.mean(0).abs())
    index = int(excess.argmax())
    return index if float(excess[index]) > 0 and math.isfinite(float(excess[index])) else None
