"""Read and check stages, then read their weights.

- Prepared stages whose weights arrive by threads: before the stage is ready, or while it runs.
- A record of the graphs whose values were compared with what their operators return (SPEC G16). That comparison imports parts of torch
  that a load needs for nothing else, for half a second. It is made once for each content of a graph file, which each load compares with
  its digest, and for all else that its outcome depends on: the version of torch, the default dtype, and the code of the comparison.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from blake3 import blake3

from stagepack.errors import DeviceError, OperatorError
from stagepack.format.bundle_files import FileStream
from stagepack.format.chunks import ByteProgress, File
from stagepack.format.folded_graph import FoldedGraph
from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.validate.files import NamedWeights
from stagepack.format.validate.whole_model import check_whole_model
from stagepack.format.weights import StoredTensor
from stagepack.graph.region_functions import folded_functions
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.devices import ZeroMemory, typed_memory_errors
from stagepack_loaders.torch.module_builder import ModuleCallBody, build_with_modules
from stagepack_loaders.torch.operators import resolve_operators
from stagepack_loaders.torch.stage import StageCode, TorchStage
from stagepack_loaders.torch.value_check import check_values
from stagepack_loaders.torch.weight_gate import WeightUse, build_gated_module, weight_uses
from stagepack_loaders.torch.weight_window import GatedModule
from stagepack_loaders.torch.weights import ArrivingFiles, ArrivingWeight, ArrivingWeights, WeightCache
from stagepack_loaders.verified_files import VerificationRecord
from stagepack_loaders.weight_files import FolderReader

# The folder of the record; empty to keep none.
FOLDER_VARIABLE: Final = "STAGEPACK_CHECKED_GRAPHS"


class CheckedGraphs(VerificationRecord):
    """The record of this user."""

    def __init__(self) -> None:
        super().__init__(FOLDER_VARIABLE, "checked")

    def identity(self, entry: File) -> str:
        """Return the name of the entry of a graph file."""
        conditions = (torch.__version__, torch.get_default_dtype(), _code_digest())
        return blake3(repr((entry.size, entry.blake3, *conditions)).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """The digest of the code that calls operators of torch: another check of the same version of stagepack has other entries."""
    content = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return blake3(content).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTorchStage:
    """A stage that is built, and whose weights are not read yet.

    Attributes:
        code: what it will run.
        stored_tensors: the file and the position of each stored tensor, by name.
        device: the device it will run on.
        cache: the weights read so far, for all stages that are prepared together.
        copy: read the weights into memory, where they would be mapped.
        progress: see `stagepack_loaders.base.PrepareOptions`.
        unchanged: the same.
    """

    bundle: Bundle
    stage_number: int
    code: StageCode
    stored_tensors: Mapping[str, tuple[Path, StoredTensor]]
    device: torch.device
    cache: WeightCache
    copy: bool = False
    progress: ByteProgress | None = None
    unchanged: ByteProgress | None = None

    @property
    def runtime(self) -> str:
        """The name of the runtime."""
        return TorchStage.runtime

    @typed_memory_errors()
    def finish(self, *, verify: bool) -> TorchStage:
        """Read the weights of the stage, and nothing of other stages."""
        stage_entry = self.bundle.stages[self.stage_number]
        # On another device the weights are copies anyway.
        copy = self.copy and self.device.type == "cpu"
        self.cache.open_files(
            self.bundle, stage_entry.weights, verify=verify, copy=copy, progress=self.progress, unchanged=self.unchanged
        )
        tensors = {
            weight.value: self.cache.read(weight, self.stored_tensors, self.device, stage_entry.state)
            for weight in self.code.graph.weights
        }
        return TorchStage(self.code, tensors, self.device, stage_entry.state)


def prepare_stages(
    bundle: Bundle, placement: Mapping[int, torch.device], options: PrepareOptions
) -> dict[int, PreparedTorchStage]:
    """Read and check stages, all but their weights; see `stagepack_loaders.base.Runtime.prepare`.

    Stages on one device will share the tensors that are one tensor in the model.
    """
    cache = options.shared.get(WeightCache, WeightCache)
    named_weights = options.shared.get(NamedWeights, NamedWeights)
    bundle.fetch(bundle.stages[stage_number].graph for stage_number in placement)
    parts_of_stage = {stage_number: read_parts(bundle, stage_number, options) for stage_number in placement}
    codes = {
        stage_number: build_code(bundle, stage_number, parts_of_stage[stage_number], device, options)
        for stage_number, device in placement.items()
    }
    # Only now: a stage that cannot run must not be downloaded first.
    bundle.fetch(file_name for stage_number in placement for file_name in bundle.stages[stage_number].weights)
    return {
        stage_number: PreparedTorchStage(
            bundle=bundle,
            stage_number=stage_number,
            code=stage_code,
            stored_tensors=bundle.tensors(stage_number, stage_code.graph, named_weights=named_weights),
            device=placement[stage_number],
            cache=cache,
            copy=options.copy,
            progress=options.progress,
            unchanged=options.unchanged,
        )
        for stage_number, stage_code in codes.items()
    }


class LoadedModels:
    """The graphs of the stages that are loaded together. Those of all stages of an entry point must be the parts of one model."""

    def __init__(self) -> None:
        self._graphs: dict[str, dict[int, Graph]] = {}

    def add(self, bundle: Bundle, stage_number: int, graph: Graph) -> None:
        """Add a stage; with the last one, check all of them."""
        graphs = self._graphs.setdefault(bundle.identity, {})
        graphs[stage_number] = graph
        if len(graphs) == len(bundle.stages):
            raise_problems(
                check_whole_model(
                    bundle.entry_point, [graph for _, graph in sorted(graphs.items(), key=lambda item: item[0])]
                )
            )


class StageParts(NamedTuple):
    """What the module of a stage is built from. In `folded`, each region is one function for all its calls."""

    folded: FoldedGraph
    graph: Graph
    operators: Sequence[Callable[..., Any]]


def read_parts(bundle: Bundle, stage_number: int, options: PrepareOptions) -> StageParts:
    """Read the graph of a stage, find its operators, and compare the values that it states with what these return."""
    folded, graph = bundle.graph_file(stage_number, module_calls=options.modules)
    options.shared.get(LoadedModels, LoadedModels).add(bundle, stage_number, graph)
    graph_name = bundle.stages[stage_number].graph
    operators = resolve_operators(graph.ops, options.allow_ops, graph_name)
    record = CheckedGraphs()
    identity = record.identity(bundle.files[graph_name]) if bundle.compares_digests else None
    if not record.has(identity):
        check_values(graph, operators, graph_name)
        record.add(identity)
    if options.dense_inputs:
        operators = [_view_as_reshape(operator) for operator in operators]
    if options.autocast:
        operators = [_assert_outside_autocast(operator) for operator in operators]
    return StageParts(folded_functions(folded, graph), graph, operators)


def build_code(
    bundle: Bundle, stage_number: int, parts: StageParts, device: torch.device, options: PrepareOptions
) -> StageCode:
    """Build what a stage runs."""
    stage_entry = bundle.stages[stage_number]
    folded, graph, operators = parts
    options.shared.get(ZeroMemory, ZeroMemory).reserve(graph.weights, device)
    try:
        module_calls: Sequence[ModuleCallBody] = ()
        if options.modules:
            graph_module, module_calls = build_with_modules(
                graph, stage_entry.node_numbers, operators, device, options.types
            )
        else:
            graph_module = build_graph_module(folded, graph, operators, device)
        return StageCode(
            stage_number=stage_number,
            graph=graph,
            guards=bundle.entry_point.guards,
            graph_module=graph_module,
            module_calls=module_calls,
        )
    except (DeviceError, OperatorError) as error:
        raise type(error)(f"{stage_entry.graph}: {error}") from None


def _view_as_reshape(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``view``, which some dense inputs do not allow. Where it is possible, ``reshape`` returns the same view."""
    aten = torch.ops.aten
    return aten.reshape.default if operator is aten.view.default else operator


def _assert_outside_autocast(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict the comparison with recorded dtypes, which `torch.autocast` changes, to calls outside of it."""
    if str(operator) != "aten._assert_tensor_metadata.default":
        return operator

    def assert_metadata(
        a: torch.Tensor,
        size: Any = None,
        stride: Any = None,
        dtype: Any = None,
        *,
        device: Any = None,
        layout: Any = None,
    ) -> None:
        if not torch.is_autocast_enabled(a.device.type):
            operator(a, size, stride, dtype, device=device, layout=layout)

    return assert_metadata


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
