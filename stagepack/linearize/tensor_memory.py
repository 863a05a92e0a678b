"""Where the elements of a tensor are in memory, and their bytes."""

import torch

from stagepack.torch_internals import FakeTensor, storage_identity


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy if it is on the CPU."""
    # A dimension of size 1 may have any stride, which a view as bytes refuses: describe the elements as one dimension.
    elements = tensor.detach().cpu().as_strided((tensor.numel(),), (1,))
    return elements.view(torch.uint8).numpy().data


def is_all_zeros(tensor: torch.Tensor) -> bool:
    """Return whether every bit of a dense tensor is zero; the sign bit of -0.0 is not."""
    elements = tensor.detach().as_strided((tensor.numel(),), (1,))
    return not bool(elements.view(torch.uint8).any())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are side by side in memory, in whatever order of the dimensions (SPEC G9)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != reach:
            return tensor.numel() == 0
        reach *= size
    return True


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for tensors that have elements and share storage."""
    # Fake tensors have no address.
    # The storage of a fake tensor has no address.
    is_fake = isinstance(tensor, FakeTensor)
    return (tensor.device, is_fake, storage_identity(tensor) if is_fake else tensor.untyped_storage().data_ptr())


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor reaches, with the end excluded."""
    last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last_element + 1) * tensor.element_size()


def offset_in_base(tensor: torch.Tensor, base: torch.Tensor) -> int:
    """Return where a tensor begins on another one that it shares storage with, in elements of the tensor's dtype."""
    distance = tensor.storage_offset() * tensor.element_size() - base.storage_offset() * base.element_size()
    return distance // tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format: ``float32``."""
    return str(dtype).removeprefix("torch.")
