"""Tensors of torch from and to files, and compared: what `stagepack_loaders.example` asks of a runtime."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
