"""Linear layers that use their weights as the weight files store them.

torch's exporter transposes the weight of each linear layer. A runtime transposes such an initializer when it loads the model, and keeps the
copy; ``Gemm`` takes the weight as it is stored.
"""

from typing import Any

import onnx_ir as ir
from onnxscript import rewriter

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


class _Linear(rewriter.RewriteRuleClassBase):
    """``MatMul(x, Transpose(w))`` -> ``Gemm(x, w, transB=1)``, with `x` reshaped to a matrix, and the result reshaped back."""

    def pattern(self, op: Any, x: ir.Value, w: ir.Value) -> Any:
        return op.MatMul(x, op.Transpose(w, perm=[1, 0]))

    def check(self, context: Any, w: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        return _is_stored_matrix(w)

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value) -> Any:
        return _gemm(op, x, w)


class _LinearWithBias(_Linear):
    """The same, with a bias that is added."""

    def pattern(self, op: Any, x: ir.Value, w: ir.Value, b: ir.Value) -> Any:  # type: ignore[override]
        return op.Add(op.MatMul(x, op.Transpose(w, perm=[1, 0])), b)

    def check(self, context: Any, w: ir.Value, b: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        return _is_stored_matrix(w) and b.is_initializer() and w.shape is not None and b.shape == w.shape[:1]

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, b: ir.Value) -> Any:  # type: ignore[override]
        return _gemm(op, x, w, b)


def use_stored_weights(model: ir.Model) -> None:
    """Replace the products of a model with transposed initializers."""
    # One rule after the other: a product comes before the addition of the bias.
    for rule in (_LinearWithBias, _Linear):
        rewriter.RewritePass([rule.rule()])(model)  # type: ignore[no-untyped-call]


def _is_stored_matrix(value: ir.Value) -> bool:
    """Whether a value is an initializer that Gemm takes in every runtime."""
    return (
        value.is_initializer()
        and value.dtype in _FLOATS
        and value.shape is not None
        and len(value.shape) == 2
        and 0 not in value.shape
    )


def _gemm(op: Any, x: ir.Value, w: ir.Value, *bias: ir.Value) -> Any:
    if x.shape is not None and len(x.shape) == 2:
        return op.Gemm(x, w, *bias, transB=1)
    assert w.shape is not None
    out_features, in_features = w.shape.numpy()
    rows = op.Reshape(x, op.Constant(value_ints=[-1, in_features]))
    shape = op.Concat(op.Shape(x, start=0, end=-1), op.Constant(value_ints=[out_features]), axis=0)
    return op.Reshape(op.Gemm(rows, w, *bias, transB=1), shape, allowzero=1)
