"""The weights of stages: from weight files to tensors on a device.

- Weight files that threads read into the memory of a device, in order, while the stages run already.
- The weights of a stage while their files arrive: each use waits for its own bytes only.
- The buffers of a stage that calls write, such as key-value caches and counters.
"""

# Long because weights that are there, that arrive and that are written are views of the same memory.

import math
import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from torch.fx import GraphModule

from stagepack.errors import DigestError, InputError, Problem, StagepackError, repeated_error
from stagepack.format.chunks import ByteProgress, File, FileChunk, file_chunks
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.graph import Graph, Weight
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor
from stagepack_loaders.torch.slots import Slot
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.weight_gate import WeightUse
from stagepack_loaders.torch.weight_transfer import ByteRange, DeviceWriter, TransferThreads, current_event, empty_bytes
from stagepack_loaders.weight_files import WeightFile, WeightReader, map_weight_file, open_weight_files

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


class ArrivingFile:
    """A weight file in the memory of a device. Its chunks arrive in any order.

    Attributes:
        entry: the manifest entry of the file.
        memory: the bytes of the file; those of chunks that have not arrived are undefined.
    """

    def __init__(self, entry: File, device: torch.device) -> None:
        self.entry = entry
        self.memory = empty_bytes(entry.size, device)
        self._allocated = current_event(device)
        self.chunks = file_chunks(entry)
        self._tensor_bytes: dict[tuple[int, int], torch.Tensor] = {}
        self._arrival = threading.Condition()
        self._events: dict[int, Any] = {}
        self._errors: dict[int, StagepackError] = {}

    def tensor_bytes(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes of a stored tensor, as a tensor with a storage of its own, which shares the memory.

        Buffers that calls write are copied and exchanged by storage.
        """
        if (start, end) not in self._tensor_bytes:
            offset = self.memory.storage_offset()
            storage = self.memory.untyped_storage()[offset + start : offset + end]
            self._tensor_bytes[start, end] = torch.empty(0, dtype=torch.uint8, device=self.memory.device).set_(storage)
        return self._tensor_bytes[start, end]

    def write_chunk(
        self,
        writer: DeviceWriter,
        chunk: FileChunk,
        *,
        verify: bool,
        progress: ByteProgress | None,
        on_damage: Callable[[File], None],
    ) -> None:
        """Read a chunk into the memory. Errors are raised by `wait`.

        writer: writes the bytes.
        progress: called with the number of bytes that were read.
        """
        hasher = blake3() if verify else None
        source = ByteRange(self.entry.name, chunk.start, chunk.end)
        event: Any = None
        error: StagepackError | None = None
        try:
            event = writer.write(source, self.memory[chunk.start : chunk.end], hasher, self._allocated)
            problem = None if hasher is None else chunk.problem(hasher.hexdigest())
            if problem is not None:
                error = DigestError([problem])
                on_damage(self.entry)
        except StagepackError as read_error:
            error = read_error
        except Exception as unexpected_error:  # noqa: BLE001 - the thread would end, and a call would wait for ever
            message = f"the file cannot be loaded: {unexpected_error}"
            error = DigestError([Problem(rule="D1", where=self.entry.name, message=message)])
        if progress is not None:
            progress(chunk.end - chunk.start)
        with self._arrival:
            if error is None:
                self._events[chunk.index] = event
            else:
                self._errors[chunk.index] = error
            self._arrival.notify_all()

    def wait(self, start: int, end: int) -> None:
        """Return when a range of bytes has arrived."""
        for chunk in file_chunks(self.entry, start, end) if end > start else ():
            with self._arrival:
                self._arrival.wait_for(lambda index=chunk.index: index in self._events or index in self._errors)  # type: ignore[misc]
                if chunk.index in self._errors:
                    raise repeated_error(self._errors[chunk.index])
                event = self._events[chunk.index]
            # Not the current stream alone: later calls may be made on others.
            if event is not None:
                event.synchronize()

    def has_arrived(self) -> bool:
        """Whether all chunks have arrived, without an error."""
        return len(self._events) == len(self.chunks)


class ArrivingFiles:
    """The weight files of stages on one device. Threads read them in the order in which they are added.

    The threads end when the object is gone: keep it as long as files are to arrive.
    """

    def __init__(
        self,
        device: torch.device,
        reader: WeightReader,
        *,
        verify: bool,
        progress: ByteProgress | None = None,
        is_staged: bool | None = None,
        on_damage: Callable[[File], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._on_damage = on_damage
        self._progress = progress
        self._writer = DeviceWriter(device, reader, is_staged=is_staged)
        self._verify = verify
        self._threads = TransferThreads()
        self._files: dict[str, ArrivingFile] = {}

    def add(self, entries: Iterable[File]) -> dict[str, ArrivingFile]:
        """Return files, which are read from now on."""
        files = {}
        for entry in entries:
            if entry.name not in self._files:
                file = self._files[entry.name] = ArrivingFile(entry, self._device)
                for chunk in file.chunks:
                    self._threads.submit(
                        partial(
                            file.write_chunk,
                            self._writer,
                            chunk,
                            verify=self._verify,
                            progress=self._progress,
                            on_damage=self._on_damage,
                        )
                    )
            files[entry.name] = self._files[entry.name]
        return files


class ArrivingWeight:
    """A weight on the memory of its arriving file. The stages on one device share those that are one tensor in the model.

    Attributes:
        tensor: the weight. Its content is undefined until `wait` returns.
    """

    def __init__(
        self,
        weight: Weight,
        stored_tensors: Mapping[str, tuple[Path, StoredTensor]],
        files: Mapping[str, ArrivingFile],
        device: torch.device,
    ) -> None:
        self._weight = weight
        self._location = _location(weight, stored_tensors, files)
        self._lock = threading.Lock()
        # A weight whose strides are not those of the stored tensor is a copy of it, made when it has arrived.
        self._uncopied: torch.Tensor | None = None
        if self._location is None:
            tensor = zero_weight(weight, device)
        elif weight.base is None and weight.strides is not None:
            dtype: torch.dtype = torch_attribute(weight.dtype, torch.dtype)
            tensor = torch.empty_strided(weight.shape, weight.strides, dtype=dtype, device=device)
            self._uncopied = tensor
        else:
            tensor = _stored_weight(weight, self._location)
        self.tensor = as_weight(weight, tensor)

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the weight has arrived."""
        if self._location is None:
            return
        file, stored = self._location
        file.wait(stored.start, stored.end)
        with self._lock:
            if self._uncopied is not None:
                self._uncopied.copy_(_stored_weight(self._weight, self._location))
                self._uncopied = None


class ArrivingWeights:
    """The tensors of a stage, on the memory of its arriving files. It is the gate of the stage; see `WeightGate`.

    Attributes:
        tensors: the weights by value name. Their content is undefined until they are waited for.
    """

    def __init__(
        self,
        graph: Graph,
        uses: Sequence[WeightUse],
        weights: Sequence[ArrivingWeight],
        files: Sequence[ArrivingFile],
        sources: ArrivingFiles,
    ) -> None:
        self._uses = uses
        self._weights = {weight.value: arriving for weight, arriving in zip(graph.weights, weights, strict=True)}
        self._weight_list = list(weights)
        self._files = files
        self._sources: ArrivingFiles | None = sources
        self._waiting = [True] * len(uses)
        self.tensors = {value_name: arriving.tensor for value_name, arriving in self._weights.items()}

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`. The weights that the module was called with are returned: the user may have replaced them."""
        if self._waiting[use_index]:
            for weight_index in self._uses[use_index].weights:
                self._weight_list[weight_index].wait()
            self._waiting[use_index] = False
        return given_weights

    def release(self, use_index: int) -> None:
        """See `WeightGate`. The weights stay."""

    def has_arrived(self) -> bool:
        """Whether all weights are there, so that nothing needs to be asked any more."""
        if self._sources is not None and all(file.has_arrived() for file in self._files):
            self.wait()
        return self._sources is None

    def wait(self, value_names: Sequence[str] | None = None) -> None:
        """Return when weights have arrived.

        value_names: the value names of the weights; None for all of them, and all bytes of their files.
        """
        if self._sources is None:
            return
        for value_name in self._weights if value_names is None else value_names:
            self._weights[value_name].wait()
        if value_names is None:
            for file in self._files:
                file.wait(0, file.entry.size)
            self._sources = None

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `GatedWeights`. All can be converted when they have arrived."""
        self.wait()

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """Call the module that asks for its weights."""
        return module(*values)


def _location(
    weight: Weight, stored_tensors: Mapping[str, tuple[Path, StoredTensor]], files: Mapping[str, ArrivingFile]
) -> tuple[ArrivingFile, StoredTensor] | None:
    """The file of a weight and its position there; None if no file has it."""
    if weight.zeros:
        return None
    path, stored = stored_tensors[weight.stored]
    return files[path.name], stored


def _stored_weight(weight: Weight, location: tuple[ArrivingFile, StoredTensor]) -> torch.Tensor:
    file, stored = location
    return lay_out(weight, file.tensor_bytes(stored.start, stored.end))


class StageState:
    """The memory that calls write, and its content at loading. Weights may share memory; each memory is kept once."""

    def __init__(self, weights: Sequence[Weight], slots: Sequence[Slot], state_names: Collection[str]) -> None:
        self._initial: list[torch.Tensor] = []
        buffer_memories = [_memory(slot.get()) for slot in slots]
        index_of_address: dict[int, int] = {}
        for weight, buffer_memory in zip(weights, buffer_memories, strict=True):
            is_written = not set(state_names).isdisjoint(weight.names) and len(buffer_memory)
            if is_written and buffer_memory.data_ptr() not in index_of_address:
                index_of_address[buffer_memory.data_ptr()] = len(self._initial)
                self._initial.append(
                    buffer_memory.new_zeros(1).expand_as(buffer_memory) if weight.zeros else buffer_memory.clone()
                )
        # All weights on such memory, with the index of its initial content.
        self._written: list[tuple[Slot, int]] = [
            (slot, index_of_address[buffer_memory.data_ptr()])
            for slot, buffer_memory in zip(slots, buffer_memories, strict=True)
            if buffer_memory.data_ptr() in index_of_address
        ]

    @torch.no_grad()
    def reset(self) -> None:
        """Set the memory to its content at loading."""
        for slot, memory_index in self._written:
            buffer_memory = _memory(slot.get())
            if self._initial[memory_index].shape != buffer_memory.shape:
                raise InputError(
                    f"{slot.names[0]} was replaced by a buffer of another size or type: it cannot be reset"
                )
            buffer_memory.copy_(self._initial[memory_index])

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now."""
        return [slot.get() for slot, _ in self._written]

    def move(self, device: torch.device) -> None:
        """Keep the content at loading on another device, where the buffers are."""
        self._initial = [initial_content.to(device) for initial_content in self._initial]

    def fresh(self) -> list[torch.Tensor]:
        """Return new memory with the content at loading."""
        return [initial_content.clone(memory_format=torch.contiguous_format) for initial_content in self._initial]

    @torch.no_grad()
    def swap(self, buffer_memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange the memory for that of `fresh` or `swap`; return the previous one.

        The buffers become other tensors: results of earlier calls that are views of the buffers keep the previous memory.
        """
        previous_memories = list(buffer_memories)
        for slot, memory_index in self._written:
            tensor = slot.get()
            previous_memories[memory_index] = _memory(tensor)
            replacement = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            replacement.set_(
                buffer_memories[memory_index].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            slot.put(torch.nn.Parameter(replacement, tensor.requires_grad) if is_parameter else replacement)
        return previous_memories


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
