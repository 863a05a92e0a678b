"""Decompositions of operators that take several elements: sums, extremes, orders and windows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stagepack.roads.onnx.decompositions import NARROW, Decompositions, NoOnnxFormError, left_to_exporter, number
from stagepack.torch_internals import LOG_SOFTMAX, SOFTMAX

aten = torch.ops.aten
TABLE = Decompositions()


@TABLE.register(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    self: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if self.dtype != torch.int64 or dtype not in (None, torch.int64):
        return NotImplemented
    # ONNX Runtime 1.31 sums in float64. The sums of halves of 32 bits are exact there, and their overflow wraps as that in torch.
    dims = list(range(self.dim())) if not dim else list(dim)
    low = self & 0xFFFFFFFF
    high = (self - low) // 2**32
    low_sum, high_sum = (half.to(torch.float64).sum(dims, keepdim).to(torch.int64) for half in (low, high))
    return high_sum * 2**32 + low_sum


@TABLE.register(aten.scatter_reduce.two)
def _scatter_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce in ("amax", "amin") and self.is_floating_point():
        # ScatterElements of ONNX Runtime leaves NaN out.
        with left_to_exporter(aten.scatter_reduce.two):
            extreme = aten.scatter_reduce.two(self, dim, index, src, reduce, include_self=include_self)
        flags = (self.isnan() if include_self else torch.zeros_like(self)).to(torch.float32)
        has_nan = flags.scatter_add(dim, index, src.isnan().to(torch.float32)) > 0
        return torch.where(has_nan, number(math.nan, self), extreme)
    if reduce != "mean":
        return NotImplemented
    if not self.is_floating_point():
        raise NoOnnxFormError("aten.scatter_reduce.two: its mean of integers is rounded down")
    # The exporter has no mean: it divides by the numbers of elements at the example.
    zeros, ones = torch.zeros_like(self), torch.ones_like(self)
    counts = zeros.scatter_add(dim, index, torch.ones_like(src)) + (1 if include_self else 0)
    start = self if include_self else torch.where(counts > 0, zeros, self)
    return start.scatter_add(dim, index, src) / torch.maximum(counts, ones)


@TABLE.register(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(self: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    # The exporter sums products with a mask, so that NaN and infinity beside the diagonal spread.
    matrices = self.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    first = offset if offset >= 0 else -offset * columns
    length = torch.sym_min(rows, columns - offset) if offset >= 0 else torch.sym_min(rows + offset, columns)
    positions = torch.arange(torch.sym_max(length, 0)) * (columns + 1) + first
    return matrices.flatten(-2).index_select(-1, positions)


@TABLE.register(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(self: torch.Tensor, kernel_size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
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
    return torch.where(self.isnan(), number(math.inf, wide), wide)


@TABLE.register(aten.sort.default)
def _sort(self: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    keys = _sort_keys(self, "aten.sort.default")
    with left_to_exporter(aten.sort.default):
        indices = aten.sort.default(keys, dim, descending)[1]
    return self.gather(dim, indices), indices


@TABLE.register(aten.topk.default)
def _topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    keys = _sort_keys(self, "aten.topk.default")
    with left_to_exporter(aten.topk.default):
        indices = aten.topk.default(keys, k, dim, largest, sorted)[1]
    return self.gather(dim, indices), indices


def _with_special_values(largest: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Maxima of windows, with what MaxPool of ONNX Runtime leaves out: NaN, and -inf, for which it has the smallest finite number."""
    special = torch.where(kinds == 0, number(-math.inf, largest), largest)
    return torch.where(kinds > 1, number(math.nan, largest), special)


def _kinds(self: torch.Tensor) -> torch.Tensor:
    """2 for NaN, 0 for -inf, and else 1."""
    return self.isnan().to(self.dtype) + (self != -math.inf).to(self.dtype)


