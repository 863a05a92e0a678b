"""Prepared stages whose weights arrive by threads: before the stage is ready, or while it runs."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from stagepack.format.bundle_files import FileStream
from stagepack.format.manifest import File
from stagepack.format.reader import Bundle
from stagepack.format.validate import NamedWeights
from stagepack.format.weights import StoredTensor
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.arriving_files import ArrivingFiles
from stagepack_loaders.torch.arriving_weights import ArrivingWeight, ArrivingWeights
from stagepack_loaders.torch.devices import typed_memory_errors
from stagepack_loaders.torch.gated_module import GatedModule
from stagepack_loaders.torch.prepare import StageParts, build_code, read_parts
from stagepack_loaders.torch.stage import StageCode, TorchStage
from stagepack_loaders.torch.weight_gate import WeightUse, build_gated_module, weight_uses
from stagepack_loaders.weight_files import FolderReader


class Arrivals:
    """The files on their way to each device, and the weights in them.

    Attributes:
        weights: the weights of each device, by their first name.
    """

    def __init__(self, bundle: Bundle, options: PrepareOptions) -> None:
        self._bundle = bundle
        self._reader = options.weight_reader
        self._folder_reader = FolderReader(bundle.path, bundle.source)
        self._progress = options.progress
        self._files: dict[tuple[torch.device, FileStream | None], ArrivingFiles] = {}
        self.weights: defaultdict[torch.device, dict[str, ArrivingWeight]] = defaultdict(dict)

    def stream(self, file_names: Iterable[str]) -> FileStream | None:
        """Begin to download files of a remote bundle; return a handle that reads them. None if they are read from a folder."""
        return None if self._reader is not None else self._bundle.stream(file_names)

    def fetch(self, file_names: Sequence[str]) -> None:
        """Bring files into the folder, and open them: they are read also when another bundle takes the place of this one."""
        self._bundle.fetch(file_names)
        self._folder_reader.hold(file_names)

    def files(self, device: torch.device, stream: FileStream | None, *, verify: bool) -> ArrivingFiles:
        """Return the files on their way to a device."""
        if (device, stream) not in self._files:
            handle = None if stream is None else stream.share()
            files = ArrivingFiles(
                device,
                handle or self._reader or self._folder_reader,
                verify=verify,
                progress=self._progress,
                on_damage=partial(_discard, self._bundle),
            )
            if handle is not None:
                # Before the threads of the files are waited for, which wait for the download.
                weakref.finalize(files, handle.close)
            self._files[device, stream] = files
        return self._files[device, stream]


def _discard(bundle: Bundle, entry: File) -> None:
    """Remove a damaged file from the cache, so that the next load downloads it again."""
    if bundle.source is not None:
        bundle.source.discard([entry])


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTorchStage:
    """A stage that is built, and whose weights threads will read into the memory of its device.

    Attributes:
        code: what it will run. With a `GatedModule` as compiled module, the stage is ready before its weights are.
        uses: the uses of its weights.
        stored_tensors: the file and the position of each stored tensor, by name.
        device: the device it will run on.
        arrivals: the files on their way, for all stages that are prepared together.
        stream: reads the weight files while they are downloaded; None if the folder has them.
    """

    bundle: Bundle
    stage_number: int
    code: StageCode
    uses: list[WeightUse]
    stored_tensors: Mapping[str, tuple[Path, StoredTensor]]
    device: torch.device
    arrivals: Arrivals
    stream: FileStream | None

    @property
    def runtime(self) -> str:
        """The name of the runtime."""
        return TorchStage.runtime

    @typed_memory_errors()
    def finish(self, *, verify: bool) -> TorchStage:
        """Begin to read the weights. Returns when all are there, or, with a `GatedModule`, the buffers that calls write."""
        stage_entry = self.bundle.stages[self.stage_number]
        arriving_files = self.arrivals.files(self.device, self.stream, verify=verify)
        files = arriving_files.add(self.bundle.files[file_name] for file_name in stage_entry.weights)
        known_weights = self.arrivals.weights[self.device]
        for weight in self.code.graph.weights:
            if weight.names[0] not in known_weights:
                known_weights[weight.names[0]] = ArrivingWeight(weight, self.stored_tensors, files, self.device)
        weights = ArrivingWeights(
            self.code.graph,
            self.uses,
            [known_weights[weight.names[0]] for weight in self.code.graph.weights],
            list(files.values()),
            arriving_files,
        )
        if isinstance(self.code.compiled_module, GatedModule):
            state_names = stage_entry.state
            weights.wait([weight.value for weight in self.code.graph.weights if weight.names[0] in state_names])
            self.code.compiled_module.weights = weights
        else:
            weights.wait()
        return TorchStage(self.code, weights.tensors, self.device, stage_entry.state)


def prepare_streamed_stages(
    bundle: Bundle, placement: Mapping[int, torch.device], options: PrepareOptions
) -> dict[int, StreamedTorchStage]:
    """Read and check stages, all but their weights; with ``options.stream`` these will arrive while the stages run."""
    arrivals = options.shared.get(Arrivals, lambda: Arrivals(bundle, options))
    named_weights = options.shared.get(NamedWeights, NamedWeights)
    bundle.fetch(bundle.stages[stage_number].graph for stage_number in placement)
    parts_of_stage = {stage_number: read_parts(bundle, stage_number, options) for stage_number in placement}
    codes = {
        stage_number: build_code(bundle, stage_number, parts_of_stage[stage_number], device, options)
        for stage_number, device in placement.items()
    }
    weight_files = [file_name for stage_number in placement for file_name in bundle.stages[stage_number].weights]
    stream = arrivals.stream(weight_files) if options.stream and placement else None
    if stream is None:
        arrivals.fetch(weight_files)
    prepared_stages = {}
    for stage_number, device in placement.items():
        parts, code = parts_of_stage[stage_number], codes[stage_number]
        uses = weight_uses(parts.folded, parts.graph) if options.stream else []
        prepared_stages[stage_number] = StreamedTorchStage(
            bundle=bundle,
            stage_number=stage_number,
            code=gate_code(code, parts, device, uses) if options.stream else code,
            uses=uses,
            stored_tensors=bundle.tensors(stage_number, parts.graph, stream, named_weights),
            device=device,
            arrivals=arrivals,
            stream=stream,
        )
    return prepared_stages


def gate_code(code: StageCode, parts: StageParts, device: torch.device, uses: Sequence[WeightUse]) -> StageCode:
    """Return the code of a stage with a `GatedModule`, which asks for each weight at its first use."""
    module = GatedModule(code.graph_module)
    module.gated_module = build_gated_module(parts.folded, parts.graph, parts.operators, device, module, uses)
    return replace(code, compiled_module=module)
