"""The weights of stages: from weight files to tensors on a device."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stagepack.errors import FormatError, Problem
from stagepack.format.graph import Weight
from stagepack.format.weights import StoredTensor
from stagepack_loaders.torch.torch_attributes import torch_attribute


class WeightCache:
    """The tensors read so far. Stages on one device that share a cache share the tensors that are one tensor in the model."""

    def __init__(self) -> None:
        """Start with nothing read."""
        self._stored: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._weights: dict[tuple[str, torch.device], torch.Tensor] = {}

    def read(
        self, weight: Weight, stored_tensors: Mapping[str, tuple[Path, StoredTensor]], device: torch.device
    ) -> torch.Tensor:
        """Return a weight as a tensor on a device; a parameter as a `torch.nn.Parameter`.

        On the CPU its memory is the weight file, mapped copy-on-write.

        Args:
            weight: its entry in the graph.
            stored_tensors: the file and the position of each stored tensor, by name, from `Bundle.tensors`.
            device: the device.

        Raises:
            FormatError: the safetensors library refuses the weight file.
        """
        key = (weight.names[0], device)
        if key not in self._weights:
            tensor = (
                zero_weight(weight, device)
                if weight.zeros
                else lay_out(weight, self._read_stored(weight.stored, stored_tensors[weight.stored][0], device))
            )
            self._weights[key] = as_weight(weight, tensor)
        return self._weights[key]

    def _read_stored(self, stored_name: str, path: Path, device: torch.device) -> torch.Tensor:
        key = (stored_name, device)
        if key not in self._stored:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    self._stored[key] = file.get_tensor(stored_name).to(device)
            except SafetensorError as error:
                raise FormatError(
                    [Problem(rule="W2", where=f"{path.name}: {stored_name[:80]}", message=str(error))]
                ) from None
        return self._stored[key]


def as_weight(weight: Weight, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a weight as a `torch.nn.Parameter` if it is one, and with `requires_grad` if it had that."""
    if weight.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=weight.trainable)
    return tensor.requires_grad_() if weight.trainable else tensor


def lay_out(weight: Weight, stored: torch.Tensor) -> torch.Tensor:
    """Return a stored tensor with the dtype, strides and position in memory that a weight has in the model.

    Args:
        weight: the entry of the weight in the graph.
        stored: its stored tensor, or the bytes of that.
    """
    dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
    if weight.base is not None:
        base_bytes = stored.reshape(-1).view(torch.uint8)
        base = base_bytes[: base_bytes.numel() - base_bytes.numel() % dtype.itemsize].view(dtype)
        return base.as_strided(weight.shape, weight.strides or (), base.storage_offset() + weight.offset)
    if stored.dtype != dtype or stored.shape != torch.Size(weight.shape):
        stored = stored.reshape(-1).view(dtype).reshape(weight.shape)
    if weight.strides is None:
        return stored
    return torch.empty_strided(weight.shape, weight.strides, dtype=dtype, device=stored.device).copy_(stored)


def zero_weight(weight: Weight, device: torch.device) -> torch.Tensor:
    """Return a weight of zeros, which no file holds."""
    dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
    zeros = torch.zeros(weight.shape, dtype=dtype, device=device)
    return zeros if weight.strides is None else zeros.new_empty_strided(weight.shape, weight.strides).zero_()
