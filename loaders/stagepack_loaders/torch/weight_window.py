"""Weights that pass through the memory of a device in each call of a stage, in the order of their use.

- The module of a stage whose weights are not all in the memory of its device when it is called.
"""

import copy
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch.fx import GraphModule

from stagepack.errors import DigestError, OptionError, Problem
from stagepack_loaders.mapped_memory import may_be_written
from stagepack_loaders.torch.weight_gate import WeightGate
from stagepack_loaders.torch.weight_transfer import ByteRange, DeviceWriter, TransferThreads, current_event, empty_bytes
from stagepack_loaders.weight_files import WeightReader
from stagepack_loaders.window_plan import WindowPlan, place_bytes

_PIECE_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Passage:
    """The weights of a use on their way through the ring.

    Attributes:
        position: their position in the sequence of places; see `WindowPlan`.
        sources: the ranges of the weight files that hold them, one after the other.
        mapped: the bytes of each of these ranges, mapped: what the user writes into weights is there.
        tensors: the weights, on the memory of their place.
        registered: the weights, as they are registered in the stage: on the mapped bytes.
        layouts: where each of those is, as it was registered.
    """

    position: int
    sources: Sequence[ByteRange]
    mapped: Sequence[torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    registered: tuple[torch.Tensor, ...]
    layouts: tuple["TensorLayout", ...]

    @property
    def byte_count(self) -> int:
        """The size of their place: each range begins on a multiple of the alignment."""
        return sum(place_bytes(source.end - source.start) for source in self.sources)


class TensorLayout(NamedTuple):
    """The memory of a tensor, and how it is laid out there."""

    address: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return the layout of a tensor."""
        return cls(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


@dataclass(slots=True)
class _Progress:
    """How far the bytes of a passage are in this call."""

    missing_pieces: int
    events: list[Any] = field(default_factory=list)
    error: DigestError | None = None
    is_released: bool = False


class WeightWindow:
    """The ring of the stages on one device, and the threads that fill it.

    The weights of the stage that usually comes next are read ahead, of the first stage after the last one.
    """

    def __init__(self, plan: WindowPlan, device: torch.device, reader: WeightReader) -> None:
        self.memory = empty_bytes(plan.window_bytes, device)
        self._window_bytes = plan.window_bytes
        self._order = [index for index, position in enumerate(plan.positions) if position is not None]
        self._passages: dict[int, Passage] = {}
        self._writer = DeviceWriter(device, reader)
        self._threads = TransferThreads()
        self._call = threading.Lock()
        self._change = threading.Condition()
        self._progress: dict[int, _Progress] = {}
        # Indices in the order: of the oldest passage that is not released, and of the next one to be read.
        self._oldest, self._next = 0, 0
        self._released_event = current_event(device)

    def add(self, passages: Mapping[int, Passage]) -> None:
        """Add the weights of a stage that pass through, by the index of their use in the plan. Those that come first are read."""
        self._passages.update(passages)
        with self._change:
            self._read_ahead()

    def run(self, first_index: int, end_index: int, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """Call the module of a stage. Calls take turns, and record no gradients: the weights do not stay for these."""
        first, end = bisect_left(self._order, first_index), bisect_left(self._order, end_index)
        with self._call, torch.no_grad():
            if self._oldest != first:
                self._start_at(first)
            try:
                outputs = module(*values)
            finally:
                if self._oldest != end or end == len(self._order):
                    self._start_at(0)
        # The model may record gradients itself.
        return tuple(
            value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value for value in outputs
        )

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the weights of a use; see `WeightGate`."""
        passage = self._passages.get(use_index)
        if passage is None:
            return given_weights
        with self._change:
            progress = self._progress[use_index]
            self._change.wait_for(lambda: not progress.missing_pieces)
        for event in progress.events:
            torch.cuda.current_stream(self.memory.device).wait_event(event)
        self._bring_writes(passage, progress.error)
        return tuple(
            tensor if given is registered and TensorLayout.of(given) == layout else given.to(self.memory.device)
            for tensor, given, registered, layout in zip(
                passage.tensors, given_weights, passage.registered, passage.layouts, strict=True
            )
        )

    def _bring_writes(self, passage: Passage, read_error: DigestError | None) -> None:
        """Copy what the user has written into the weights of a passage to their place, and what is no longer that of the file."""
        # After the file was read: if it was changed meanwhile, the mapping was replaced before.
        written = [may_be_written(mapped.data_ptr(), len(mapped)) for mapped in passage.mapped]
        if read_error is not None and not all(written):
            raise DigestError(list(read_error.problems))
        offset = passage.position % self._window_bytes
        for source, mapped, is_written in zip(passage.sources, passage.mapped, written, strict=True):
            if is_written:
                self.memory[offset : offset + len(mapped)].copy_(mapped)
            offset += place_bytes(source.end - source.start)

    def release(self, use_index: int) -> None:
        """Let later weights have the place of those of a use."""
        if use_index not in self._passages:
            return
        with self._change:
            self._progress[use_index].is_released = True
            self._released_event = current_event(self.memory.device)
            while self._oldest < self._next and self._progress[self._order[self._oldest]].is_released:
                self._oldest += 1
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Begin to read all weights that have a free place."""
        while self._next < len(self._order) and self._order[self._next] in self._passages:
            passage = self._passages[self._order[self._next]]
            oldest = self._passages[self._order[self._oldest]]
            if passage.position + passage.byte_count - oldest.position > self._window_bytes:
                return
            self._read(self._order[self._next], passage)
            self._next += 1

    def _read(self, use_index: int, passage: Passage) -> None:
        pieces = []
        source_offset = passage.position % self._window_bytes
        for source in passage.sources:
            offset = source_offset
            source_offset += place_bytes(source.end - source.start)
            for start in range(source.start, source.end, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, source.end)
                pieces.append((ByteRange(source.file_name, start, end), self.memory[offset : offset + end - start]))
                offset += end - start
        progress = self._progress[use_index] = _Progress(len(pieces))
        for source, memory in pieces:
            self._threads.submit(partial(self._write_piece, progress, source, memory, self._released_event))

    def _write_piece(self, progress: _Progress, source: ByteRange, memory: torch.Tensor, after: Any) -> None:
        event, error = None, None
        try:
            event = self._writer.write(source, memory, None, after)
        except DigestError as read_error:
            error = read_error
        except Exception as unexpected_error:  # noqa: BLE001 - the thread would end, and a call would wait for ever
            message = f"the file cannot be loaded: {unexpected_error}"
            error = DigestError([Problem(rule="D1", where=source.file_name, message=message)])
        with self._change:
            progress.missing_pieces -= 1
            progress.error = progress.error or error
            if event is not None:
                progress.events.append(event)
            self._change.notify_all()

    def _start_at(self, index: int) -> None:
        """Give up what was read, and begin to read from another passage on, by its index in the order."""
        with self._change:
            self._change.wait_for(lambda: not any(progress.missing_pieces for progress in self._progress.values()))
            is_interrupted = not all(progress.is_released for progress in self._progress.values())
            if is_interrupted and self.memory.device.type != "cpu":
                torch.accelerator.synchronize(self.memory.device)
            self._progress.clear()
            self._oldest = self._next = index
            self._read_ahead()


class StageWindow:
    """The part of a stage in a ring. It is the gate of the stage; see `GatedWeights`."""

    def __init__(self, window: WeightWindow, first_index: int, use_count: int, passages: Mapping[int, Passage]) -> None:
        window.add(passages)
        self._registered_types = {
            (tensor.dtype, tensor.device) for passage in passages.values() for tensor in passage.registered
        }
        self._window = window
        self._first_index = first_index
        self._use_count = use_count

    def has_arrived(self) -> bool:
        """See `GatedWeights`. The stage must always ask."""
        return False

    def wait(self) -> None:
        """See `GatedWeights`. The weights that stay are there."""

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `GatedWeights`. Weights that pass through keep their dtype and device."""
        for dtype, device in self._registered_types:
            converted = convert(torch.empty(0, dtype=dtype, device=device))
            if (converted.dtype, converted.device) != (dtype, device):
                raise OptionError(
                    f"device_memory: weights that pass through the memory of the device cannot become {converted.dtype} on "
                    f"{converted.device}: load the stage without device_memory, or convert the model before it is exported"
                )

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """See `GatedWeights`."""
        return self._window.run(self._first_index, self._first_index + self._use_count, module, values)

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`."""
        return self._window.acquire(self._first_index + use_index, given_weights)

    def release(self, use_index: int) -> None:
        """See `WeightGate`."""
        self._window.release(self._first_index + use_index)


class GatedWeights(WeightGate, Protocol):
    """The weights of a stage, which its module asks for."""

    def has_arrived(self) -> bool:
        """Whether all weights are in the memory of the device, to stay, so that the stage need not ask any more."""

    def wait(self) -> None:
        """Return when all weights have arrived that will stay in the memory of the device.

        Raises:
            DigestError: a file cannot be read, or differs from the one that the manifest lists.
        """

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Check that all weights can be converted.

        Args:
            convert: returns the tensor that a tensor becomes.

        Raises:
            OptionError: some cannot become what `convert` makes of them.
        """

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """Call the module that asks for its weights."""


class GatedModule(torch.nn.Module):
    """Runs a stage: asks for its weights as long as some of them may be missing, then as any other stage does.

    Attributes:
        gated_module: the graph that asks this object for its weights; set when it is built.
        weights: the weights; set when they are loaded.
    """

    gated_module: GraphModule
    weights: GatedWeights

    def __init__(self, plain_module: GraphModule) -> None:
        super().__init__()
        self.plain_module = plain_module

    def forward(self, *values: Any) -> Any:
        """Run the stage on its inputs and its weights."""
        if self.weights.has_arrived():
            return self.plain_module(*values)
        return self.weights.run(self.gated_module, values)

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`."""
        return self.weights.acquire(use_index, given_weights)

    def release(self, use_index: int) -> None:
        """See `WeightGate`."""
        self.weights.release(use_index)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a copy of the graph, which needs to ask for nothing, when all weights have arrived."""
        self.weights.wait()
        if not self.weights.has_arrived():
            raise TypeError(
                "a stage with device_memory cannot be copied, because its weights share memory: load it again"
            )
        return copy.deepcopy(self.plain_module, memo)
