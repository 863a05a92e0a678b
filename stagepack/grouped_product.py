"""The product of groups of rows with a matrix each, as models with experts compute it: ``torch.nn.functional.grouped_mm``.

torch 2.13 tells compilers the shape of the product for bfloat16 alone, and strides that the kernel does not return, though kernels take
float32 and float16. Traces therefore have an operator of stagepack, which calls the kernel and has shapes and gradients in all three
dtypes. Calls that are not traced use the operator of ATen, so that gradients and times do not change.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from stagepack.torch_internals import GROUPED_PRODUCT, OperatorOverload

_KERNEL_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)

# The parameters have the names that they have in ATen, by which the costs of a node are computed.
_SCHEMA: Final = "(Tensor self, Tensor mat2, Tensor offs) -> Tensor"


@torch.library.custom_op("stagepack::grouped_product", mutates_args=(), schema=_SCHEMA)
def _product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    # The kernel pads the rows of its result to a multiple of 16 bytes.
    result: torch.Tensor = GROUPED_PRODUCT(rows, matrices, ends).contiguous()
    return result


# The operator of `GROUPED_PRODUCT` in traces, in which it takes two matrices, or rows and a matrix for each group.
TRACED_PRODUCT: Final[OperatorOverload] = torch.ops.stagepack.grouped_product.default


@_product.register_fake
def _shape(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    dtypes = (rows.dtype, matrices.dtype, ends.dtype)
    if rows.dtype not in _KERNEL_DTYPES or dtypes != (rows.dtype, rows.dtype, torch.int32):
        raise RuntimeError(f"expected factors of one floating dtype and ends of groups of torch.int32, found {dtypes}")
    shapes = [*map(tuple, (rows.shape, matrices.shape, ends.shape))]
    if (rows.dim(), ends.dim()) != (2, 1) or matrices.dim() not in (2, 3) or rows.shape[1] != matrices.shape[-2]:
        raise RuntimeError(f"expected rows and matrices that fit, and ends of groups, found {shapes}")
    if matrices.dim() == 2:
        return rows.new_empty((ends.shape[0], rows.shape[0], matrices.shape[1]))
    if ends.shape[0] != matrices.shape[0]:
        raise RuntimeError(f"expected an end for each matrix, found {shapes}")
    return rows.new_empty((rows.shape[0], matrices.shape[2]))


def _save_factors(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of rows, where each group has a matrix. The kernel refuses expanded gradients, as those of a sum are."""
    rows, matrices, ends = ctx.saved_tensors
    if matrices.dim() == 2:
        raise RuntimeError("compiled code has no gradients of the product of two matrices in groups")
    gradient = gradient.contiguous()
    return TRACED_PRODUCT(gradient, matrices.mT, ends), TRACED_PRODUCT(rows.mT, gradient, ends), None


_product.register_autograd(_gradients, setup_context=_save_factors)


def filled_grouped_product(operator: OperatorOverload) -> Callable[..., Any]:
    """Return a function that multiplies groups of matrices, and fills the rows or columns after the last group with zeros.

    Its ``__wrapped__`` is the operator.
    """

    def call_filled(
        self: torch.Tensor,
        mat2: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        is_traced = torch.compiler.is_compiling() or self.is_meta
        is_plain = self.dim() == 2 and bias is None and out_dtype in (None, self.dtype)
        if is_traced and is_plain and offs is not None:
            result = TRACED_PRODUCT(self, mat2, offs)
        else:
            result = operator(self, mat2, offs, bias, out_dtype)
        if offs is None or result.dim() != 2:
            return result  # a product for each group
        axis = 0 if self.dim() == 2 else 1
        is_after = torch.arange(result.shape[axis], device=result.device) >= offs[-1]
        return result.masked_fill_(is_after.unsqueeze(1 - axis), 0)

    call_filled.__wrapped__ = operator  # type: ignore[attr-defined]
    return call_filled
