"""Tensors of torch from and to files and requests, and compared: what `stagepack_loaders` asks of a runtime."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack_loaders.elements import COMPLEX, ELEMENT_DTYPES, Array

inference = torch.no_grad


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped."""
    return load_file(path)


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file."""
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, since what is mapped from a file may begin at any byte, where some kernels add in another order."""
    return tensor.clone()


def seed(number: int) -> None:
    """Seed the random generators."""
    torch.manual_seed(number)


def array(value: object) -> torch.Tensor:
    """A tensor of a number; a tensor as it is."""
    return torch.as_tensor(value)


def difference(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> tuple[float, bool]:
    """The largest absolute difference, and whether all are within ``atol + rtol * abs(expected)``.

    0.0 says that every bit is equal, infinity that a shape, a dtype or a special value differs.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf, False
    found, expected = found.detach().cpu(), expected.detach()
    same = (found == expected) | ((found != found) & (expected != expected))
    if bool(same.all()):
        return 0.0, True
    wide = torch.complex128 if found.is_complex() else torch.float64
    apart = (found.to(wide) - expected.to(wide)).abs().nan_to_num(nan=math.inf)
    allowed = atol + rtol * expected.to(wide).abs()
    return float(apart[~same].max()), bool((same | (apart <= allowed)).all())


def from_elements(array: Array | torch.Tensor, edge: Edge) -> Any:
    """The value of an edge, as its elements travelled: on their memory; a number for a number."""
    if edge.dtype in SCALAR_DTYPES:
        return array.item()
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    if edge.dtype in COMPLEX:
        tensor = torch.view_as_complex(tensor)
    return tensor.view(getattr(torch, edge.dtype)).reshape(tensor.shape if edge.shape else ())


def device_elements(value: Any, dtype: str) -> torch.Tensor:
    """The elements of a value as they travel, on its device; those of bfloat16 as they are."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor([value], dtype=getattr(torch, ELEMENT_DTYPES[dtype].name))
    tensor = value.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = (tensor if tensor.dim() else tensor.reshape(1)).contiguous()
    return tensor.view(torch.uint8) if dtype.startswith("float8") else tensor


def to_elements(value: Any, dtype: str) -> Array:
    """The elements of a value as they travel, on the host."""
    tensor = device_elements(value, dtype).cpu()
    return (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()


from_dlpack = torch.utils.dlpack.from_dlpack
join = torch.cat


def wait(device: torch.device) -> None:
    """Return when all work given to a device is done."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
