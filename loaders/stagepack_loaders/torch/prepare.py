"""Read and check stages, then read their weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stagepack.errors import DeviceError, OperatorError
from stagepack.format.chunks import ByteProgress
from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack.format.unfold import FoldedGraph
from stagepack.format.validate import NamedWeights, check_whole_model, raise_problems
from stagepack.format.weights import StoredTensor
from stagepack.graph.region_functions import folded_functions
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.checked_graphs import CheckedGraphs
from stagepack_loaders.torch.devices import ZeroMemory, typed_memory_errors
from stagepack_loaders.torch.module_builder import build_with_modules
from stagepack_loaders.torch.module_call import ModuleCallBody
from stagepack_loaders.torch.operators import resolve_operators
from stagepack_loaders.torch.stage import StageCode, TorchStage
from stagepack_loaders.torch.value_check import check_values
from stagepack_loaders.torch.weights import WeightCache


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
