"""Read and check stages, then read their weights; or move those that are loaded.

That the values of a graph are what its operators return (SPEC G16) is compared once for each content of a graph file, which each load
compares with its digest, and for all else that the outcome depends on: the version of torch, the default dtype, and the code of the
comparison. It imports parts of torch that a load needs for nothing else, for half a second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from blake3 import blake3
from msgspec import structs

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import AdapterError, DeviceError, OperatorError
from stagepack.format.chunks import File
from stagepack.format.graph import FoldedGraph, Graph
from stagepack.format.operators import needed_permissions
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.validate.files import NamedWeights
from stagepack.format.validate.whole_model import check_whole_model
from stagepack.graph.region_functions import folded_functions
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.base import Loading, SharedObjects
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.torch.build import StageParts, build_graph_module
from stagepack_loaders.torch.devices import ZeroMemory, typed_memory_errors
from stagepack_loaders.torch.module_builder import ModuleBuilder, ModuleCallBody
from stagepack_loaders.torch.resolved_operators import require_kernels, resolve_operators
from stagepack_loaders.torch.stage import StageCode, TorchStage
from stagepack_loaders.torch.stage_memory import tensor_mover
from stagepack_loaders.torch.value_check import check_graph_values
from stagepack_loaders.torch.weight_gate import GatedModule
from stagepack_loaders.torch.weight_store import ArrivingStore, StageWeights, WeightCache, WeightStore, written_buffers
from stagepack_loaders.torch.weight_window import WindowStore
from stagepack_loaders.weight_files import FolderReader, VerificationRecord
from stagepack_loaders.window_plan import WeightUse, weight_uses

if TYPE_CHECKING:
    from stagepack_loaders.torch.adapter_module import AdapterModule

# The folder of the record of checked graphs; empty to keep none.
CHECKED_GRAPHS_VARIABLE: Final = "STAGEPACK_CHECKED_GRAPHS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTorchStage:
    """A stage that is built, and whose weights are not read yet.

    Attributes:
        code: what it will run. With a `GatedModule` as compiled module, it asks for its weights.
        weights: the weights that it needs.
        store: brings them.
    """

    code: StageCode
    weights: StageWeights
    store: WeightStore

    @property
    def runtime(self) -> str:
        """The name of the runtime."""
        return TorchStage.runtime

    @typed_memory_errors()
    def finish(self, *, verify: bool) -> TorchStage:
        """Read the weights of the stage, and nothing of other stages; see `stagepack_loaders.base.PreparedStage`.

        A stage that asks for its weights is ready before they are there.
        """
        loaded = self.store.load(self.weights, verify=verify)
        bundle = self.weights.bundle
        if self.code.gated is not None:
            assert loaded.gate is not None
            self.code.gated.gate = loaded.gate
        if self.code.adapted is not None and isinstance(bundle, AdaptedBundle):
            self.code.adapted.load(bundle, verify=verify)
        state_names = bundle.stages[self.code.stage_number].state
        return TorchStage(
            self.code,
            loaded.tensors,
            self.weights.device,
            state_names,
            loaded.residency,
            written_buffers=written_buffers(bundle),
        )


@typed_memory_errors()
def prepare_stages(
    bundle: Bundle, placement: Mapping[int, torch.device], loading: Loading
) -> dict[int, PreparedTorchStage]:
    """Read and check stages, all but their weights; see `stagepack_loaders.base.Runtime.prepare`.

    Stages on one device will share the tensors that are one tensor in the model.
    """
    options = loading.options
    bundle.fetch(file_name for stage_number in placement for file_name in bundle.stages[stage_number].graph_files)
    parts = {stage_number: read_parts(bundle, stage_number, loading) for stage_number in placement}
    codes = {
        stage_number: build_code(bundle, stage_number, parts[stage_number], device, loading)
        for stage_number, device in placement.items()
    }
    # Only now: a stage that cannot run must not be downloaded first.
    weight_files = [file_name for stage_number in placement for file_name in bundle.stages[stage_number].weights]
    stream = bundle.stream(weight_files) if options.stream and placement else None
    if stream is None:
        bundle.fetch(weight_files)
    uncopied = replace(loading, options=structs.replace(options, copy=False))
    named_weights = loading.shared.get(NamedWeights, NamedWeights)
    weights = {
        stage_number: StageWeights(
            bundle=bundle,
            stage_number=stage_number,
            graph=graph,
            stored_tensors=bundle.tensors(stage_number, graph, stream, named_weights),
            device=placement[stage_number],
            # On another device than the CPU the weights are copies anyway.
            loading=loading if placement[stage_number].type == "cpu" else uncopied,
            uses=_weight_uses(bundle, folded, graph, options) if options.arriving is not None else (),
            stream=stream,
        )
        for stage_number, (folded, graph, _) in parts.items()
    }
    prepared_stages = {}
    for device in dict.fromkeys(placement.values()):
        device_weights = {stage_number: stage for stage_number, stage in weights.items() if stage.device == device}
        store = _choose_store(device, device_weights, loading)
        for stage_number, stage in device_weights.items():
            code, gated = codes[stage_number], None
            if store.has_gate(stage):
                gated = GatedModule(code.graph_module, parts[stage_number], device, stage.uses)
                code = replace(code, compiled_module=gated)
            if isinstance(bundle, AdaptedBundle):
                module = _adapter_module(bundle, code, gated, parts[stage_number], stage)
                code = replace(code, compiled_module=module)
            prepared_stages[stage_number] = PreparedTorchStage(code=code, weights=stage, store=store)
    return prepared_stages


@typed_memory_errors()
def finish_prepared_stages(stages: Mapping[int, PreparedTorchStage], *, verify: bool) -> dict[int, TorchStage]:
    """Read the weights of stages that were prepared together; see `stagepack_loaders.base.Runtime.finish_prepared_stages`."""
    # All at once: a file of one chunk is hashed by one thread.
    for device in dict.fromkeys(stage.weights.device for stage in stages.values()):
        on_device = [stage for stage in stages.values() if stage.weights.device == device]
        on_device[0].store.open([stage.weights for stage in on_device], verify=verify)
    return {stage_number: stage.finish(verify=verify) for stage_number, stage in stages.items()}


@typed_memory_errors()
def adapt_stages(bundle: Bundle, running: Mapping[int, TorchStage], loading: Loading) -> dict[int, TorchStage]:
    """Return stages with the adapters of a bundle, and the weights of others; see `stagepack_loaders.base.Runtime.adapt_stages`."""
    assert isinstance(bundle, AdaptedBundle)
    if loading.options.device_memory is not None:
        raise AdapterError(
            f"{bundle.location}: device_memory was divided for the adapters that the pipeline was loaded with: load it again with others"
        )
    adapted = {}
    for stage_number, stage in running.items():
        assert stage.code.adapted is not None
        module = stage.code.adapted.with_adapters(bundle, verify=loading.options.verifies_weights)
        adapters = AdapterCalls(bundle, [value.name for value in stage.code.graph.inputs])
        adapted[stage_number] = stage.with_code(replace(stage.code, adapters=adapters, compiled_module=module))
    return adapted


def _choose_store(device: torch.device, stages: Mapping[int, StageWeights], loading: Loading) -> WeightStore:
    """The store of the stages on a device. The CPU maps weight files; threads copy them into the memory of a GPU and hash them."""
    bundle = next(iter(stages.values())).bundle
    options, cache = loading.options, loading.shared.get(WeightCache, WeightCache)
    folder_reader = loading.shared.get(FolderReader, lambda: FolderReader(bundle.path, bundle.patches))
    if options.device_memory is not None:
        return WindowStore(stages, cache, folder_reader)
    if not options.stream and device.type != "cuda":
        return cache
    for stage in stages.values():
        if stage.stream is None:
            # The open files are read also when another bundle takes the place of this one.
            folder_reader.hold(stage.file_names)
    return loading.shared.get(ArrivingStore, lambda: ArrivingStore(folder_reader))


class _CheckedGraphs(VerificationRecord):
    """The record of checked graphs."""

    def __init__(self) -> None:
        super().__init__(CHECKED_GRAPHS_VARIABLE, "checked")


class LoadedModels:
    """The graphs of the stages that are loaded together. The graphs of all stages of an entry point must be the parts of one model."""

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


def read_parts(bundle: Bundle, stage_number: int, loading: Loading) -> StageParts:
    """Read the graph of a stage, find its operators, and compare the values that it states with what these return."""
    stored, module_calls = bundle.stored, loading.options.modules
    folded, graph = bundle.graph_file(stage_number, module_calls=module_calls)
    for number in bundle.stored_stages(stage_number):
        stored_graph = graph if stored is bundle else stored.graph_file(number, module_calls=module_calls).graph
        _check_stored_graph(stored, number, stored_graph, loading)
    operators = _operators(graph, loading, bundle.stages[stage_number].graph)
    # The regions of joined stages are runs of nodes that were compared, and no texts of a file.
    is_outlined = len(bundle.stored_stages(stage_number)) > 1
    return StageParts(folded if is_outlined else folded_functions(folded, graph), graph, operators)


def _operators(graph: Graph, loading: Loading, graph_name: str) -> list[Callable[..., Any]]:
    """Find the operators of a graph."""
    operators = list(resolve_operators(graph.ops, loading.options.allow_ops, graph_name))
    if loading.dense_inputs:
        operators = [_view_as_reshape(operator) for operator in operators]
    if loading.autocast:
        operators = [_assert_outside_autocast(operator) for operator in operators]
    return operators


def _weight_uses(bundle: Bundle, folded: FoldedGraph, graph: Graph, options: LoadOptions) -> list[WeightUse]:
    """The uses of the weights of a stage; adapters take a part of `device_memory`."""
    uses = weight_uses(folded, graph)
    if isinstance(bundle, AdaptedBundle) and options.device_memory is not None:
        from stagepack_loaders.torch.adapter_forms import adapter_use  # noqa: PLC0415 - for stages with adapters alone

        uses.append(adapter_use(bundle, folded, graph))
    return uses


def _adapter_module(
    bundle: AdaptedBundle, code: StageCode, gated: GatedModule | None, parts: StageParts, weights: StageWeights
) -> "AdapterModule":
    """The module of a stage that runs with adapters. Their tensors are not read yet."""
    from stagepack_loaders.torch.adapter_forms import FormBuilder  # noqa: PLC0415 - 10 ms, for stages with adapters alone
    from stagepack_loaders.torch.adapter_module import AdapterModule  # noqa: PLC0415 - the same

    # Later versions run this code, too: what was shared at loading has the weights of the first one.
    loading, graph_name = replace(weights.loading, shared=SharedObjects()), bundle.stages[code.stage_number].graph
    builder = FormBuilder(
        find_operators=lambda graph: _operators(graph, loading, graph_name),
        device=weights.device,
        has_regions=loading.options.compile in (True, "regions"),
        gated=gated,
        folded=parts.folded,
        graph=code.graph,
        uses=weights.uses,
    )
    return AdapterModule(
        code.graph_module if gated is None else gated, code.graph, bundle, weights.device, builder.build
    )


def _check_stored_graph(bundle: Bundle, stage_number: int, graph: Graph, loading: Loading) -> None:
    """Check the values of a graph, and, with the last one of a model, the agreement of all."""
    loading.shared.get(LoadedModels, LoadedModels).add(bundle, stage_number, graph)
    graph_name = bundle.stages[stage_number].graph
    record = loading.shared.get(_CheckedGraphs, _CheckedGraphs)
    identity = _identity(bundle.files[graph_name]) if bundle.compares_digests else None
    if not record.has(identity):
        check_graph_values(graph, resolve_operators(graph.ops, loading.options.allow_ops, graph_name), graph_name)
        record.add(identity)


def build_code(
    bundle: Bundle, stage_number: int, parts: StageParts, device: torch.device, loading: Loading
) -> StageCode:
    """Build what a stage runs."""
    stage_entry = bundle.stages[stage_number]
    folded, graph, operators = parts
    loading.shared.get(ZeroMemory, ZeroMemory).reserve(graph.weights, device)
    try:
        require_kernels(graph, operators, device.type, bundle.manifest.device)
        module_calls: Sequence[ModuleCallBody] = ()
        if loading.options.modules:
            builder = ModuleBuilder(graph, operators, device, loading.types)
            graph_module, module_calls = builder.build(bundle.node_numbers(stage_number))
        else:
            graph_module = build_graph_module(folded, graph, operators, device)
        return StageCode(
            stage_number=stage_number,
            graph=graph,
            guards=bundle.entry_point.guards,
            adapters=AdapterCalls(bundle, [value.name for value in graph.inputs]),
            graph_module=graph_module,
            module_calls=module_calls,
            follows_autocast=loading.autocast,
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


def _identity(entry: File) -> str:
    """The name of the entry of a graph file in the record of checked graphs."""
    conditions = (torch.__version__, torch.get_default_dtype(), _code_digest())
    return blake3(repr((entry.size, entry.blake3, *conditions)).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """The digest of the code that calls operators of torch: another check of the same version of stagepack has other entries."""
    content = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return blake3(content).hexdigest()


@typed_memory_errors()
def move_stages(bundle: Bundle, stages: Mapping[int, TorchStage], placement: Mapping[int, torch.device]) -> None:
    """Move stages to other devices; see `stagepack_loaders.base.Runtime.move_stages`.

    Tensors that are on one device and share memory share it afterwards, also between stages that are moved to one device.
    """
    allow_ops = needed_permissions(stage.graph for stage in stages.values())
    loading = Loading(options=LoadOptions(allow_ops=allow_ops))
    for stage_number, stage in stages.items():
        if reason := stage.reason_to_stay():
            raise DeviceError(f"stage {stage_number} cannot be moved: {reason}: load the bundle again with devices=")
        stage.wait_for_weights()
    # A stage whose graph names a missing device must be found before any is moved.
    codes = {
        stage_number: build_code(
            bundle, stage_number, read_parts(bundle, stage_number, loading), placement[stage_number], loading
        )
        for stage_number in stages
    }
    for device in dict.fromkeys(placement.values()):
        moved_stages = [stage for stage_number, stage in stages.items() if placement[stage_number] == device]
        tensors = [tensor for stage in moved_stages for tensor in stage.weights()]
        move_tensor = tensor_mover(tensors, [tensor for stage in moved_stages for tensor in stage.state()], device)
        for stage_number, stage in stages.items():
            if placement[stage_number] == device:
                stage.move(codes[stage_number], device, move_tensor)
