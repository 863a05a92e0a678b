"""Array operations on torch tensors."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from safetensors import deserialize
from safetensors.torch import save_file

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES, TORCH_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.tree import Record
from stagepack.torch_internals import register_container
from stagepack_loaders.elements import COMPLEX_DTYPES, ELEMENT_DTYPES, Array

# Functions of torch that take containers, such as those that move a batch, find the tensors of results.
register_container(
    Record,
    lambda record: (list(dict.values(record)), tuple(record)),
    lambda fields, field_names: Record(dict(zip(field_names, fields, strict=True))),
)


class TorchArrays:
    """The operations of `stagepack_loaders.base.ArrayOps` on torch tensors."""

    def is_array(self, value: object) -> bool:
        """See `ArrayOps`."""
        return isinstance(value, torch.Tensor)

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See `ArrayOps`. The file is not mapped: it may change while the tensors are in use."""
        # Not by `safetensors.torch.load`, which does not know all dtypes that `save_file` writes.
        return {
            array_name: _tensor_of_bytes(header_entry) for array_name, header_entry in deserialize(path.read_bytes())
        }

    def save(self, arrays: Mapping[str, torch.Tensor], path: Path) -> None:
        """See `ArrayOps`."""
        save_file(
            {array_name: tensor.detach().cpu().contiguous().clone() for array_name, tensor in arrays.items()}, path
        )

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        """See `ArrayOps`. Memory read from a file may begin at any byte, where some kernels add in another order."""
        return array.clone()

    def array(self, value: object) -> torch.Tensor:
        """See `ArrayOps`."""
        return torch.as_tensor(value)

    def join(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `ArrayOps`."""
        return torch.cat(list(arrays))

    def difference(self, actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> tuple[float, bool]:
        """See `ArrayOps`."""
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return math.inf, False
        actual, expected = actual.detach().cpu(), expected.detach().cpu()
        are_equal = (actual == expected) | ((actual != actual) & (expected != expected))
        if bool(are_equal.all()):
            return 0.0, True
        wide_dtype = torch.complex128 if actual.is_complex() else torch.float64
        distance = (actual.to(wide_dtype) - expected.to(wide_dtype)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if not (actual.is_floating_point() or actual.is_complex()):
            distance = distance.clamp(min=1)  # beyond 2**53, float64 does not tell integers apart
        allowed = atol + rtol * expected.to(wide_dtype).abs()
        # An infinity is near nothing but itself, though a part of it is infinite too.
        are_close = are_equal | (distance.isfinite() & (distance <= allowed))
        return float(distance[~are_equal].max()), bool(are_close.all())

    def on_host(self, value: Any) -> bool:
        """See `ArrayOps`."""
        return not isinstance(value, torch.Tensor) or value.device.type == "cpu"

    def to_elements(self, value: Any, dtype: str) -> Array:
        """See `ArrayOps`. Of a tensor that requires gradients, which writing into the array would falsify, the array is read-only."""
        if not isinstance(value, torch.Tensor):
            return numpy.array([value], ELEMENT_DTYPES[dtype])
        tensor = _plain_tensor(value, dtype).cpu()
        tensor = tensor.view(torch.uint16) if dtype == "bfloat16" else tensor
        array = tensor.numpy()
        if value.requires_grad:
            array.flags.writeable = False
        return numpy.atleast_1d(array)

    def device_elements(self, value: Any, dtype: str) -> torch.Tensor:
        """See `ArrayOps`. Elements of bfloat16 keep this dtype, which DLPack has."""
        if not isinstance(value, torch.Tensor):
            return torch.tensor([value], dtype=getattr(torch, ELEMENT_DTYPES[dtype].name))
        tensor = _plain_tensor(value, dtype)
        if tensor.device.type not in ("cpu", "meta"):  # whoever takes the memory works on another stream
            torch.accelerator.current_stream(tensor.device).synchronize()
        return (tensor if tensor.dim() else tensor.reshape(1)).contiguous()

    def takes_device_memory(self, _: str) -> bool:
        """See `ArrayOps`."""
        return True

    def from_elements(self, elements: Any, value_type: Value | Edge) -> Any:
        """See `ArrayOps`."""
        if value_type.dtype in SCALAR_DTYPES:
            return elements.item()
        tensor = _tensor_on_elements(elements)
        if value_type.dtype in COMPLEX_DTYPES:
            tensor = torch.view_as_complex(tensor)
        return tensor.view(getattr(torch, value_type.dtype)).reshape(tensor.shape if value_type.shape else ())


def _tensor_of_bytes(header_entry: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of an entry that the safetensors library gives with its bytes."""
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[header_entry["dtype"]])
    if not header_entry["data"]:  # which `frombuffer` refuses
        return torch.empty(header_entry["shape"], dtype=dtype)
    return torch.frombuffer(header_entry["data"], dtype=dtype).reshape(header_entry["shape"])


def _plain_tensor(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor of elements on the memory of another one."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"expected a dense tensor with data, found {tensor.layout} on {tensor.device}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(torch.uint8) if dtype.startswith("float8") else tensor


def _tensor_on_elements(elements: Any) -> torch.Tensor:
    """A tensor on the memory of elements; a copy of what torch cannot have: read-only memory, negative strides."""
    if isinstance(elements, torch.Tensor):
        return elements
    if not isinstance(elements, numpy.ndarray):
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(elements)
        return tensor
    if not elements.size:  # numpy gives it strides of 0, which torch would keep
        return torch.empty(elements.shape, dtype=torch.from_numpy(elements.copy()).dtype)
    if not elements.flags.writeable or any(stride < 0 for stride in elements.strides):
        elements = elements.copy()
    return torch.from_numpy(elements)


TORCH_ARRAYS: Final = TorchArrays()
