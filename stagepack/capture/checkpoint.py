"""Checkpoints on disk -> their tensors, each of which is read when it is needed.

A model is loaded with tensors without data. What its loading code does with them, such as the stacking of the experts of a layer, is
recorded, and done with real data when one tensor is written: so no more than one tensor is in memory.
"""

import json
import mmap
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stagepack.errors import CaptureError, FormatError, first_line
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_checks import FileVersion, file_version
from stagepack.format.file_writing import FileRange
from stagepack.format.weights import parse_header_entry
from stagepack.torch_internals import (
    DataDependentError,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    operator_schema,
    tree_leaves,
    tree_map_tensors,
)

# The files of a folder that has no more than a checkpoint, in the order in which transformers looks for them.
_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_DISTRIBUTED_METADATA = ".metadata"
# Computes a tensor: takes a function that returns the data of a deferred tensor, and any other tensor as it is.
_Computation = Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]
# Operators whose result has the bytes of their first argument.
_IDENTITIES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """A tensor of a checkpoint, of which nothing is read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    # Returns its data, which may be a file mapped for reading only: do not write to it.
    read: Callable[[], torch.Tensor]
    # The bytes of a file that it consists of, if it does, in the order of its dimensions.
    location: FileRange | None = None


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, CheckpointTensor]:
    """Describe the tensors of a checkpoint. Their data is not read.

    torch reads the ``.metadata`` of a folder of ``torch.distributed.checkpoint`` with pickle: do not pass one that you do not trust.
    """
    location = Path(path)
    if location.is_dir():
        if (location / _DISTRIBUTED_METADATA).is_file():
            return _distributed_tensors(location)
        file_name = next((name for name in _FOLDER_FILES if (location / name).is_file()), None)
        if file_name is None:
            expected = ", ".join((*_FOLDER_FILES, _DISTRIBUTED_METADATA))
            raise CaptureError(f"{location}: expected a checkpoint: a folder with one of {expected}")
        location /= file_name
    if location.name.endswith(".index.json"):
        return _sharded_tensors(location)
    return checkpoint_file_tensors(location)


def checkpoint_file_tensors(path: Path) -> dict[str, CheckpointTensor]:
    """Describe the tensors of one ``.safetensors`` file, or of one file of ``torch.save``."""
    if not path.is_file():
        raise CaptureError(f"{path}: no such checkpoint")
    return _safetensors_tensors(path) if path.suffix == ".safetensors" else _saved_tensors(path)


def _sharded_tensors(index_path: Path) -> dict[str, CheckpointTensor]:
    """The tensors that an index names, each from the file that it names for it."""
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_bytes(), object_pairs_hook=_unique)["weight_map"]
        file_names = dict.fromkeys(weight_map.values())
        paths = {file_name: Path(file_name) for file_name in file_names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CaptureError(f"{index_path}: expected an index with a weight_map: {error}") from error
    for file_name, path in paths.items():
        if path.is_absolute() or ".." in path.parts:
            raise CaptureError(f"{index_path}: expected names of files in its folder, found {file_name[:200]!r}")
    tensors_of_file = {
        file_name: checkpoint_file_tensors(index_path.parent / path) for file_name, path in paths.items()
    }
    for tensor_name, file_name in weight_map.items():
        if tensor_name not in tensors_of_file[file_name]:
            raise CaptureError(
                f"{index_path.parent / file_name}: has no tensor {tensor_name[:200]!r}, which {index_path.name} says is there: "
                "copy or save the checkpoint again"
            )
    return {tensor_name: tensors_of_file[file_name][tensor_name] for tensor_name, file_name in weight_map.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON file; a key that occurs twice is refused, since readers differ in which one they take."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {duplicate[:200]!r}")
    return fields


def _safetensors_tensors(path: Path) -> dict[str, CheckpointTensor]:
    # Not by the safetensors library, which does not say where in the file a tensor is.
    tensors = {}
    try:
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            version = file_version(file.fileno())
            file_size = os.fstat(file.fileno()).st_size
            header: dict[str, Any] = json.loads(file.read(min(header_length, file_size)), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        for tensor_name, entry in header.items():
            stored = parse_header_entry(tensor_name, entry, 8 + header_length, path.name)
            dtype: torch.dtype = getattr(torch, TORCH_DTYPES[stored.dtype])
            size = stored.end - stored.start
            if stored.end > file_size:
                raise ValueError(f"{tensor_name}: its {size} bytes are not in the file")  # noqa: TRY301 - as for other errors
            tensors[tensor_name] = CheckpointTensor(
                dtype=dtype,
                shape=stored.shape,
                read=partial(map_tensor, path, stored.start, dtype, stored.shape, version),
                location=FileRange(path=path, start=stored.start, size=size, version=version),
            )
    except (FormatError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CaptureError(f"{path}: cannot be read as a safetensors file: {error}") from error
    return tensors


def map_tensor(
    path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...], version: FileVersion | None = None
) -> torch.Tensor:
    """Map a tensor of a file for reading only. The file must still be `version`; None if nobody else writes it."""
    element_count = torch.Size(shape).numel()
    if element_count == 0:
        return torch.empty(shape, dtype=dtype)
    page_offset = start % mmap.ALLOCATIONGRANULARITY
    length = page_offset + element_count * dtype.itemsize
    with path.open("rb") as file:
        if version not in (None, file_version(file.fileno())):
            raise CaptureError(f"{path}: was changed while it was read: repeat the export when it is complete")
        pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start - page_offset)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        elements = torch.frombuffer(pages, dtype=torch.uint8, offset=page_offset)
    return elements.view(dtype).reshape(shape)


def _saved_tensors(path: Path) -> dict[str, CheckpointTensor]:
    """The tensors of a file of ``torch.save``, which is mapped; files older than torch 1.6 are read into memory."""
    try:
        is_mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)  # noqa: TID251 - runs no code
    except Exception as error:
        # What torch says before it, and after it, is advice to run the code of the file.
        reason = first_line(str(error).rpartition("WeightsUnpickler error:")[2].strip()).partition(
            " was not an allowed"
        )[0]
        raise CaptureError(
            f"{path}: expected a file that torch.load reads with weights_only=True, found another one ({reason or type(error).__name__}): "
            "write it by torch.save(model.state_dict(), FILE), or by safetensors.torch.save_file"
        ) from error
    if not isinstance(content, Mapping):
        raise CaptureError(f"{path}: expected a state dict, found {type(content).__name__}")
    return {
        tensor_name: CheckpointTensor(
            dtype=tensor.dtype, shape=tuple(tensor.shape), read=partial(_held, path, tensor_name, tensor)
        )
        for tensor_name, tensor in _flattened(content).items()
    }


def _held(path: Path, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "without data" if tensor.is_meta else "sparse"
        raise CaptureError(
            f"{path}: {tensor_name} is {kind}: expected a dense tensor: save the checkpoint with such tensors"
        )
    return tensor


def _flattened(content: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts, by their keys joined with dots, as torch.distributed.checkpoint names them."""
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in content.items():
        if isinstance(entry, torch.Tensor):
            tensors[f"{prefix}{key}"] = entry.detach()
        elif isinstance(entry, Mapping):
            tensors |= _flattened(entry, f"{prefix}{key}.")
    return tensors


