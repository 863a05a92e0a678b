"""Stages whose weights do not all fit into the memory of their device: some stay, the others pass through it in each call.

They pass through a ring, in the order of their use; see `stagepack_loaders.window_plan`.
"""

import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.fx import GraphModule

from stagepack.errors import OptionError, Problem, StagepackError, repeated_error
from stagepack.format.aliasing import alias_classes
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.rules import raise_problems
from stagepack_loaders.file_leases import written_pages
from stagepack_loaders.torch.weight_gate import WeightGate
from stagepack_loaders.torch.weight_store import (
    LoadedWeights,
    StageWeights,
    WeightCache,
    as_weight,
    is_rearranged,
    lay_out,
)
from stagepack_loaders.torch.weight_transfer import ByteRange, Transfers, current_event, empty_bytes
from stagepack_loaders.weight_files import FolderReader, ReadInto
from stagepack_loaders.window_plan import PLACE_ALIGNMENT, WeightUse, WindowPlan, joined_uses, place_bytes, plan_window

_LOGGER = logging.getLogger("stagepack")
_PIECE_BYTES: Final = 8 * 2**20


class _PlannedStage(NamedTuple):
    """The uses of a stage, for each the ranges of the weight files that hold its weights, and the index of the first use in the plan."""

    uses: Sequence[WeightUse]
    sources: Sequence[Sequence[ByteRange]]
    first_index: int

    @property
    def end_index(self) -> int:
        """The index after the index of the last use."""
        return self.first_index + len(self.uses)


class WindowStore:
    """A `WeightStore` of the stages on one device, whose weights have at most `device_memory` bytes there."""

    def __init__(self, stages: Mapping[int, StageWeights], cache: WeightCache, folder_reader: FolderReader) -> None:
        self._cache = cache
        self._folder_reader = folder_reader
        self._stages: dict[int, _PlannedStage] = {}
        first_index = 0
        for stage_number, stage in stages.items():
            sources = [_sources(use, stage) for use in stage.uses]
            self._stages[stage_number] = _PlannedStage(_planned_uses(stage, sources), sources, first_index)
            first_index += len(stage.uses)
        [memory_bytes] = {stage.loading.options.device_memory for stage in stages.values()}
        [device] = {stage.device for stage in stages.values()}
        assert isinstance(memory_bytes, int)
        self._plan = plan_window(joined_uses([planned.uses for planned in self._stages.values()]), memory_bytes)
        self._window = WeightWindow(self._plan, device, folder_reader.read_into) if self._plan.window_bytes else None

    def has_gate(self, stage: StageWeights) -> bool:
        """See `WeightStore`: whether weights of the stage pass through."""
        return any(position is not None for position in self._positions(stage.stage_number))

    def _positions(self, stage_number: int) -> Sequence[int | None]:
        planned = self._stages[stage_number]
        return self._plan.positions[planned.first_index : planned.end_index]

    def open(self, stages: Sequence[StageWeights], *, verify: bool) -> None:
        """See `WeightStore`."""
        # What passes through must come from the files that are mapped and verified.
        file_names = [file_name for stage in stages for file_name in stage.file_names]
        self._folder_reader.hold(file_names)
        self._cache.open(stages, verify=verify)
        replaced = self._folder_reader.hold(file_names)
        if replaced and stages[0].bundle.source is None:
            message = "the file was replaced while it was loaded: load the bundle again"
            raise_problems(Problem(rule="D1", where=file_name, message=message) for file_name in replaced)

    def load(self, stage: StageWeights, *, verify: bool) -> LoadedWeights:
        """See `WeightStore`. Weights that pass through are registered in the stage as tensors on their mapped file."""
        self.open([stage], verify=verify)
        planned, positions = self._stages[stage.stage_number], self._positions(stage.stage_number)
        residency = self._plan.residency(planned.uses, planned.first_index)
        _LOGGER.info("stage %d on %s: %s", stage.stage_number, stage.device, residency)
        passing_indices = {
            weight_index
            for use, position in zip(stage.uses, positions, strict=True)
            if position is not None
            for weight_index in use.weights
        }
        tensors = {
            weight.value: self._cache.read_of(
                stage, weight, torch.device("cpu") if index in passing_indices else stage.device
            )
            for index, weight in enumerate(stage.graph.weights)
        }
        if not passing_indices:
            return LoadedWeights(tensors, residency=residency)
        assert self._window is not None
        passages = {
            planned.first_index + use_index: self._passage(stage, use_index, position, tensors)
            for use_index, position in enumerate(positions)
            if position is not None
        }
        return LoadedWeights(tensors, _StageWindow(self._window, planned, passages), residency)

    def _passage(
        self, stage: StageWeights, use_index: int, position: int, registered: Mapping[str, torch.Tensor]
    ) -> "_Passage":
        assert self._window is not None
        sources = self._stages[stage.stage_number].sources[use_index]
        offset = position % self._plan.window_bytes
        shift_of_source = {}
        for source in sources:
            shift_of_source[source] = offset - source.start
            offset += place_bytes(source.end - source.start)
        weights = [stage.graph.weights[index] for index in stage.uses[use_index].weights]
        tensors = []
        for weight in weights:
            path, stored = stage.stored_tensors[weight.stored]
            [shift] = [
                shift
                for source, shift in shift_of_source.items()
                if source.file_name == path.name and source.start <= stored.start and stored.end <= source.end
            ]
            # Kernels are chosen by `requires_grad` too, so the flag is taken from the weight.
            place = self._window.memory[stored.start + shift : stored.end + shift]
            tensors.append(as_weight(weight, lay_out(weight, place)))
        registered_tensors = [registered[weight.value] for weight in weights]
        return _Passage(
            position=position,
            sources=sources,
            mapped=[self._cache.mapped_bytes(source) for source in sources],
            tensors=tensors,
            registered=registered_tensors,
            layouts=[_layout(tensor) for tensor in registered_tensors],
        )


