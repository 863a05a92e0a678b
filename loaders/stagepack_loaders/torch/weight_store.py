"""The weights of stages: from weight files to tensors on a device. A store brings them, by one of three policies.

A `WeightCache` has tensors on the memory of weight files, which are mapped or copied; on another device, copies of that. In an
`ArrivingStore`, threads read the files into the memory of the device, while the stages run already. In a `weight_window.WindowStore`,
some weights stay in the memory of the device, and the others pass through it in each call.
"""

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_source import FileStream
from stagepack.format.graph import Graph, Weight
from stagepack.format.reader import Bundle
from stagepack.format.rules import rule_error
from stagepack.format.shapes import is_row_major
from stagepack.format.weights import StoredTensor
from stagepack_loaders.base import Loading
from stagepack_loaders.torch.stage_memory import zero_bytes
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.weight_gate import WeightGate
from stagepack_loaders.torch.weight_transfer import ArrivingFile, ArrivingFiles, ByteRange
from stagepack_loaders.weight_files import FolderReader, WeightFile, map_weight_file, open_weight_files
from stagepack_loaders.window_plan import Residency, WeightUse

# The file and the position in it of each stored tensor, by name.
StoredTensors = Mapping[str, tuple[Path, StoredTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """The weights that a stage needs.

    Attributes:
        uses: the uses of its weights, for a store that may have a gate.
        stream: reads its files while they are downloaded; None if the folder has them.
    """

    bundle: Bundle
    stage_number: int
    graph: Graph
    stored_tensors: StoredTensors
    device: torch.device
    loading: Loading
    uses: Sequence[WeightUse] = ()
    stream: FileStream | None = None

    @property
    def file_names(self) -> Sequence[str]:
        """The names of its weight files."""
        return self.bundle.stages[self.stage_number].weights

    def is_state(self, weight: Weight) -> bool:
        """Whether calls write a weight."""
        return not set(self.bundle.stages[self.stage_number].state).isdisjoint(weight.names)


def written_buffers(bundle: Bundle) -> frozenset[str]:
    """Return the names of the buffers that calls of any entry point write."""
    stages = (stage for entry_point in bundle.entry_points for stage in entry_point.stages)
    return frozenset(name for stage in stages for name in stage.state)


class LoadedWeights(NamedTuple):
    """The weights of a stage, by value name; what its module asks for them, if it does; and which of them stay, if not all do."""

    tensors: Mapping[str, torch.Tensor]
    gate: WeightGate | None = None
    residency: Residency | None = None


class WeightStore(Protocol):
    """Brings the weights of the stages that are loaded together. Those on one device share what is one tensor in the model."""

    def has_gate(self, stage: StageWeights) -> bool:
        """Whether `load` returns a gate, which the module of the stage has to ask for its weights."""

    def open(self, stages: Sequence[StageWeights], *, verify: bool) -> None:
        """Bring the weight files of several stages at a time, before `load`. Threads may still read them when it returns."""

    def load(self, stage: StageWeights, *, verify: bool) -> LoadedWeights:
        """Bring the weights of a stage; `verify` compares its files with their digests."""


class WeightCache:
    """A `WeightStore` of tensors on the memory of weight files."""

    def __init__(self) -> None:
        self._files: dict[str, WeightFile] = {}
        self._verified_files: set[str] = set()
        self._stored: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._weights: dict[tuple[str, torch.device], torch.Tensor] = {}

    def has_gate(self, stage: StageWeights) -> bool:
        """See `WeightStore`."""
        return False

    def open(self, stages: Sequence[StageWeights], *, verify: bool) -> None:
        """See `WeightStore`."""
        file_names = dict.fromkeys(file_name for stage in stages for file_name in stage.file_names)
        self.open_files(stages[0].bundle, file_names, stages[0].loading, verify=verify)

    def load(self, stage: StageWeights, *, verify: bool) -> LoadedWeights:
        """See `WeightStore`."""
        self.open([stage], verify=verify)
        return LoadedWeights(
            {weight.value: self.read_of(stage, weight, stage.device) for weight in stage.graph.weights}
        )

    def open_files(self, bundle: Bundle, file_names: Iterable[str], loading: Loading, *, verify: bool) -> None:
        """Bring weight files into memory, those that are not there yet; see `stagepack_loaders.weight_files.open_weight_files`."""
        known_files = self._verified_files if verify else self._files.keys()
        missing_files = [file_name for file_name in file_names if file_name not in known_files]
        if not self._files.keys().isdisjoint(missing_files):
            # The files were read without verification, and so were the tensors.
            self._stored.clear()
            self._weights.clear()
        self._files |= open_weight_files(bundle, missing_files, loading, verify=verify)
        self._verified_files.update(missing_files if verify else ())

    def add(self, stored: StoredTensor, content: torch.Tensor, device: torch.device) -> None:
        """Add a stored tensor by its bytes on the CPU, in the place of its file."""
        dtype: torch.dtype = torch_attribute(TORCH_DTYPES[stored.dtype], torch.dtype)
        self._stored[stored.name, device] = content.view(dtype).reshape(stored.shape).to(device)

    def read_of(self, stage: StageWeights, weight: Weight, device: torch.device) -> torch.Tensor:
        """Return a weight of a stage as a tensor on a device.

        Buffers that calls write have memory of their own: a mapping may be replaced while a call writes.
        """
        return self.read(weight, stage.stored_tensors, device, copy=stage.is_state(weight))

    def read(
        self, weight: Weight, stored_tensors: StoredTensors, device: torch.device, *, copy: bool = False
    ) -> torch.Tensor:
        """Return a weight as a tensor on a device; on the CPU, on the memory of its weight file or on a copy of that."""
        key = (weight.names[0], device)
        if key not in self._weights:
            if weight.zeros:
                tensor = zero_weight(weight, device)
            else:
                tensor = lay_out(weight, self._read_stored(*stored_tensors[weight.stored], device, copy=copy))
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
                raise rule_error("D1", path.name, message)
            if stored.start == stored.end:
                content = torch.empty(0, dtype=torch.uint8)  # which `frombuffer` refuses
            else:
                content = self.mapped_bytes(ByteRange(path.name, stored.start, stored.end))
            dtype: torch.dtype = torch_attribute(TORCH_DTYPES[stored.dtype], torch.dtype)
            self._stored[key] = content.view(dtype).reshape(stored.shape).to(device, copy=copy)
        return self._stored[key]


def as_weight(weight: Weight, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a weight as a `torch.nn.Parameter` if it is one, and with `requires_grad` if it had that."""
    if weight.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=weight.trainable)
    # Not a view of the memory of a file: `detach_` fails on views.
    tensor = tensor.detach()
    return tensor.requires_grad_() if weight.trainable else tensor


def lay_out(weight: Weight, stored: torch.Tensor) -> torch.Tensor:
    """Return a stored tensor, or its bytes, with the dtype, strides and position in memory that a weight has in the model."""
    dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
    if weight.base is not None:
        base_bytes = stored.reshape(-1).view(torch.uint8)
        base = base_bytes[: base_bytes.numel() - base_bytes.numel() % dtype.itemsize].view(dtype)
        return base.as_strided(weight.shape, weight.strides or (), base.storage_offset() + weight.offset)
    stored = _typed(weight, stored)
    if weight.strides is None:
        return stored
    if not is_rearranged(weight):
        return stored.as_strided(weight.shape, weight.strides)
    return torch.empty_strided(weight.shape, weight.strides, dtype=dtype, device=stored.device).copy_(stored)


def _typed(weight: Weight, stored: torch.Tensor) -> torch.Tensor:
    dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
    return stored.reshape(-1).view(dtype).reshape(weight.shape)


def stored_bytes(weight: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a weight that is a whole stored tensor, as its file has them, on the CPU."""
    return weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def is_rearranged(weight: Weight) -> bool:
    """Whether the elements of a weight are in another order than in its stored tensor, so that the weight is a copy."""
    return weight.base is None and weight.strides is not None and not is_row_major(weight.shape, weight.strides)


def zero_weight(weight: Weight, device: torch.device) -> torch.Tensor:
    """Return a weight of zeros, which no file holds."""
    dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
    byte_count = math.prod(weight.shape) * dtype.itemsize
    zeros = zero_bytes(byte_count, device).view(dtype).reshape(weight.shape)
    # Weights that are stored themselves have no gaps, with any strides (G9).
    return zeros if weight.strides is None else zeros.as_strided(weight.shape, weight.strides)


class ArrivingStore:
    """A `WeightStore` of tensors on the memory of files that threads read into the memory of devices."""

    def __init__(self, folder_reader: FolderReader) -> None:
        self._folder_reader = folder_reader
        self._files: dict[tuple[torch.device, FileStream | None], ArrivingFiles] = {}
        self._weights: defaultdict[torch.device, dict[str, ArrivingWeight]] = defaultdict(dict)

    def has_gate(self, stage: StageWeights) -> bool:
        """See `WeightStore`."""
        return stage.loading.options.stream

    def open(self, stages: Sequence[StageWeights], *, verify: bool) -> None:
        """See `WeightStore`."""
        for stage in stages:
            self._arriving_files(stage, verify=verify).add(stage.file_names)

    def load(self, stage: StageWeights, *, verify: bool) -> LoadedWeights:
        """See `WeightStore`. A stage that asks for its weights is ready when the buffers that calls write have arrived."""
        sources = self._arriving_files(stage, verify=verify)
        files = sources.add(stage.file_names)
        known_weights = self._weights[stage.device]
        for weight in stage.graph.weights:
            if weight.names[0] not in known_weights:
                known_weights[weight.names[0]] = ArrivingWeight(weight, stage, files)
        weights = [known_weights[weight.names[0]] for weight in stage.graph.weights]
        gate = ArrivingWeights(stage.uses, weights, list(files.values()), sources)
        if self.has_gate(stage):
            for weight, arriving in zip(stage.graph.weights, weights, strict=True):
                if stage.is_state(weight):
                    arriving.wait()
        else:
            gate.wait()
        tensors = {weight.value: arriving.tensor for weight, arriving in zip(stage.graph.weights, weights, strict=True)}
        return LoadedWeights(tensors, gate if self.has_gate(stage) else None)

    def _arriving_files(self, stage: StageWeights, *, verify: bool) -> ArrivingFiles:
        key = (stage.device, stage.stream)
        if key not in self._files:
            handle = None if stage.stream is None else stage.stream.share()
            read_into = self._folder_reader.read_into if handle is None else handle.read_into
            self._files[key] = ArrivingFiles(
                stage.bundle, stage.device, read_into, verify=verify, progress=stage.loading.progress
            )
            if handle is not None:
                # Before the threads of the files are waited for, which wait for the download.
                weakref.finalize(self._files[key], handle.close)
        return self._files[key]


class ArrivingWeight:
    """A weight on the memory of its arriving file.

    Attributes:
        tensor: the weight. Its content is undefined until `wait` returns.
    """

    def __init__(self, weight: Weight, stage: StageWeights, files: Mapping[str, ArrivingFile]) -> None:
        self._weight = weight
        self._lock = threading.Lock()
        self._is_copied = not is_rearranged(weight)
        self._location: tuple[ArrivingFile, StoredTensor] | None = None
        if weight.zeros:
            tensor = zero_weight(weight, stage.device)
        else:
            path, stored = stage.stored_tensors[weight.stored]
            self._location = files[path.name], stored
            tensor = lay_out(weight, files[path.name].tensor_bytes(stored.start, stored.end))
        self.tensor = as_weight(weight, tensor)

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the weight has arrived."""
        if self._location is None:
            return
        file, stored = self._location
        file.wait(stored.start, stored.end)
        with self._lock:
            if not self._is_copied:
                # Not counted as a write of the caller's.
                self.tensor.data.copy_(_typed(self._weight, file.tensor_bytes(stored.start, stored.end)))
                self._is_copied = True


class ArrivingWeights(WeightGate):
    """The weights of a stage on the memory of its arriving files."""

    def __init__(
        self,
        uses: Sequence[WeightUse],
        weights: Sequence[ArrivingWeight],
        files: Sequence[ArrivingFile],
        sources: ArrivingFiles,
    ) -> None:
        self._uses = uses
        self._weights: Sequence[ArrivingWeight] = weights
        self._files: Sequence[ArrivingFile] = files
        self._sources: ArrivingFiles | None = sources
        self._waiting = [True] * len(uses)

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`. The weights that the module was called with are returned: the user may have replaced them."""
        weights = self._weights  # `wait` may replace them meanwhile
        if self._waiting[use_index]:
            for weight_index in self._uses[use_index].weights:
                weights[weight_index].wait()
            self._waiting[use_index] = False
        return given_weights

    def has_arrived(self) -> bool:
        """See `WeightGate`."""
        if self._sources is not None and all(file.has_arrived() for file in self._files):
            self.wait()
        return self._sources is None

    def wait(self) -> None:
        """See `WeightGate`. All weights will stay."""
        if self._sources is None:
            return
        for weight in self._weights:
            weight.wait()
        for file in self._files:
            file.wait()
        # Versions to come of a stage with adapters keep the gate, and must not keep these weights.
        self._waiting = [False] * len(self._uses)
        self._weights, self._files, self._sources = (), (), None
