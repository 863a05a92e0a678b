"""The buffers of a stage that calls write, such as key-value caches and counters."""

from collections.abc import Collection, Sequence

import torch

from stagepack.errors import InputError
from stagepack.format.graph import Weight
from stagepack_loaders.torch.slots import Slot


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
