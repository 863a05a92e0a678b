"""Tensors as the bytes that travel, and back, with the strides that they had.

A kernel may add in another order for other strides. So a receiver restores them: bit for bit, the stages compute what they compute in one
process.
"""

from collections.abc import Sequence
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack_loaders.distributed.route_layout import has_overlap, is_dense
from stagepack_loaders.exchange import to_array
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

# Views with more holes than this become row-major, so that strides do not decide how much memory is taken.
_LARGEST_EXTENT_RATIO = 8
_SMALL_EXTENT = 1024  # elements
_SCALAR_TENSOR_DTYPES = {"symint": torch.int64, "symfloat": torch.float64, "symbool": torch.int64}


def to_host_tensor(value: Any, edge: Edge) -> torch.Tensor:
    """Return the value of an edge as a tensor in the memory of the host; the same memory if it is there already.

    Raises:
        InputError: the value is not a dense tensor.
    """
    if edge.dtype in SCALAR_DTYPES:
        return torch.tensor([value], dtype=_SCALAR_TENSOR_DTYPES[edge.dtype])
    tensor: torch.Tensor = to_array(value, edge, TORCH_ARRAYS)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{edge.name}: expected a dense tensor with data, found {tensor.layout} on {tensor.device}")
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as bytes, in the order of its memory if it is dense, else row-major.

    Returns:
        A tensor of uint8 with one dimension; on the memory of `tensor` if it is dense.
    """
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def from_bytes(memory: torch.Tensor, edge: Edge, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the value of an edge on its bytes; the reverse of `to_bytes`.

    Args:
        memory: the bytes, aligned for the dtype.
        edge: the edge.
        shape: the shape of the tensor.
        strides: the strides that it had.
    """
    if edge.dtype in SCALAR_DTYPES:
        scalar = memory.view(_SCALAR_TENSOR_DTYPES[edge.dtype]).item()
        return bool(scalar) if edge.dtype == "symbool" else scalar
    flat = memory.view(getattr(torch, edge.dtype))
    if is_dense(shape, strides) or not flat.numel():
        return flat.as_strided(tuple(shape), tuple(strides))
    tensor = flat.view(tuple(shape))
    # The elements without repetitions, in memory with the holes that a view of a larger tensor has.
    distinct_shape = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(distinct_shape, strides, strict=True))
    if has_overlap(distinct_shape, strides) or extent > _LARGEST_EXTENT_RATIO * flat.numel() + _SMALL_EXTENT:
        return tensor
    distinct_elements = flat.new_empty(extent).as_strided(distinct_shape, tuple(strides))
    distinct_elements.copy_(tensor[tuple(slice(size) for size in distinct_shape)])
    return distinct_elements.expand(tuple(shape))


def allocate(byte_count: int) -> torch.Tensor:
    """Return memory for bytes that arrive, aligned for every dtype."""
    return torch.empty(byte_count, dtype=torch.uint8)