def _sources(use: WeightUse, stage: StageWeights) -> list[ByteRange]:
    """The ranges of the weight files that hold the weights of a use, extended to where direct reads can begin and end."""
    weights = [stage.graph.weights[index] for index in use.weights]
    stored_places = {stage.stored_tensors[weight.stored] for weight in weights if not weight.zeros}
    sources: list[ByteRange] = []
    for file_name, tensor_start, tensor_end in sorted(
        (path.name, stored.start, stored.end) for path, stored in stored_places
    ):
        start = tensor_start // PLACE_ALIGNMENT * PLACE_ALIGNMENT
        end = min(place_bytes(tensor_end), stage.bundle.files[file_name].size)
        if sources and sources[-1].file_name == file_name and start <= sources[-1].end:
            sources[-1] = ByteRange(file_name, sources[-1].start, max(end, sources[-1].end))
        else:
            sources.append(ByteRange(file_name, start, end))
    return sources


def _planned_uses(stage: StageWeights, sources_of_uses: Sequence[Sequence[ByteRange]]) -> list[WeightUse]:
    """The uses of a stage with their sizes, and whether they must stay."""
    classes = alias_classes(stage.graph)
    output_classes = {classes.representative(value_name) for value_name in stage.graph.outputs}
    planned = []
    for use, sources in zip(stage.uses, sources_of_uses, strict=True):
        weights = [stage.graph.weights[index] for index in use.weights]
        zero_bytes = sum(math.prod(weight.shape) * ITEM_SIZE[weight.dtype] for weight in weights if weight.zeros)
        must_stay = use.must_stay or any(
            weight.zeros
            or is_rearranged(weight)
            or stage.is_state(weight)
            or classes.is_written(weight.value)
            or classes.representative(weight.value) in output_classes
            for weight in weights
        )
        byte_count = use.byte_count + sum(place_bytes(source.end - source.start) for source in sources) + zero_bytes
        planned.append(replace(use, byte_count=byte_count, must_stay=must_stay))
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
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
    tensors: Sequence[torch.Tensor]
    registered: Sequence[torch.Tensor]
    layouts: Sequence[tuple[object, ...]]

    @property
    def byte_count(self) -> int:
        """The size of their place: each range begins on a multiple of the alignment."""
        return sum(place_bytes(source.end - source.start) for source in self.sources)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """The memory of a tensor, and how it is laid out there."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@dataclass(slots=True)
class _Progress:
    """How far the bytes of a passage are in this call."""

    missing_pieces: int
    events: list[Any] = field(default_factory=list)
    error: StagepackError | None = None
    is_released: bool = False


class WeightWindow:
    """The ring of the stages on one device, and the threads that fill it.

    The weights of the stage that usually comes next are read ahead, of the first stage after the last one.
    """

    def __init__(self, plan: WindowPlan, device: torch.device, read_into: ReadInto) -> None:
        self.memory = empty_bytes(plan.window_bytes, device)
        self._order = [index for index, position in enumerate(plan.positions) if position is not None]
        self._passages: dict[int, _Passage] = {}
        self._transfers = Transfers(device, read_into)
        self._call = threading.Lock()
        self._change = threading.Condition()
        self._progress: dict[int, _Progress] = {}
        # Indices in the order: of the oldest passage that is not released, and of the next one to be read.
        self._oldest, self._next = 0, 0
        self._released_event = current_event(device)

    def add(self, passages: Mapping[int, _Passage]) -> None:
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
            tensor if given is registered and _layout(given) == layout else given.to(self.memory.device)
            for tensor, given, registered, layout in zip(
                passage.tensors, given_weights, passage.registered, passage.layouts, strict=True
            )
        )

    def _bring_writes(self, passage: _Passage, read_error: StagepackError | None) -> None:
        """Copy what the user has written into the weights of a passage to their place, and what is no longer that of the file."""
        # After the file was read: if it was changed meanwhile, the mapping was replaced before.
        written = [bool(written_pages(mapped.data_ptr(), len(mapped)).any()) for mapped in passage.mapped]
        if read_error is not None and not all(written):
            raise repeated_error(read_error)
        offset = passage.position % len(self.memory)
        for mapped, is_written in zip(passage.mapped, written, strict=True):
            if is_written:
                self.memory[offset : offset + len(mapped)].copy_(mapped)
            offset += place_bytes(len(mapped))

    def release(self, use_index: int) -> None:
        """Let later weights have the place of the weights of a use."""
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
            if passage.position + passage.byte_count - oldest.position > len(self.memory):
                return
            self._read(self._order[self._next], passage)
            self._next += 1

    def _read(self, use_index: int, passage: _Passage) -> None:
        pieces = []
        source_offset = passage.position % len(self.memory)
        for source in passage.sources:
            for start in range(source.start, source.end, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, source.end)
                offset = source_offset + start - source.start
                pieces.append((ByteRange(source.file_name, start, end), self.memory[offset : offset + end - start]))
            source_offset += place_bytes(source.end - source.start)
        progress = self._progress[use_index] = _Progress(len(pieces))
        for source, memory in pieces:
            self._transfers.submit(source, memory, self._released_event, partial(self._take_piece, progress))

    def _take_piece(self, progress: _Progress, event: Any, error: StagepackError | None) -> None:
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


class _StageWindow(WeightGate):
    """The part of a stage in a ring."""

    def __init__(self, window: WeightWindow, planned: _PlannedStage, passages: Mapping[int, _Passage]) -> None:
        window.add(passages)
        self._registered_types = {
            (tensor.dtype, tensor.device) for passage in passages.values() for tensor in passage.registered
        }
        self._window = window
        self._planned = planned

    def has_arrived(self) -> bool:
        """See `WeightGate`. The stage must always ask."""
        return False

    def wait(self) -> None:
        """See `WeightGate`. The weights that stay are there."""

    def check_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `WeightGate`. Weights that pass through keep their dtype and device."""
        for dtype, device in self._registered_types:
            converted = convert(torch.empty(0, dtype=dtype, device=device))
            if (converted.dtype, converted.device) != (dtype, device):
                raise OptionError(
                    f"device_memory: weights that pass through the memory of the device cannot become {converted.dtype} on "
                    f"{converted.device}: load the stage without device_memory, or convert the model before it is exported"
                )

    def run(self, module: GraphModule, values: tuple[Any, ...]) -> Any:
        """See `WeightGate`."""
        return self._window.run(self._planned.first_index, self._planned.end_index, module, values)

    def acquire(self, use_index: int, given_weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `WeightGate`."""
        return self._window.acquire(self._planned.first_index + use_index, given_weights)

    def release(self, use_index: int) -> None:
        """See `WeightGate`."""
        self._window.release(self._planned.first_index + use_index)
