"""The weights of stages: from weight files to tensors on a device."""

import math
import mmap
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from stagepack.errors import DigestError, Problem
from stagepack.format.chunks import ByteProgress
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.graph import Weight
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.weight_transfer import ByteRange
from stagepack_loaders.weight_files import WeightFile, map_weight_file, open_weight_files

# Smaller weights of zeros are in the memory of torch, which takes no mapping for each.
_MAPPED_ZERO_BYTES: Final = 2**20


class WeightCache:
    """The tensors read so far. Stages on one device that share a cache share the tensors that are one tensor in the model."""

    def __init__(self) -> None:
        self._files: dict[str, WeightFile] = {}
        self._verified_files: set[str] = set()
        self._stored: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._weights: dict[tuple[str, torch.device], torch.Tensor] = {}

    def open_files(
        self,
        bundle: Bundle,
        file_names: Iterable[str],
        *,
        verify: bool,
        copy: bool = False,
        progress: ByteProgress | None = None,
        unchanged: ByteProgress | None = None,
    ) -> None:
        """Bring weight files into memory, those that are not there yet; see `stagepack_loaders.weight_files.open_weight_files`."""
        known_files = self._verified_files if verify else self._files.keys()
        missing_files = [file_name for file_name in file_names if file_name not in known_files]
        if not self._files.keys().isdisjoint(missing_files):
            # They were read without verification, and so were the tensors.
            self._stored.clear()
            self._weights.clear()
        self._files |= open_weight_files(
            bundle, missing_files, verify=verify, copy=copy, progress=progress, unchanged=unchanged
        )
        self._verified_files.update(missing_files if verify else ())

    def read(
        self,
        weight: Weight,
        stored_tensors: Mapping[str, tuple[Path, StoredTensor]],
        device: torch.device,
        state_names: Collection[str] = (),
    ) -> torch.Tensor:
        """Return a weight as a tensor on a device; a parameter as a `torch.nn.Parameter`.

        On the CPU its memory is that of the weight file, which is mapped unless `open_files` has copied it. Buffers that calls write
        have memory of their own: a mapping may be replaced while a call writes.
        """
        key = (weight.names[0], device)
        if key not in self._weights:
            if weight.zeros:
                tensor = zero_weight(weight, device)
            else:
                is_state = not set(state_names).isdisjoint(weight.names)
                tensor = lay_out(weight, self._read_stored(*stored_tensors[weight.stored], device, copy=is_state))
            self._weights[key] = as_weight(weight, tensor)
        return self._weights[key]

    def mapped_bytes(self, source: ByteRange) -> torch.Tensor:
        """Return a range of a weight file that `open_files` has brought into memory, as bytes on that memory."""
        content = self._files[source.file_name].content
        return torch.frombuffer(content, dtype=torch.uint8, count=source.end - source.start, offset=source.start)

    def _read_stored(self, path: Path, stored: StoredTensor, device: torch.device, *, copy: bool) -> torch.Tensor:
        key = (stored.name, device)
        if key not in self._stored:
            if path.name not in self._files:
                self._files[path.name] = map_weight_file(path)
            weight_file = self._files[path.name]
            if weight_file.tensors.get(stored.name) != stored:
                message = f"{stored.name[:80]}: the file was changed after its header was checked"
                raise DigestError([Problem(rule="D1", where=path.name, message=message)])
            self._stored[key] = _tensor_in_file(weight_file, stored).to(device, copy=copy)
        return self._stored[key]


def _tensor_in_file(weight_file: WeightFile, stored: StoredTensor) -> torch.Tensor:
    """A stored tensor on the memory of its file."""
    dtype: torch.dtype = torch_attribute(TORCH_DTYPES[stored.dtype], torch.dtype)
    if stored.start == stored.end:
        return torch.empty(stored.shape, dtype=dtype)
    elements = torch.frombuffer(
        weight_file.content, dtype=torch.uint8, count=stored.end - stored.start, offset=stored.start
    )
    return elements.view(dtype).reshape(stored.shape)


def as_weight(weight: Weight, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a weight as a `torch.nn.Parameter` if it is one, and with `requires_grad` if it had that."""
    if weight.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=weight.trainable)
    # Not a view of the memory of a file: `detach_` fails on views.
    tensor = tensor.detach()
    return tensor.requires_grad_() if weight.trainable else tensor


def lay_out(weight: Weight, stored: torch.Tensor) -> torch.Tensor:
    """Return a stored tensor with the dtype, strides and position in memory that a weight has in the model.

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
    byte_count = math.prod(weight.shape) * dtype.itemsize
    if device.type == "cpu" and byte_count >= _MAPPED_ZERO_BYTES:
        # `torch.zeros` writes all of its memory. A mapping takes a page when that is written or read: none at loading.
        mapped_zeros = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        zeros = torch.frombuffer(mapped_zeros, dtype=torch.uint8).view(dtype).reshape(weight.shape)
    else:
        zeros = torch.zeros(weight.shape, dtype=dtype, device=device)
    # Weights that are stored themselves have no gaps, with any strides (G9).
    return zeros if weight.strides is None else zeros.as_strided(weight.shape, weight.strides)
