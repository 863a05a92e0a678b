"""The operators that the interpreter knows, as functions of numpy. Their parameters have the names of the schemas of ATen."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy

Array = numpy.ndarray[Any, Any]


def _linear(input: Array, weight: Array, bias: Array | None = None) -> Array:
    product = input @ weight.T
    return product if bias is None else product + bias


def _gelu(self: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * self * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (self + 0.044715 * self**3)))
    error_function = numpy.vectorize(math.erf, otypes=[self.dtype])
    return 0.5 * self * (1 + error_function(self / math.sqrt(2)))


def _layer_norm(
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    mean, variance = input.mean(axes, keepdims=True), input.var(axes, keepdims=True)
    normalized = (input - mean) / numpy.sqrt(variance + eps)
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias


def _softmax(self: Array, dim: int, dtype: None = None) -> Array:
    powers = numpy.exp(self - self.max(dim, keepdims=True))
    return powers / powers.sum(dim, keepdims=True)


OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": lambda self, other: self @ other,
    "aten.add.Tensor": lambda self, other, alpha=1: self + alpha * other,
    "aten.mul.Tensor": lambda self, other: self * other,
    "aten.div.Tensor": lambda self, other: self / other,
    "aten.relu.default": lambda self: numpy.maximum(self, 0),
    "aten.gelu.default": _gelu,
    "aten.layer_norm.default": _layer_norm,
    "aten.softmax.int": _softmax,
    "aten.view.default": lambda self, size: self.reshape(size),
    "aten.reshape.default": lambda self, shape: self.reshape(shape),
    "aten.transpose.int": lambda self, dim0, dim1: self.swapaxes(dim0, dim1),
    "aten.sym_size.int": lambda self, dim: self.shape[dim],
}