def _max_pool_with_indices(operator: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def pool(self: torch.Tensor, kernel_size: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_floating_point():
            return NotImplemented
        # The index of the last NaN.
        sizes = self.shape[-len(kernel_size) :]
        positions = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)
        positions = torch.where(self.isnan(), positions, torch.full((), -1.0))
        with left_to_exporter(operator):
            largest, indices = operator(self, kernel_size, *args, **kwargs)
            last_nan = operator(positions, kernel_size, *args, **kwargs)[0]
            kinds = operator(_kinds(self), kernel_size, *args, **kwargs)[0]
        return _with_special_values(largest, kinds), torch.where(last_nan >= 0, last_nan.to(torch.int64), indices)

    return pool


for _operator in (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default):
    TABLE.register(_operator)(_max_pool_with_indices(_operator))


@TABLE.register(aten.adaptive_max_pool3d.default)
def _adaptive_max_pool3d(self: torch.Tensor, output_size: Sequence[int]) -> Any:
    # The exporter takes the first NaN of one window, torch the last.
    if any(size != 1 for size in output_size):
        return NotImplemented
    return aten.max_pool3d_with_indices.default(self, list(self.shape[-3:]))


@TABLE.register(aten.max_pool1d_with_indices.default)
def _max_pool1d_with_indices(
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    # As one of images of one row.
    sizes = [[first, *([value] if isinstance(value, int) else value)] for first, value in ((0, padding), (1, dilation))]
    steps = [1, *stride] if stride else []
    pooled = aten.max_pool2d_with_indices.default(
        self.unsqueeze(-2), [1, *kernel_size], steps, sizes[0], sizes[1], ceil_mode
    )
    return tuple(result.squeeze(-2) for result in pooled)


def _mean_beside(spread: Any) -> Callable[..., Any]:
    def spread_and_mean(
        self: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        dims = list(dim or range(self.dim()))
        # The mean that torch updates by each element is NaN after infinity.
        counts = (self.abs() == math.inf).to(torch.float32)
        last = counts
        for reduced in dims:
            last = last.narrow(reduced, self.shape[reduced] - 1, 1)
        is_lost = counts.sum(dims, True) - last > 0
        mean = torch.where(is_lost, number(math.nan, self), self.mean(dims, True))
        mean = mean if keepdim else mean.squeeze(dims)
        wide = self.to(torch.float64) if self.dtype == torch.float32 else self
        return spread(wide, dims, correction=correction, keepdim=keepdim).to(self.dtype), mean

    return spread_and_mean


for _operator, _spread in ((aten.std_mean.correction, torch.std), (aten.var_mean.correction, torch.var)):
    TABLE.register(_operator)(_mean_beside(_spread))


@TABLE.register(aten.linalg_vector_norm.default)
def _vector_norm(self: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if abs(ord) != math.inf or kwargs.get("dtype") not in (None, self.dtype) or self.is_complex():
        return NotImplemented
    # As other extremes.
    return (torch.amax if ord > 0 else torch.amin)(self.abs(), [] if dim is None else dim, keepdim)


@TABLE.register(aten.addbmm.default)
def _addbmm(self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    # As the sum of other integers.
    return NotImplemented if self.is_floating_point() else beta * self + alpha * torch.bmm(batch1, batch2).sum(0)


def _softmax(operator: Any) -> Callable[..., torch.Tensor]:
    def in_dtype(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        # The exporter casts the result, torch the input.
        return NotImplemented if dtype in (None, self.dtype) else operator(self.to(dtype), dim, False)

    return in_dtype


TABLE.register(aten.softmax.int)(_softmax(SOFTMAX))


@TABLE.register(LOG_SOFTMAX)
def _log_softmax(self: torch.Tensor, *_: Any) -> Any:
    if self.dtype == torch.float64:
        raise NoOnnxFormError("aten.log_softmax of float64, which leaves NaN out in ONNX Runtime")
    return NotImplemented


@TABLE.register(aten.log_softmax.int, aten.special_log_softmax.default)
def _log_softmax_in_dtype(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return LOG_SOFTMAX(self if dtype is None else self.to(dtype), dim, False)


def _has_nan(self: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    with left_to_exporter(aten.amax.default):
        return torch.amax(self.isnan().to(torch.float32), list(dims), keepdim) > 0


def _reduced_extreme(operator: Any) -> Callable[..., torch.Tensor]:
    def extreme(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        # ReduceMax of ONNX Runtime leaves NaN out.
        if not self.is_floating_point():
            return NotImplemented
        with left_to_exporter(operator):
            return torch.where(_has_nan(self, dim, keepdim), number(math.nan, self), operator(self, dim, keepdim))

    return extreme


def _extreme_with_index(operator: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def extreme(self: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
        if not self.is_floating_point() or not self.dim():
            return NotImplemented
        has_nan = _has_nan(self, [dim], keepdim)
        with left_to_exporter(operator):
            values, indices = operator(self, dim, keepdim)
        first_nan = torch.argmax(self.isnan().to(torch.float32), dim, keepdim)
        return torch.where(has_nan, number(math.nan, self), values), torch.where(has_nan, first_nan, indices)

    return extreme


for _operator in (aten.amax.default, aten.amin.default):
    TABLE.register(_operator)(_reduced_extreme(_operator))
for _operator in (aten.max.dim, aten.min.dim):
    TABLE.register(_operator)(_extreme_with_index(_operator))


@TABLE.register(aten.max.default)
def _max(self: torch.Tensor) -> torch.Tensor:
    return torch.amax(self, list(range(self.dim()))) if self.is_floating_point() and self.dim() else NotImplemented


@TABLE.register(aten.min.default)
def _min(self: torch.Tensor) -> torch.Tensor:
    return torch.amin(self, list(range(self.dim()))) if self.is_floating_point() and self.dim() else NotImplemented


@TABLE.register(aten.logsumexp.default)
def _logsumexp(self: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
    if not self.is_floating_point() or not self.dim():
        return NotImplemented
    largest = torch.amax(self, list(dim), True)
    shift = torch.where(largest.abs() == math.inf, number(0, self), largest)
    total = torch.exp(self - shift).sum(list(dim), keepdim)
    return torch.log(total) + (shift if keepdim else torch.squeeze(shift, list(dim)))


def _refuse(reason: str, is_refused: Callable[..., bool]) -> Callable[..., Any]:
    def check(*args: Any, **kwargs: Any) -> Any:
        if is_refused(*args, **kwargs):
            raise NoOnnxFormError(reason)
        return NotImplemented

    return check


TABLE.register(aten.logcumsumexp.default)(
    _refuse("aten.logcumsumexp.default, which is NaN after -inf in ONNX Runtime", lambda *_: True)
)
TABLE.register(aten.prod.default)(
    _refuse(
        "aten.prod.default, whose NaN and overflow depend on the order of the elements",
        lambda tensor, **_: tensor.dtype != torch.bool,
    )
)
TABLE.register(aten.prod.dim_int)(
    _refuse(
        "aten.prod.dim_int of integers or 16 bits, whose product is one of wider floats in ONNX Runtime",
        lambda tensor, *_, **__: not tensor.is_floating_point() or tensor.dtype in NARROW,
    )
)
TABLE.register(aten.histc.default)(
    _refuse(
        "aten.histc.default of 16 bits, whose borders are rounded in ONNX Runtime",
        lambda tensor, *_, **__: tensor.dtype in NARROW,
    )
)
TABLE.register(aten.native_batch_norm.default)(
    _refuse("aten.native_batch_norm.default in training mode", lambda *args: bool(args[5]))
)
TABLE.register(aten.layer_norm.default)(
    _refuse(
        "aten.layer_norm.default over one element, which keeps infinity in ONNX Runtime",
        lambda _, shape, *__, **___: math.prod(shape) == 1,
    )
)
TABLE.register(aten.native_layer_norm.default)(
    _refuse(
        "aten.native_layer_norm.default over one element, which keeps infinity in ONNX Runtime",
        lambda _, shape, *__: math.prod(shape) == 1,
    )
)
TABLE.register(aten.det.default, aten.linalg_det.default)(
    _refuse("aten.det.default, which is 0 of singular matrices of denormals in ONNX Runtime", lambda *_: True)
)
for _operator in (aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor):
    TABLE.register(_operator)(_refuse(f"{_operator}, whose steps of infinity are others", lambda *_, **__: True))
for _operator in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default):
    TABLE.register(_operator)(
        _refuse(f"{_operator} of complex numbers, whose infinity spreads", lambda tensor, *_, **__: tensor.is_complex())
    )
TABLE.register(aten.einsum.default)(
    _refuse(
        "aten.einsum.default of integers, which are sums of floats in ONNX Runtime",
        lambda _, tensors, **__: not (tensors[0].is_floating_point() or tensors[0].is_complex()),
    )
)
TABLE.register(aten.cross_entropy_loss.default)(
    _refuse(
        "aten.cross_entropy_loss.default of float64, which leaves NaN out in ONNX Runtime",
        lambda tensor, *_, **__: tensor.dtype == torch.float64,
    )
)
TABLE.register(aten.soft_margin_loss.default)(
    _refuse(
        "aten.soft_margin_loss.default of 16 bits, whose exponentials overflow in torch",
        lambda tensor, *_, **__: tensor.dtype in NARROW,
    )
)
