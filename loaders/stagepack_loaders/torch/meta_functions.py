"""Shapes of results that torch does not tell of tensors without memory, though its kernels compute them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from stagepack.torch_internals import GROUPED_PRODUCT

_KERNEL_DTYPES: Final = (torch.float32, torch.float16)


def meta_function(operator_name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return what tells the shapes of the results of an operator: the operator itself, unless torch knows less than its kernels."""
    return _META_FUNCTIONS.get(operator_name, operator)


def _grouped_product(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of groups of rows with a matrix each. torch 2.13 tells its shape for bfloat16 alone; kernels take more dtypes."""
    is_of_rows = (self.dim(), mat2.dim()) == (2, 3) and offs is not None and offs.dim() == 1 and bias is None
    if not is_of_rows or self.dtype not in _KERNEL_DTYPES or out_dtype not in (None, self.dtype):
        result: torch.Tensor = GROUPED_PRODUCT(self, mat2, offs, bias, out_dtype)
        return result
    assert offs is not None
    if (mat2.dtype, offs.dtype) != (self.dtype, torch.int32):
        raise RuntimeError(
            f"expected matrices of {self.dtype} and ends of groups of torch.int32, found {mat2.dtype} and {offs.dtype}"
        )
    if self.shape[1] != mat2.shape[1] or offs.shape[0] != mat2.shape[0]:
        raise RuntimeError(
            f"expected rows and matrices that fit, and an end for each, found {[*map(tuple, (self.shape, mat2.shape, offs.shape))]}"
        )
    return self.new_empty((self.shape[0], mat2.shape[2]))


_META_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {str(GROUPED_PRODUCT): _grouped_product}
