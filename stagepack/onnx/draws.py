"""Stages that draw random numbers: the distributions of their answers in two runtimes, which draw different numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from stagepack_loaders.comparison import Tolerance

# Operators of ONNX that draw random numbers; `Dropout` is in a model only where it does.
RANDOM_OPERATORS: Final = frozenset(
    {
        "Bernoulli",
        "Dropout",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
# How many standard errors two means may be apart. Of Student's distribution with the 126 degrees of freedom of 64 calls in each runtime,
# 1e-17 is beyond.
DRAWS: Final = "draws random numbers"  # and their distributions are those in torch
_MAX_STANDARD_ERRORS: Final = 10
_MIN_CALLS, _MAX_CALLS, _MIN_DRAWS = 64, 256, 8192


def call_count(elements: int) -> int:
    """Return how many calls in each runtime a comparison takes, given the number of elements of an answer."""
    return min(max(_MIN_DRAWS // max(elements, 1), _MIN_CALLS), _MAX_CALLS)


def compare_draws(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], tolerance: Tolerance | None) -> str:
    """Compare the answers of several calls in one runtime with those in another: means and spreads, of each element and of all.

    Args:
        first: the answers in ONNX Runtime.
        second: the answers in torch.
        tolerance: by how much means may differ in any case, in the place of the tolerance of their dtype.

    Returns:
        How the distributions differ; empty if they do not.
    """
    types = [{(answer.dtype, tuple(answer.shape)) for answer in answers} for answers in (first, second)]
    if types[0] != types[1]:
        onnx_types, torch_types = (sorted(f"{dtype}{list(shape)}" for dtype, shape in pairs) for pairs in types)
        return f"its answers are {', '.join(onnx_types)}, and {', '.join(torch_types)} in torch"
    if not second[0].numel():
        return ""
    dtype = str(second[0].dtype).removeprefix("torch.")
    rtol, atol = (tolerance or Tolerance()).of_dtype(dtype)
    draws = [torch.stack([_real_parts(answer) for answer in answers]) for answers in (first, second)]
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


def _real_parts(answer: torch.Tensor) -> torch.Tensor:
    """The elements of an answer in one dimension; a complex number is two of them."""
    parts = torch.view_as_real(answer) if answer.is_complex() else answer
    return parts.to(torch.float64).flatten()
