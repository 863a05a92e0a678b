"""Which stored tensor each of the tensors on one storage is a view of."""

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch

from stagepack.linearize.tensor_memory import byte_span, is_dense, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTensor:
    """A tensor that is stored, and that other tensors are views of.

    Attributes:
        name: its name.
        tensor: the tensor.
        member: a tensor of the model on the same storage; it may be `tensor`.
    """

    name: str
    tensor: torch.Tensor
    member: torch.Tensor


def base_tensors(tensors: Mapping[str, torch.Tensor], taken_names: Container[str]) -> dict[str, BaseTensor | None]:
    """Find the stored tensor that each tensor is a view of.

    taken_names: the names that a new stored tensor must not have.
    The result is for each tensor its base, which may be the tensor itself; None for a tensor that is dense and shares no memory.
    """
    groups: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        # Tensors without elements share nothing.
        group_key = storage_key(tensor) if tensor.numel() else (tensor_name,)
        groups.setdefault(group_key, {})[tensor_name] = tensor
    base_of: dict[str, BaseTensor | None] = {}
    for group in groups.values():
        base_of |= dict.fromkeys(group, _base_of_group(group, taken_names))
    return base_of


def _base_of_group(group: Mapping[str, torch.Tensor], taken_names: Container[str]) -> BaseTensor | None:
    if len(group) == 1 and is_dense(next(iter(group.values()))):
        return None
    spans = [byte_span(tensor) for tensor in group.values()]
    start, end = min(start for start, _ in spans), max(end for _, end in spans)
    for tensor_name, tensor in group.items():
        if byte_span(tensor) == (start, end) and tensor.is_contiguous():
            return BaseTensor(name=tensor_name, tensor=tensor, member=tensor)
    return _new_base(group, start, end, taken_names)


def _new_base(group: Mapping[str, torch.Tensor], start: int, end: int, taken_names: Container[str]) -> BaseTensor:
    """A tensor over all the bytes that a group reaches; of bytes, if the tensors of the group differ in dtype."""
    first_name, first_tensor = next(iter(group.items()))
    dtypes = {tensor.dtype for tensor in group.values()}
    dtype = first_tensor.dtype if len(dtypes) == 1 else torch.uint8
    start -= start % max(tensor.element_size() for tensor in group.values())
    extent = torch.Size([(end - start) // dtype.itemsize])
    whole = torch.empty(0, dtype=dtype, device=first_tensor.device).set_(
        first_tensor.untyped_storage(), start // dtype.itemsize, extent, (1,)
    )
    candidates = (f"{first_name}.storage{'_' * count}" for count in itertools.count())
    return BaseTensor(
        name=next(tensor_name for tensor_name in candidates if tensor_name not in taken_names),
        tensor=whole,
        member=first_tensor,
    )
