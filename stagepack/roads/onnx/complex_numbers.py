"""Decompositions of complex arithmetic, which the exporter has as naive formulas: the squares of 1e25 are infinite."""

import math
from typing import Any

import torch

from stagepack.roads.onnx.decompositions import Decompositions, NoOnnxFormError, left_to_exporter, number

aten = torch.ops.aten
TABLE = Decompositions()


def _parts(value: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The real and the imaginary part of a tensor or number, as it is in a complex dtype."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        pairs = torch.view_as_real(value)
        return pairs.select(-1, 0), pairs.select(-1, 1)
    part_dtype = dtype.to_real()
    zero = torch.full((), 0.0, dtype=part_dtype)
    if isinstance(value, torch.Tensor):
        return value.to(part_dtype), zero
    parts = complex(value)
    return torch.full((), parts.real, dtype=part_dtype), torch.full((), parts.imag, dtype=part_dtype)


def _joined(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.complex(*torch.broadcast_tensors(real, imaginary))


@TABLE.register(aten.abs.default)
def _abs(self: torch.Tensor) -> Any:
    if not self.is_complex():
        return NotImplemented
    real, imaginary = (part.abs() for part in _parts(self, self.dtype))
    larger, smaller = torch.maximum(real, imaginary), torch.minimum(real, imaginary)
    slope = torch.where(larger == 0, smaller, smaller / larger)
    is_infinite = (real == math.inf) | (imaginary == math.inf)
    return torch.where(is_infinite, number(math.inf, larger), larger * torch.sqrt(1 + slope * slope))


@TABLE.register(aten.angle.default)
def _angle(self: torch.Tensor) -> Any:
    if self.is_complex():
        real, imaginary = _parts(self, self.dtype)
        return torch.atan2(imaginary, real)
    if not self.is_floating_point():
        return NotImplemented
    angle = torch.where(self < 0, number(math.pi, self), number(0, self))
    return torch.where(self.isnan(), self, angle)


def _quotient(dividend: Any, divisor: Any, dtype: torch.dtype) -> torch.Tensor:
    """The quotient by the algorithm of Smith, as torch computes it."""
    (a, b), (c, d) = _parts(dividend, dtype), _parts(divisor, dtype)
    is_wide = c.abs() >= d.abs()
    larger, smaller = torch.where(is_wide, c, d), torch.where(is_wide, d, c)
    slope = smaller / larger
    scale = torch.reciprocal(larger + smaller * slope)
    real = torch.where(is_wide, a + b * slope, a * slope + b) * scale
    imaginary = torch.where(is_wide, b - a * slope, b * slope - a) * scale
    is_zero = (c == 0) & (d == 0)
    zero = number(0, c)
    return _joined(torch.where(is_zero, a / zero, real), torch.where(is_zero, b / zero, imaginary))


@TABLE.register(
    *(aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.divide.Scalar),
    *(aten.true_divide.Tensor, aten.true_divide.Scalar),
)
def _div(self: Any, other: Any) -> Any:
    dtype = torch.result_type(self, other)
    return _quotient(self, other, dtype) if dtype.is_complex else NotImplemented


@TABLE.register(aten.reciprocal.default)
def _reciprocal(self: torch.Tensor) -> Any:
    return _quotient(1, self, self.dtype) if self.is_complex() else NotImplemented


@TABLE.register(aten.mean.default, aten.mean.dim)
def _mean(self: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not self.is_complex():
        return NotImplemented
    total = self.sum(dim, keepdim, dtype=dtype)
    dims = dim or range(self.dim())
    return _quotient(total, math.prod(self.shape[reduced] for reduced in dims), total.dtype)


def _sum(operator: Any) -> Any:
    def add(self: Any, other: Any, *, alpha: Any = 1) -> Any:
        dtype = torch.result_type(self, other)
        if not dtype.is_complex:
            return NotImplemented
        if isinstance(alpha, complex):
            raise NoOnnxFormError(f"{operator} with a complex alpha")
        # Torch adds the product with alpha + 0j, which has NaN beside infinity.
        real, imaginary = _parts(other, dtype)
        product = _joined(real * alpha + (imaginary - imaginary), imaginary * alpha + (real - real))
        with left_to_exporter(operator):
            return operator(_joined(*_parts(self, dtype)), product)

    return add


for _operator in (aten.add.Tensor, aten.sub.Tensor, aten.subtract.Tensor):
    TABLE.register(_operator)(_sum(_operator))
