"""Decompositions of operators whose ONNX form answers otherwise than torch at some values.

torch's exporter writes ``log1p(x)`` as ``Log(x + 1)``, which is 0 for x = 1e-10, and ONNX Runtime runs some operators of ONNX otherwise
than torch at NaN. The exporter decomposes a program before it converts it, so these decompositions are also those of the operators that
others decompose into. ``tools/operators/onnx_values.py`` compares all operators with torch.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
_LEFT: set[Any] = set()


class NoOnnxFormError(Exception):
    """An operator has no ONNX form that answers as torch at all values."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return the decompositions, by operator; one that returns `NotImplemented` leaves a call to the exporter."""
    return _DECOMPOSITIONS


def _decomposes(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def decompose(*args: Any, **kwargs: Any) -> Any:
            return NotImplemented if _LEFT.intersection(operators) else function(*args, **kwargs)

        _DECOMPOSITIONS.update(dict.fromkeys(operators, decompose))
        return function

    return register


@contextlib.contextmanager
def _left_to_exporter(operator: Any) -> Iterator[None]:
    """Leave the calls of an operator to the exporter: a decomposition calls it."""
    added = {operator} - _LEFT
    _LEFT.update(added)
    try:
        yield
    finally:
        _LEFT.difference_update(added)


def _in_float32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute a function of tensors of 16 bits in float32, as torch does, and one of integers too."""

    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        dtype = functools.reduce(torch.promote_types, (torch.result_type(tensor, 1.0) for tensor in tensors))
        computed = torch.float32 if dtype in _NARROW else dtype
        widened = [arg.to(computed) if isinstance(arg, torch.Tensor) and arg.dtype != computed else arg for arg in args]
        result = function(*widened, **kwargs)
        return result if result.dtype == dtype else result.to(dtype)

    return wide


def _number(value: float, tensor: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=tensor.dtype)


def _is_negative(tensor: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit is set, -0.0 included; the converter of ``signbit`` leaves it out."""
    return (tensor < 0) | ((tensor == 0) & (tensor.reciprocal() < 0))


@_decomposes(aten.log1p.default)
@_in_float32
def _log1p(self: torch.Tensor) -> torch.Tensor:
    # Kahan: the rounding error of 1 + x cancels in the quotient.
    total = self + 1
    is_special = (total == 1) | (self == math.inf)
    distance = torch.where(is_special, _number(1, self), total - 1)
    return torch.where(is_special, self, torch.log(total) * (self / distance))


@_decomposes(aten.expm1.default, aten.special_expm1.default)
@_in_float32
def _expm1(self: torch.Tensor) -> torch.Tensor:
    power = torch.exp(self)
    distance = power - 1
    # Where exp(x) is 1, or so small or large that the difference of 1 does not count.
    is_exact = (power == 1) | (distance == -1) | (self > 1)
    logarithm = torch.where(is_exact, _number(1, self), torch.log(power))
    return torch.where(power == 1, self, torch.where(is_exact, distance, distance * (self / logarithm)))


def _log_of_sum(low: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(low)) for a number that is not positive."""
    return _log1p(torch.exp(low))


@_decomposes(aten.log_sigmoid.default)
@_in_float32
def _log_sigmoid(self: torch.Tensor) -> torch.Tensor:
    return torch.where(self < 0, self, _number(0, self)) - _log_of_sum(-self.abs())


@_decomposes(aten.logaddexp.default)
@_in_float32
def _logaddexp(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Infinities of the same sign have no difference.
    distance = torch.where(self == other, _number(0, self), -(self - other).abs())
    return torch.where(
        (self == other) & (self.abs() == math.inf), self, torch.maximum(self, other) + _log_of_sum(distance)
    )


@_decomposes(aten.logaddexp2.default)
@_in_float32
def _logaddexp2(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    distance = torch.where(self == other, _number(0, self), -(self - other).abs())
    logarithm = _log_of_sum(distance * math.log(2)) * (1 / math.log(2))
    return torch.where((self == other) & (self.abs() == math.inf), self, torch.maximum(self, other) + logarithm)


@_decomposes(aten.elu.default)
@_in_float32
def _elu(self: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    return torch.where(self > 0, self * scale, _expm1(self * input_scale) * (alpha * scale))


@_decomposes(aten.celu.default)
@_in_float32
def _celu(self: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    return _elu(self, alpha, 1, 1 / alpha)


@_decomposes(aten.selu.default)
@_in_float32
def _selu(self: torch.Tensor) -> torch.Tensor:
    return _elu(self, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@_decomposes(aten.atan2.default)
@_in_float32
def _atan2(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    height, width = self.abs(), other.abs()
    # Two zeros or two infinities have no quotient.
    is_diagonal = (height == width) & (height != 0)
    slope = torch.where(height == 0, height * _number(0, height), height / width)
    slope = torch.where(is_diagonal, _number(1, height), torch.where(width != width, width, slope))
    angle = torch.atan(slope)
    angle = torch.where(_is_negative(other), math.pi - angle, angle)
    return torch.where(_is_negative(self), -angle, angle)


@_decomposes(aten.angle.default)
def _angle(self: torch.Tensor) -> torch.Tensor:
    if not self.is_floating_point():
        return NotImplemented
    angle = torch.where(self < 0, _number(math.pi, self), _number(0, self))
    return torch.where(self.isnan(), self, angle)


def _float_operands(self: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype] | None:
    """Two operands in the dtype of the result, or in float32 if it has 16 bits; None if it is one of integers."""
    dtype = torch.result_type(self, other)
    if not dtype.is_floating_point:
        return None
    computed = torch.float32 if dtype in _NARROW else dtype
    first, second = (
        value.to(computed) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=computed)
        for value in (self, other)
    )
    return first, second, dtype


@_decomposes(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _remainder(self: Any, other: Any) -> torch.Tensor:
    operands = _float_operands(self, other)
    if operands is None:
        return NotImplemented
    dividend, divisor, dtype = operands
    rest = torch.fmod(dividend, divisor)
    return torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), rest + divisor, rest).to(dtype)


@_decomposes(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(self: Any, other: Any) -> torch.Tensor:
    operands = _float_operands(self, other)
    if operands is None:
        return NotImplemented
    # As `div_floor_floating` of torch: the quotient of 0.5 and 0.1 is rounded to 5, and the floor of the exact one is 4.
    dividend, divisor, dtype = operands
    quotient = dividend / divisor
    rest = torch.fmod(dividend, divisor)
    whole = (dividend - rest) / divisor
    whole = torch.where((rest != 0) & ((divisor < 0) != (rest < 0)), whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole == 0, torch.where(_is_negative(quotient), _number(-0.0, whole), _number(0, whole)), floor)
    return torch.where(divisor == 0, quotient, floor).to(dtype)


@_decomposes(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div(self: torch.Tensor, other: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    if rounding_mode == "floor":
        return _floor_divide(self, other)
    if rounding_mode is None or torch.result_type(self, other).is_floating_point:
        return NotImplemented
    # The exporter divides integers as floats: 2**53 + 1 by 1 is another number, and 0 divides.
    floor, rest = torch.floor_divide(self, other), torch.remainder(self, other)
    return torch.where((rest != 0) & ((self < 0) != (other < 0)), floor + 1, floor)


@_decomposes(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(self: torch.Tensor, other: Any) -> torch.Tensor:
    if torch.result_type(self, other).is_floating_point:
        return NotImplemented
    # The exporter takes the remainder of integers as that of floats.
    rest = torch.remainder(self, other)
    return torch.where((rest != 0) & ((self < 0) != (other < 0)), rest - other, rest)


@_decomposes(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    self: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if self.dtype != torch.int64 or dtype not in (None, torch.int64):
        return NotImplemented
    # ONNX Runtime 1.31 sums in float64. The sums of halves of 32 bits are exact there, and their overflow wraps as that in torch.
    dims = list(range(self.dim())) if not dim else list(dim)
    low = self & 0xFFFFFFFF
    high = (self - low) // 2**32
    low_sum, high_sum = (half.to(torch.float64).sum(dims, keepdim).to(torch.int64) for half in (low, high))
    return high_sum * 2**32 + low_sum


@_decomposes(aten.scatter_reduce.two)
def _scatter_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    if reduce != "mean":
        return NotImplemented
    if not self.is_floating_point():
        raise NoOnnxFormError("aten.scatter_reduce.two: its mean of integers is rounded down")
    # The exporter has no mean: it divides by the numbers of elements at the example.
    zeros, ones = torch.zeros_like(self), torch.ones_like(self)
    counts = zeros.scatter_add(dim, index, torch.ones_like(src)) + (1 if include_self else 0)
    start = self if include_self else torch.where(counts > 0, zeros, self)
    return start.scatter_add(dim, index, src) / torch.maximum(counts, ones)


@_decomposes(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(self: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    # The exporter sums products with a mask, so that NaN and infinity beside the diagonal spread.
    matrices = self.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    first = offset if offset >= 0 else -offset * columns
    length = torch.sym_min(rows, columns - offset) if offset >= 0 else torch.sym_min(rows + offset, columns)
    positions = torch.arange(torch.sym_max(length, 0)) * (columns + 1) + first
    return matrices.flatten(-2).index_select(-1, positions)


@_decomposes(aten._prelu_kernel.default)  # noqa: SLF001 - the name of the operator
def _prelu(self: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # PRelu of ONNX Runtime leaves NaN of the weight out where the input is 0.
    return torch.where(self > 0, self, weight * self)


@_decomposes(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(self: torch.Tensor, kernel_size: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
    # The exporter leaves out the divisor.
    divisor = kwargs.get("divisor_override", args[4] if len(args) > 4 else None)
    if divisor is None:
        return NotImplemented
    raise NoOnnxFormError(f"aten.avg_pool{len(kernel_size)}d.default with divisor_override={divisor}")


def _sort_keys(self: torch.Tensor, operator_name: str) -> torch.Tensor:
    """Keys that TopK of ONNX Runtime sorts as torch sorts a tensor: NaN is larger than infinity."""
    if not self.is_floating_point():
        return self
    if self.dtype == torch.float64:
        raise NoOnnxFormError(f"{operator_name} of float64, in which ONNX Runtime puts NaN in another place")
    # The exporter stores a number in float32, also one of float64.
    infinity = torch.full((), 1e38, dtype=torch.float64).square()
    wide = self.to(torch.float64)
    wide = torch.where(self == math.inf, infinity, torch.where(self == -math.inf, -infinity, wide))
    return torch.where(self.isnan(), _number(math.inf, wide), wide)


@_decomposes(aten.sort.default)
def _sort(self: torch.Tensor, dim: int = -1, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    keys = _sort_keys(self, "aten.sort.default")
    with _left_to_exporter(aten.sort.default):
        indices = aten.sort.default(keys, dim, descending)[1]
    return self.gather(dim, indices), indices


@_decomposes(aten.topk.default)
def _topk(
    self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    keys = _sort_keys(self, "aten.topk.default")
    with _left_to_exporter(aten.topk.default):
        indices = aten.topk.default(keys, k, dim, largest, sorted)[1]
    return self.gather(dim, indices), indices


def _with_special_values(largest: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Maxima of windows, with what MaxPool of ONNX Runtime leaves out: NaN, and -inf, for which it has the smallest finite number."""
    special = torch.where(kinds == 0, _number(-math.inf, largest), largest)
    return torch.where(kinds > 1, _number(math.nan, largest), special)


def _kinds(self: torch.Tensor) -> torch.Tensor:
    """2 for NaN, 0 for -inf, and else 1."""
    return self.isnan().to(self.dtype) + (self != -math.inf).to(self.dtype)


def _max_pool_with_indices(operator: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def pool(self: torch.Tensor, kernel_size: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_floating_point():
            return NotImplemented
        # The index is that of the last NaN.
        sizes = self.shape[-len(kernel_size) :]
        positions = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)
        positions = torch.where(self.isnan(), positions, torch.full((), -1.0))
        with _left_to_exporter(operator):
            largest, indices = operator(self, kernel_size, *args, **kwargs)
            last_nan = operator(positions, kernel_size, *args, **kwargs)[0]
            kinds = operator(_kinds(self), kernel_size, *args, **kwargs)[0]
        return _with_special_values(largest, kinds), torch.where(last_nan >= 0, last_nan.to(torch.int64), indices)

    return pool


for _operator in (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default):
    _decomposes(_operator)(_max_pool_with_indices(_operator))


@_decomposes(aten.addbmm.default)
def _addbmm(self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    # As the sum of other integers.
    return NotImplemented if self.is_floating_point() else beta * self + alpha * torch.bmm(batch1, batch2).sum(0)


@_decomposes(aten.sigmoid.default)
@_in_float32
def _sigmoid(self: torch.Tensor) -> torch.Tensor:
    # Sigmoid of ONNX Runtime is 1.5e-8 for all x below -18, of which the logarithm is not x.
    return torch.reciprocal(1 + torch.exp(-self))


@_decomposes(aten.sign.default)
def _sign(self: torch.Tensor) -> torch.Tensor:
    return (self > 0).to(self.dtype) - (self < 0).to(self.dtype) if self.is_floating_point() else NotImplemented


@_decomposes(aten.signbit.default)
def _signbit(self: torch.Tensor) -> torch.Tensor:
    return _is_negative(self) if self.is_floating_point() else NotImplemented


@_decomposes(aten.heaviside.default)
def _heaviside(self: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(self == 0, values, (self > 0).to(self.dtype))


@_decomposes(aten.lerp.Tensor, aten.lerp.Scalar)
def _lerp(self: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    distance = end - self
    if not isinstance(weight, torch.Tensor):
        return self + weight * distance if abs(weight) < 0.5 else end - distance * (1 - weight)
    return torch.where(weight.abs() < 0.5, self + weight * distance, end - distance * (1 - weight))


@_decomposes(aten.logit.default)
@_in_float32
def _logit(self: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    if eps is not None:
        low, high = _number(eps, self), _number(1 - eps, self)
        self = torch.where(self < low, low, torch.where(self > high, high, self))
    return torch.log(self / (1 - self))


@_decomposes(aten.pow.Tensor_Scalar)
def _pow(self: torch.Tensor, exponent: Any) -> torch.Tensor:
    # torch takes the square root, which of -inf is NaN.
    return torch.sqrt(self) if exponent == 0.5 and self.is_floating_point() else NotImplemented


def _softmax(operator: Any) -> Callable[..., torch.Tensor]:
    def in_dtype(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        # The exporter casts the result, torch the input.
        return NotImplemented if dtype in (None, self.dtype) else operator(self.to(dtype), dim, False)

    return in_dtype


_decomposes(aten.softmax.int)(_softmax(aten._softmax.default))  # noqa: SLF001 - the name of the operator


@_decomposes(aten._log_softmax.default)  # noqa: SLF001
def _log_softmax(self: torch.Tensor, *_: Any) -> torch.Tensor:
    if self.dtype == torch.float64:
        raise NoOnnxFormError("aten.log_softmax of float64, which leaves NaN out in ONNX Runtime")
    return NotImplemented


@_decomposes(aten.log_softmax.int, aten.special_log_softmax.default)
def _log_softmax_in_dtype(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return aten._log_softmax.default(self if dtype is None else self.to(dtype), dim, False)  # noqa: SLF001


def _has_nan(self: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    with _left_to_exporter(aten.amax.default):
        return torch.amax(self.isnan().to(torch.float32), list(dims), keepdim) > 0


def _reduced_extreme(operator: Any) -> Callable[..., torch.Tensor]:
    def extreme(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        # ReduceMax of ONNX Runtime leaves NaN out.
        if not self.is_floating_point():
            return NotImplemented
        with _left_to_exporter(operator):
            return torch.where(_has_nan(self, dim, keepdim), _number(math.nan, self), operator(self, dim, keepdim))

    return extreme


def _extreme_with_index(operator: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def extreme(self: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
        if not self.is_floating_point() or not self.dim():
            return NotImplemented
        has_nan = _has_nan(self, [dim], keepdim)
        with _left_to_exporter(operator):
            values, indices = operator(self, dim, keepdim)
        first_nan = torch.argmax(self.isnan().to(torch.float32), dim, keepdim)
        return torch.where(has_nan, _number(math.nan, self), values), torch.where(has_nan, first_nan, indices)

    return extreme


for _operator in (aten.amax.default, aten.amin.default):
    _decomposes(_operator)(_reduced_extreme(_operator))
for _operator in (aten.max.dim, aten.min.dim):
    _decomposes(_operator)(_extreme_with_index(_operator))


@_decomposes(aten.max.default)
def _max(self: torch.Tensor) -> torch.Tensor:
    return torch.amax(self, list(range(self.dim()))) if self.is_floating_point() and self.dim() else NotImplemented


@_decomposes(aten.min.default)
def _min(self: torch.Tensor) -> torch.Tensor:
    return torch.amin(self, list(range(self.dim()))) if self.is_floating_point() and self.dim() else NotImplemented


@_decomposes(aten.logsumexp.default)
def _logsumexp(self: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    largest = torch.amax(self, list(dim), True)
    shift = torch.where(largest.abs() == math.inf, _number(0, self), largest)
    total = torch.exp(self - shift).sum(list(dim), keepdim)
    return torch.log(total) + (shift if keepdim else torch.squeeze(shift, list(dim)))


def _refuse(reason: str, is_refused: Callable[..., bool]) -> Callable[..., Any]:
    def check(*args: Any, **kwargs: Any) -> Any:
        if is_refused(*args, **kwargs):
            raise NoOnnxFormError(reason)
        return NotImplemented

    return check


_decomposes(aten.logcumsumexp.default)(
    _refuse("aten.logcumsumexp.default, which is NaN after -inf in ONNX Runtime", lambda *_: True)
)
_decomposes(aten.prod.default)(
    _refuse(
        "aten.prod.default of floats, whose NaN depends on the order of the elements",
        lambda tensor, **_: tensor.is_floating_point(),
    )
)
_decomposes(aten.native_batch_norm.default)(
    _refuse("aten.native_batch_norm.default in training mode", lambda *args: bool(args[5]))
)
_decomposes(aten.layer_norm.default)(
    _refuse(
        "aten.layer_norm.default over one element, which keeps infinity in ONNX Runtime",
        lambda _, shape, *__, **___: math.prod(shape) == 1,
    )
)
_decomposes(aten.native_layer_norm.default)(
    _refuse(
        "aten.native_layer_norm.default over one element, which keeps infinity in ONNX Runtime",
        lambda _, shape, *__: math.prod(shape) == 1,
    )
)
