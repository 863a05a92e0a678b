"""The memory of the weights of loaded stages: its content at loading, and its way to other devices. Weights may share memory."""

import mmap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import torch

from stagepack.errors import InputError
from stagepack.format.graph import Weight
from stagepack_loaders.torch.container import Slot

# The first and the last byte of tensors that overlap, half-open.
_Span = tuple[int, int]
# Less is in the memory of torch, which takes no mapping for each.
_MAPPED_ZERO_BYTES: Final = 2**20


class StageState:
    """The memory of the buffers that calls write, such as key-value caches and counters, and its content at loading."""

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
        """Return buffers with new memory of the content at loading."""
        memories = [_new_memory(initial_content) for initial_content in self._initial]
        buffers = [(slot.get(), memories[memory_index]) for slot, memory_index in self._written]
        return [_on_memory(buffer, memory, int(buffer.storage_offset()), buffer.device) for buffer, memory in buffers]

    def swap(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange the buffers for the buffers that `fresh` or `swap` returned; return the previous ones.

        Results of earlier calls that are views of the buffers keep the previous memory.
        """
        previous = self.tensors()
        for (slot, _), buffer in zip(self._written, buffers, strict=True):
            slot.put(buffer)
        return previous


def _new_memory(content: torch.Tensor) -> torch.Tensor:
    """Memory with a content, of bytes."""
    if content.stride() == (0,):
        return zero_bytes(len(content), content.device)
    return content.clone(memory_format=torch.contiguous_format)


def zero_bytes(byte_count: int, device: torch.device) -> torch.Tensor:
    """Return new memory of zeros, [byte_count]."""
    if device.type == "cpu" and byte_count >= _MAPPED_ZERO_BYTES:
        # `torch.zeros` writes all of its memory. A mapping takes a page when that is written or read: none at first.
        mapped_zeros = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapped_zeros, dtype=torch.uint8)
    return torch.zeros(byte_count, dtype=torch.uint8, device=device)


def tensor_mover(
    tensors: Sequence[torch.Tensor], whole_tensors: Iterable[torch.Tensor], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies tensors to a device, where those that share memory share it again."""
    spans = _overlapping_spans([(tensor, _span(tensor)) for tensor in tensors])
    for tensor in whole_tensors:
        spans[_memory_key(tensor)] = [(0, tensor.untyped_storage().nbytes())]
    chunks: dict[tuple[object, _Span], torch.Tensor] = {}
    # With the tensors themselves, so that no other one gets their identity.
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            key, (start, end) = _memory_key(tensor), _span(tensor)
            span = next(span for span in spans[key] if span[0] <= start and end <= span[1])
            if (key, span) not in chunks:
                chunks[key, span] = _memory(tensor)[slice(*span)].to(device, copy=True)
            offset = (start - span[0]) // tensor.element_size()
            moved[id(tensor)] = tensor, _on_memory(tensor, chunks[key, span], offset, device)
        return moved[id(tensor)][1]

    return move_tensor


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_memory(tensor: torch.Tensor, memory: torch.Tensor, offset: int, device: torch.device) -> torch.Tensor:
    """A tensor, or parameter, like another one, on other memory."""
    replacement = torch.empty(0, dtype=tensor.dtype, device=device)
    replacement.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(replacement, tensor.requires_grad) if is_parameter else replacement


def _memory_key(tensor: torch.Tensor) -> object:
    """What tensors have in common that are views of one memory."""
    return (tensor.device, tensor.untyped_storage().data_ptr() or id(tensor))


def _span(tensor: torch.Tensor) -> _Span:
    """The bytes of its memory that a tensor uses."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.element_size()


def _overlapping_spans(tensor_spans: Sequence[tuple[torch.Tensor, _Span]]) -> dict[object, list[_Span]]:
    """The bytes of each memory that tensors use, as spans that do not overlap."""
    spans: dict[object, list[_Span]] = {}
    for tensor, (start, end) in sorted(tensor_spans, key=lambda entry: entry[1]):
        merged = spans.setdefault(_memory_key(tensor), [])
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return spans
