"""Stages whose weights do not all fit into the memory of their device: some stay, the others pass through it in each call."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stagepack.errors import DigestError, Problem
from stagepack.format.aliasing import AliasClasses, alias_classes
from stagepack.format.chunks import ByteProgress
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack.format.validate.files import NamedWeights
from stagepack.format.weights import StoredTensor
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.devices import typed_memory_errors
from stagepack_loaders.torch.prepare import build_code, gate_code, read_parts
from stagepack_loaders.torch.stage import StageCode, TorchStage
from stagepack_loaders.torch.weight_gate import WeightUse, weight_uses
from stagepack_loaders.torch.weight_transfer import ByteRange
from stagepack_loaders.torch.weight_window import GatedModule, Passage, StageWindow, TensorLayout, WeightWindow
from stagepack_loaders.torch.weights import WeightCache, as_weight, lay_out
from stagepack_loaders.weight_files import FolderReader
from stagepack_loaders.window_plan import (
    PLACE_ALIGNMENT,
    PlannedUse,
    Residency,
    WindowPlan,
    joined_uses,
    place_bytes,
    plan_window,
)

_LOGGER = logging.getLogger("stagepack")

# The file and the position in it of each stored tensor, by name.
StoredTensors = Mapping[str, tuple[Path, StoredTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DevicePlan:
    """The plan of the stages on one device.

    Attributes:
        plan: where their weights are; the uses of all of them are one after the other.
        window: the ring; None if all weights stay.
    """

    plan: WindowPlan
    window: WeightWindow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTorchStage:
    """A stage that is built, with a plan for its weights, which are not read yet.

    Attributes:
        parts: what it will run, and its uses.
        device_plan: the plan of all stages on its device.
        first_index: the index of its first use in that plan.
        device: the device it will run on.
        cache: the weights read so far, for all stages that are prepared together.
        folder_reader: what reads the weights that pass through.
        progress: see `stagepack_loaders.base.PrepareOptions`.
    """

    bundle: Bundle
    stage_number: int
    parts: "_StageUses"
    device_plan: _DevicePlan
    first_index: int
    device: torch.device
    cache: WeightCache
    folder_reader: FolderReader
    progress: ByteProgress | None = None

    @property
    def runtime(self) -> str:
        """The name of the runtime."""
        return TorchStage.runtime

    @property
    def residency(self) -> Residency:
        """Which weights stay."""
        uses = self.parts.planned_uses
        streamed_bytes = sum(
            use.byte_count for use, position in zip(uses, self._positions, strict=True) if position is not None
        )
        return Residency(
            resident_bytes=sum(use.byte_count for use in uses) - streamed_bytes,
            streamed_bytes=streamed_bytes,
            window_bytes=self.device_plan.plan.window_bytes,
        )

    @property
    def _positions(self) -> Sequence[int | None]:
        return self.device_plan.plan.positions[self.first_index : self.first_index + len(self.parts.uses)]

    @typed_memory_errors()
    def finish(self, *, verify: bool) -> TorchStage:
        """Read the weights that stay, and begin to read those that the first call needs.

        Weights that pass through are registered in the stage as tensors on their mapped file.
        """
        stage_entry = self.bundle.stages[self.stage_number]
        # What passes through must come from the files that are mapped and verified.
        self.folder_reader.hold(stage_entry.weights)
        self.cache.open_files(self.bundle, stage_entry.weights, verify=verify, progress=self.progress)
        replaced = self.folder_reader.hold(stage_entry.weights)
        if replaced and self.bundle.source is None:
            message = "the file was replaced while it was loaded: load the bundle again"
            raise DigestError([Problem(rule="D1", where=file_name, message=message) for file_name in replaced])
        code, residency = self.parts.code, self.residency
        _LOGGER.info("stage %d on %s: %s", self.stage_number, self.device, residency)
        streamed_weights = {
            weight_index
            for use, position in zip(self.parts.uses, self._positions, strict=True)
            if position is not None
            for weight_index in use.weights
        }
        tensors = {
            weight.value: self.cache.read(
                weight,
                self.parts.stored_tensors,
                torch.device("cpu") if index in streamed_weights else self.device,
                stage_entry.state,
            )
            for index, weight in enumerate(code.graph.weights)
        }
        window = self.device_plan.window
        if window is None or not streamed_weights:
            code = replace(code, compiled_module=None)
        else:
            assert isinstance(code.compiled_module, GatedModule)
            code.compiled_module.weights = StageWindow(
                window, self.first_index, len(self.parts.uses), self._passages(window, tensors)
            )
        return TorchStage(code, tensors, self.device, stage_entry.state, residency)

    def _passages(self, window: WeightWindow, registered: Mapping[str, torch.Tensor]) -> dict[int, Passage]:
        return {
            self.first_index + use_index: self.parts.passage(
                use_index,
                position,
                window.memory,
                position % self.device_plan.plan.window_bytes,
                [self.cache.mapped_bytes(source) for source in self.parts.sources[use_index]],
                registered,
            )
            for use_index, position in enumerate(self._positions)
            if position is not None
        }


@typed_memory_errors()
def prepare_planned_stages(
    bundle: Bundle, placement: Mapping[int, torch.device], options: PrepareOptions
) -> dict[int, PlannedTorchStage]:
    """Read and check stages, all but their weights, and plan which weights stay in the memory of their device."""
    assert options.device_memory is not None
    cache, folder_reader = WeightCache(), FolderReader(bundle.path, bundle.source)
    stage_uses = {
        stage_number: _read_uses(bundle, stage_number, device, options) for stage_number, device in placement.items()
    }
    reader = options.weight_reader or folder_reader
    prepared_stages = {}
    for device in dict.fromkeys(placement.values()):
        stage_numbers = [stage_number for stage_number in placement if placement[stage_number] == device]
        plan = plan_window(
            joined_uses([stage_uses[stage_number].planned_uses for stage_number in stage_numbers]),
            options.device_memory,
        )
        device_plan = _DevicePlan(plan=plan, window=WeightWindow(plan, device, reader) if plan.window_bytes else None)
        first_index = 0
        for stage_number in stage_numbers:
            prepared_stages[stage_number] = PlannedTorchStage(
                bundle=bundle,
                stage_number=stage_number,
                parts=stage_uses[stage_number],
                device_plan=device_plan,
                first_index=first_index,
                device=device,
                cache=cache,
                folder_reader=folder_reader,
                progress=options.progress,
            )
            first_index += len(stage_uses[stage_number].uses)
    return prepared_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageUses:
    """What a stage runs, and how it uses its weights.

    Attributes:
        code: what it runs, with a `GatedModule` as compiled module.
        uses: the uses of its weights.
        planned_uses: the same, as they are planned.
        sources: for each use, the ranges of the weight files that hold its weights.
        stored_tensors: the file and the position of each stored tensor, by name.
    """

    code: StageCode
    uses: Sequence[WeightUse]
    planned_uses: Sequence[PlannedUse]
    sources: Sequence[Sequence[ByteRange]]
    stored_tensors: StoredTensors

    def passage(
        self,
        use_index: int,
        position: int,
        memory: torch.Tensor,
        offset: int,
        mapped: Sequence[torch.Tensor],
        registered: Mapping[str, torch.Tensor],
    ) -> Passage:
        """Return the weights of a use on their way through a ring.

        mapped: the bytes of each range of the weight files that holds them.
        """
        shift_of_source = {}
        for source in self.sources[use_index]:
            shift_of_source[source] = offset - source.start
            offset += place_bytes(source.end - source.start)
        weights = [self.code.graph.weights[index] for index in self.uses[use_index].weights]
        tensors = []
        for weight in weights:
            path, stored = self.stored_tensors[weight.stored]
            [shift] = [
                shift
                for source, shift in shift_of_source.items()
                if source.file_name == path.name and source.start <= stored.start and stored.end <= source.end
            ]
            # Kernels are chosen by `requires_grad` too, so it is that of the weight.
            tensors.append(as_weight(weight, lay_out(weight, memory[stored.start + shift : stored.end + shift])))
        registered_tensors = tuple(registered[weight.value] for weight in weights)
        return Passage(
            position,
            self.sources[use_index],
            mapped,
            tuple(tensors),
            registered_tensors,
            tuple(map(TensorLayout.of, registered_tensors)),
        )


def _read_uses(bundle: Bundle, stage_number: int, device: torch.device, options: PrepareOptions) -> _StageUses:
    parts = read_parts(bundle, stage_number, options)
    uses = weight_uses(parts.folded, parts.graph)
    named_weights = options.shared.get(NamedWeights, NamedWeights)
    stored_tensors = bundle.tensors(stage_number, parts.graph, named_weights=named_weights)
    sources = [_sources(use, parts.graph, stored_tensors, bundle) for use in uses]
    classes = alias_classes(parts.graph)
    code = build_code(bundle, stage_number, parts, device, options)
    return _StageUses(
        code=gate_code(code, parts, device, uses),
        uses=uses,
        planned_uses=[
            _planned_use(use, parts.graph, classes, use_sources, bundle.stages[stage_number].state)
            for use, use_sources in zip(uses, sources, strict=True)
        ],
        sources=sources,
        stored_tensors=stored_tensors,
    )


def _sources(use: WeightUse, graph: Graph, stored_tensors: StoredTensors, bundle: Bundle) -> list[ByteRange]:
    """The ranges of the weight files that hold the weights of a use, extended to where direct reads can begin and end."""
    stored_places = sorted(
        {
            (path.name, stored.start, stored.end)
            for weight_index in use.weights
            for path, stored in [_stored(graph, weight_index, stored_tensors)]
            if stored is not None
        }
    )
    sources: list[ByteRange] = []
    for file_name, tensor_start, tensor_end in stored_places:
        start = tensor_start // PLACE_ALIGNMENT * PLACE_ALIGNMENT
        end = min(place_bytes(tensor_end), bundle.files[file_name].size)
        if sources and sources[-1].file_name == file_name and start <= sources[-1].end:
            sources[-1] = ByteRange(file_name, sources[-1].start, max(end, sources[-1].end))
        else:
            sources.append(ByteRange(file_name, start, end))
    return sources


def _stored(graph: Graph, weight_index: int, stored_tensors: StoredTensors) -> tuple[Path, StoredTensor | None]:
    weight = graph.weights[weight_index]
    return (Path(), None) if weight.zeros else stored_tensors[weight.stored]


def _planned_use(
    use: WeightUse, graph: Graph, classes: AliasClasses, sources: Sequence[ByteRange], state: Sequence[str]
) -> PlannedUse:
    weights = [graph.weights[index] for index in use.weights]
    zero_bytes = 0
    for weight in weights:
        if weight.zeros:
            zero_bytes += int(torch.Size(weight.shape).numel()) * ITEM_SIZE[weight.dtype]
    must_stay = any(
        weight.zeros
        or (weight.strides is not None and weight.base is None)  # it is not laid out as in the file
        or not set(state).isdisjoint(weight.names)
        or classes.is_written(weight.value)
        or classes.representative(weight.value) in map(classes.representative, graph.outputs)
        for weight in weights
    )
    byte_count = sum(place_bytes(source.end - source.start) for source in sources) + zero_bytes
    return PlannedUse(byte_count=byte_count, first_step=use.first_step, last_step=use.last_step, must_stay=must_stay)
