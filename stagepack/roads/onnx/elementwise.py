"""Decompositions of elementwise operators for which the exporter has a naive formula, or ONNX Runtime another result at NaN."""

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from stagepack.roads.onnx.decompositions import (
    NARROW,
    Decompositions,
    NoOnnxFormError,
    in_float32,
    left_to_exporter,
    number,
)
from stagepack.torch_internals import CAST, PRELU

aten, prims = torch.ops.aten, torch.ops.prims
TABLE = Decompositions()


def _is_negative(tensor: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit is set, -0.0 included; the converter of ``signbit`` leaves it out."""
    return (tensor < 0) | ((tensor == 0) & (tensor.reciprocal() < 0))


@TABLE.register(aten.log1p.default)
@in_float32
def _log1p(self: torch.Tensor) -> torch.Tensor:
    # Kahan: the rounding error of 1 + x cancels in the quotient.
    total = self + 1
    is_special = (total == 1) | (self == math.inf)
    distance = torch.where(is_special, number(1, self), total - 1)
    return torch.where(is_special, self, torch.log(total) * (self / distance))


@TABLE.register(aten.expm1.default, aten.special_expm1.default)
@in_float32
def _expm1(self: torch.Tensor) -> torch.Tensor:
    power = torch.exp(self)
    distance = power - 1
    # Where exp(x) is 1, or so small or large that the difference of 1 does not count.
    is_exact = (power == 1) | (distance == -1) | (self > 1)
    logarithm = torch.where(is_exact, number(1, self), torch.log(power))
    return torch.where(power == 1, self, torch.where(is_exact, distance, distance * (self / logarithm)))


def _log_of_sum(low: torch.Tensor) -> Any:
    """log(1 + exp(low)) for a number that is not positive."""
    return _log1p(torch.exp(low))


@TABLE.register(aten.log_sigmoid.default)
@in_float32
def _log_sigmoid(self: torch.Tensor) -> Any:
    return torch.where(self < 0, self, number(0, self)) - _log_of_sum(-self.abs())


@TABLE.register(aten.logaddexp.default)
@in_float32
def _logaddexp(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Infinities of the same sign have no difference.
    distance = torch.where(self == other, number(0, self), -(self - other).abs())
    return torch.where(
        (self == other) & (self.abs() == math.inf), self, torch.maximum(self, other) + _log_of_sum(distance)
    )


@TABLE.register(aten.logaddexp2.default)
@in_float32
def _logaddexp2(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    distance = torch.where(self == other, number(0, self), -(self - other).abs())
    logarithm = _log_of_sum(distance * math.log(2)) * (1 / math.log(2))
    return torch.where((self == other) & (self.abs() == math.inf), self, torch.maximum(self, other) + logarithm)


@TABLE.register(aten.elu.default)
@in_float32
def _elu(self: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    return torch.where(self > 0, self * scale, _expm1(self * input_scale) * (alpha * scale))


@TABLE.register(aten.celu.default)
@in_float32
def _celu(self: torch.Tensor, alpha: float = 1.0) -> Any:
    return _elu(self, alpha, 1, 1 / alpha)


@TABLE.register(aten.selu.default)
@in_float32
def _selu(self: torch.Tensor) -> Any:
    return _elu(self, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@TABLE.register(aten.atan2.default)
@in_float32
def _atan2(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    height, width = self.abs(), other.abs()
    # Two zeros or two infinities have no quotient.
    is_diagonal = (height == width) & (height != 0)
    slope = torch.where(height == 0, height * number(0, height), height / width)
    slope = torch.where(is_diagonal, number(1, height), torch.where(width != width, width, slope))
    angle = torch.atan(slope)
    angle = torch.where(_is_negative(other), math.pi - angle, angle)
    return torch.where(_is_negative(self), -angle, angle)


def _float_operands(self: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype] | None:
    """Two operands in the dtype of the result, or in float32 if it has 16 bits; None if it is one of integers."""
    dtype = torch.result_type(self, other)
    if not dtype.is_floating_point:
        return None
    computed = torch.float32 if dtype in NARROW else dtype
    first, second = (
        value.to(computed) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=computed)
        for value in (self, other)
    )
    return first, second, dtype


@TABLE.register(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _remainder(self: Any, other: Any) -> Any:
    operands = _float_operands(self, other)
    if operands is None:
        return NotImplemented
    dividend, divisor, dtype = operands
    remainder = torch.fmod(dividend, divisor)
    return torch.where((remainder != 0) & ((divisor < 0) != (remainder < 0)), remainder + divisor, remainder).to(dtype)


@TABLE.register(prims.remainder.default)
def _remainder_of_tensors(self: torch.Tensor, other: torch.Tensor) -> Any:
    return _remainder(self, _floats_only(prims.remainder.default, other))


def _floats_only(operator: Any, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise NoOnnxFormError(
            f"{operator} of integers, which are computed as floats, or end the process at a division by 0"
        )
    return tensor


def _of_floats(operator: Any) -> Callable[..., Any]:
    def check(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        _floats_only(operator, self)
        return NotImplemented

    return check


for _operator in (prims.div.default, prims.pow.default, prims.sum.default, aten.threshold.default):
    TABLE.register(_operator)(_of_floats(_operator))


@TABLE.register(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(self: Any, other: Any) -> Any:
    operands = _float_operands(self, other)
    if operands is None:
        return NotImplemented
    # As `div_floor_floating` of torch: the quotient of 0.5 and 0.1 is rounded to 5, and the floor of the exact one is 4.
    dividend, divisor, dtype = operands
    quotient = dividend / divisor
    remainder = torch.fmod(dividend, divisor)
    whole = (dividend - remainder) / divisor
    whole = torch.where((remainder != 0) & ((divisor < 0) != (remainder < 0)), whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole == 0, torch.where(_is_negative(quotient), number(-0.0, whole), number(0, whole)), floor)
    return torch.where(divisor == 0, quotient, floor).to(dtype)


@TABLE.register(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div(self: torch.Tensor, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return torch.floor_divide(self, other)
    if rounding_mode is None or torch.result_type(self, other).is_floating_point:
        return NotImplemented
    # The exporter divides integers as floats: 2**53 + 1 by 1 is another number, and 0 divides.
    floor, remainder = torch.floor_divide(self, other), torch.remainder(self, other)
    return torch.where((remainder != 0) & ((self < 0) != (other < 0)), floor + 1, floor)


@TABLE.register(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(self: torch.Tensor, other: Any) -> Any:
    if torch.result_type(self, other).is_floating_point:
        return NotImplemented
    # The exporter converts the remainder of integers as the remainder of floats.
    remainder = torch.remainder(self, other)
    return torch.where((remainder != 0) & ((self < 0) != (other < 0)), remainder - other, remainder)


@TABLE.register(aten.prelu.default)
def _prelu(self: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    is_of_channels = weight.dim() and self.dim() > 1
    return PRELU(self, weight.reshape(-1, *[1] * (self.dim() - 2)) if is_of_channels else weight)


@TABLE.register(PRELU)
def _prelu_kernel(self: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # PRelu of ONNX Runtime leaves NaN of the weight out where the input is 0.
    return torch.where(self > 0, self, weight * self)


@TABLE.register(aten.sigmoid.default)
@in_float32
def _sigmoid(self: torch.Tensor) -> torch.Tensor:
    # Sigmoid of ONNX Runtime is 1.5e-8 for all x below -18, of which the logarithm is not x.
    return torch.reciprocal(1 + torch.exp(-self))


@TABLE.register(aten.hardswish.default)
@in_float32
def _hardswish(self: torch.Tensor) -> torch.Tensor:
    # HardSwish of ONNX divides before it multiplies, and is finite where torch overflows.
    return self * torch.clamp(self + 3, 0, 6) / 6


@TABLE.register(aten.sign.default)
def _sign(self: torch.Tensor) -> torch.Tensor:
    return (self > 0).to(self.dtype) - (self < 0).to(self.dtype) if self.is_floating_point() else NotImplemented


@TABLE.register(aten.signbit.default)
def _signbit(self: torch.Tensor) -> torch.Tensor:
    return _is_negative(self) if self.is_floating_point() else NotImplemented


@TABLE.register(aten.heaviside.default)
def _heaviside(self: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(self == 0, values, (self > 0).to(self.dtype))


@TABLE.register(aten.lerp.Tensor, aten.lerp.Scalar)
def _lerp(self: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    if self.is_complex():
        raise NoOnnxFormError("aten.lerp of complex numbers, whose infinity spreads")
    distance = end - self
    if not isinstance(weight, torch.Tensor):
        return self + weight * distance if abs(weight) < 0.5 else end - distance * (1 - weight)
    return torch.where(weight.abs() < 0.5, self + weight * distance, end - distance * (1 - weight))


@TABLE.register(aten.logit.default)
@in_float32
def _logit(self: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    if eps is not None:
        low, high = number(eps, self), number(1 - eps, self)
        self = torch.where(self < low, low, torch.where(self > high, high, self))
    return torch.log(self / (1 - self))


@TABLE.register(aten.pow.Tensor_Scalar)
def _pow(self: torch.Tensor, exponent: Any) -> torch.Tensor:
    # torch takes the square root, which of -inf is NaN.
    return torch.sqrt(self) if exponent == 0.5 and self.is_floating_point() else NotImplemented


@TABLE.register(aten.xlogy.Tensor)
@in_float32
def _xlogy(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    product = torch.where(self == 0, number(0, self), self * torch.log(other))
    return torch.where(other.isnan(), other, product)


@TABLE.register(aten.xlogy.Scalar_Self)
def _xlogy_of_number(self: Any, other: torch.Tensor) -> Any:
    return torch.xlogy(number(self, other) if other.is_floating_point() else torch.full((), float(self)), other)


@TABLE.register(aten.ldexp.Tensor)
def _ldexp(self: torch.Tensor, other: torch.Tensor) -> Any:
    if self.is_floating_point() and not other.is_floating_point():
        raise NoOnnxFormError("aten.ldexp.Tensor with integers as exponents, whose power of 2 may overflow")
    return NotImplemented


@TABLE.register(aten.pow.Tensor_Tensor)
def _pow_of_tensors(self: torch.Tensor, exponent: torch.Tensor) -> Any:
    if not torch.result_type(self, exponent).is_floating_point:
        raise NoOnnxFormError("aten.pow.Tensor_Tensor of integers, which are powers of floats in ONNX Runtime")
    return NotImplemented


@TABLE.register(aten.pow.Scalar)
def _pow_of_number(self: Any, exponent: torch.Tensor) -> Any:
    if not torch.result_type(self, exponent).is_floating_point:
        raise NoOnnxFormError("aten.pow.Scalar of integers, which are powers of floats in ONNX Runtime")
    return NotImplemented


@TABLE.register(aten.special_erfcx.default)
def _erfcx(_: torch.Tensor) -> Any:
    raise NoOnnxFormError("aten.special_erfcx.default, which is NaN above 9 in ONNX Runtime")


@TABLE.register(aten.sinc.default)
@in_float32
def _sinc(self: torch.Tensor) -> torch.Tensor:
    # Two numbers of float32 are pi in float64, in which the exporter stores none.
    pi = number(3.1415927410125732, self)
    pi = pi + number(-8.742277657347586e-08, self) if self.dtype == torch.float64 else pi
    angle = torch.where(self == 0, number(1, self), self * pi)
    return torch.where(self == 0, number(1, self), torch.sin(angle) / angle)


def _infinities(is_infinite: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def compare(self: torch.Tensor) -> Any:
        # The exporter casts float64 to float32, where the largest numbers are infinite.
        return is_infinite(self) if self.dtype == torch.float64 else NotImplemented

    return compare


TABLE.register(aten.isinf.default)(_infinities(lambda tensor: tensor.abs() == math.inf))
TABLE.register(aten.isposinf.default)(_infinities(lambda tensor: tensor == math.inf))
TABLE.register(aten.isneginf.default)(_infinities(lambda tensor: tensor == -math.inf))


def _rounded(value: float, dtype: torch.dtype) -> float:
    """A number as a dtype of 16 bits has it. Within a trace, torch makes no tensors with values."""
    if dtype == torch.float16:
        try:
            return float(struct.unpack("e", struct.pack("e", value))[0])
        except OverflowError:
            return math.copysign(math.inf, value)
    (bits,) = struct.unpack("I", struct.pack("f", value))
    return float(struct.unpack("f", struct.pack("I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])


def _compared_with_scalar(operator: Any) -> Callable[..., Any]:
    def compare(self: torch.Tensor, other: Any) -> Any:
        # ONNX Runtime compares in float32, torch in 16 bits, where 1e-11 is 0.
        if self.dtype not in NARROW or not isinstance(other, float):
            return NotImplemented
        rounded = _rounded(other, self.dtype)
        return NotImplemented if rounded == other or rounded != rounded else operator(self, rounded)

    return compare


for _operator in (
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.gt.Scalar,
    aten.ge.Scalar,
):
    TABLE.register(_operator)(_compared_with_scalar(_operator))


@TABLE.register(CAST)
def _cast(self: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype != torch.float8_e5m2 or self.dtype == dtype:
        return NotImplemented
    # ONNX Runtime 1.31 makes NaN of the numbers that are between the largest one and 65536, torch rounds them to infinity.
    wide = self.to(torch.float32)
    with left_to_exporter(CAST):
        return CAST(torch.where(wide.abs() >= 61440, wide * math.inf, wide), dtype=dtype)


def _is_float_of_8_bits(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


@TABLE.register(aten.type_as.default)
def _type_as(self: torch.Tensor, other: torch.Tensor) -> Any:
    # CastLike, which the exporter writes, saturates.
    return self.to(other.dtype) if _is_float_of_8_bits(other.dtype) else NotImplemented


@TABLE.register(aten.copy.default)
def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    return src.to(self.dtype).expand(self.shape) if _is_float_of_8_bits(self.dtype) else NotImplemented


@TABLE.register(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
def _clamp(self: torch.Tensor, *bounds: Any, **named_bounds: Any) -> Any:
    # Clip of ONNX Runtime leaves a bound of NaN out.
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (*bounds, *named_bounds.values())):
        return torch.full_like(self, math.nan, dtype=torch.result_type(self, math.nan))
    return NotImplemented


@TABLE.register(aten.fake_quantize_per_tensor_affine.tensor_qparams)
def _fake_quantize(
    self: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, quant_min: int, quant_max: int
) -> torch.Tensor:
    # The exporter casts the zero point to the 8 bits of the range, and torch takes one out of range too.
    zero = zero_point.to(torch.float32)
    rounded = torch.round(self.to(torch.float32) * scale.reciprocal()) + zero
    low, high = number(quant_min, rounded), number(quant_max, rounded)
    # Not a number is the lowest one.
    kept = torch.where(rounded > high, high, torch.where(rounded >= low, rounded, low))
    return ((kept - zero) * scale).to(self.dtype)