def _distributed_tensors(folder: Path) -> dict[str, CheckpointTensor]:
    """The tensors of a folder of ``torch.distributed.checkpoint``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - slow to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415 - the same

    try:
        versions = _file_versions(folder)
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CaptureError(f"{folder}: torch.distributed.checkpoint cannot read it: {error}") from error
    return {
        tensor_name: CheckpointTensor(
            dtype=entry.properties.dtype,
            shape=tuple(entry.size),
            read=partial(_read_distributed, folder, tensor_name, entry.properties.dtype, tuple(entry.size), versions),
        )
        for tensor_name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _file_versions(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The inode, the size and the time of the last change of each file in a folder."""
    statuses = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses.items()}


def _read_distributed(
    folder: Path,
    tensor_name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    versions: Mapping[str, tuple[int, int, int]],
) -> torch.Tensor:
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - slow to import
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - the same
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415 - the same

    tensors = {tensor_name: torch.empty(shape, dtype=dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
        except CheckpointException as error:  # it is no `Exception`
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise CaptureError(
                f"{folder}: {tensor_name}: torch.distributed.checkpoint cannot read it: {causes}"
            ) from error
    if _file_versions(folder) != versions:
        raise CaptureError(f"{folder}: was changed while it was read: repeat the export when it is complete")
    return tensors[tensor_name]


class DataNeededError(Exception):
    """What the code of a model does with a deferred tensor cannot be recorded: its weights must be in memory."""


class DeferredTensors(TorchDispatchMode):
    """Deferred tensors, which are fake tensors of torch on the CPU. A function that needs their data, such as ``torch.equal``, gets it.

    What happens to them in a ``with`` statement over this object is recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = FakeTensorMode()
        # By the identity of the fake tensor, which is held so that no other object gets this identity.
        self._computations: dict[int, tuple[torch.Tensor, _Computation]] = {}
        self._locations: dict[int, FileRange] = {}

    def add(self, tensor: CheckpointTensor) -> torch.Tensor:
        """Return a deferred tensor that has the data of a tensor of a checkpoint."""
        with self._fake_mode:
            fake_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._computations[id(fake_tensor)] = (fake_tensor, lambda _: tensor.read())
        self._set_location(fake_tensor, tensor.location)
        return fake_tensor

    def replace(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return a parameter without data in the place of one with data; it has no data until `assign`."""
        # Not by `from_tensor` of the mode, which keeps the memory of the other one.
        with self._fake_mode:
            fake_tensor = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
        return torch.nn.Parameter(fake_tensor, requires_grad=parameter.requires_grad)

    def assign(self, fake_tensor: torch.Tensor, tensor: CheckpointTensor) -> None:
        """Give the data of a tensor of a checkpoint to a tensor that `replace` returned; its dtype is converted."""
        dtype, strides = fake_tensor.dtype, fake_tensor.stride()

        def compute(_: object) -> torch.Tensor:
            stored = tensor.read().to(dtype)
            # As `copy_` of a state dict does, which keeps the order of the dimensions in memory.
            if stored.stride() == strides:
                return stored
            return torch.empty_strided(stored.shape, strides, dtype=dtype).copy_(stored)

        self._computations[id(fake_tensor)] = (fake_tensor, compute)
        if dtype == tensor.dtype and fake_tensor.is_contiguous():
            self._set_location(fake_tensor, tensor.location)

    def location(self, tensor: torch.Tensor) -> FileRange | None:
        """Return the bytes of a file that a deferred tensor consists of; None if they must be computed, or it is not deferred."""
        return self._locations.get(id(tensor))

    def _set_location(self, tensor: torch.Tensor, location: FileRange | None) -> None:
        if location is not None:
            self._locations[id(tensor)] = location

    def __contains__(self, tensor: object) -> bool:
        """Whether a tensor is deferred."""
        return id(tensor) in self._computations

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a deferred tensor, and any other tensor as it is. The data may be mapped for reading only."""
        known: dict[int, torch.Tensor] = {}

        def compute(wanted: torch.Tensor) -> torch.Tensor:
            if id(wanted) not in self._computations:
                if isinstance(wanted, FakeTensor):
                    raise DataNeededError("a tensor has no data in the checkpoint")
                return wanted
            if id(wanted) not in known:
                known[id(wanted)] = self._computations[id(wanted)][1](compute)
            return known[id(wanted)]

        with torch.no_grad():
            return compute(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator, and record it if it has deferred tensors among its arguments."""
        kwargs = kwargs or {}
        if not any(leaf in self for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)):
            return func(*args, **kwargs)
        if operator_schema(func).is_mutable:
            raise DataNeededError(f"{func} writes to a weight")

        def compute(real: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            real_args, real_kwargs = tree_map_tensors(real, (args, dict(kwargs)))
            return func(*real_args, **real_kwargs)

        try:
            result = func(*args, **kwargs)
        except DataDependentError:
            return compute(self.real)
        if isinstance(result, torch.Tensor):
            self._computations.setdefault(id(result), (result, compute))
            if func in _IDENTITIES:
                self._set_location(result, self.location(args[0]))
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._computations.setdefault(id(item), (item, partial(_item, compute, index)))
        return result


def _item(compute: _Computation, index: int, real: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """One of several results of a computation."""
    return compute(real)[index]
