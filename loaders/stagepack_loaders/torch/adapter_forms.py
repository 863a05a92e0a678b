"""The modules that apply adapters to a stage: they ask for its weights where these come while it runs, and have regions to compile."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.adapter.rewrite import ChangedGraph, computing_dtype
from stagepack.adapter.uses import find_uses
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import FoldedGraph, Graph
from stagepack.graph.folding import outline_graph
from stagepack.graph.region_functions import RegionCallSite, region_functions
from stagepack_loaders.torch.build import StageParts, build_graph_module
from stagepack_loaders.torch.weight_gate import GatedModule
from stagepack_loaders.window_plan import WeightUse


@dataclass(frozen=True, slots=True, kw_only=True)
class FormBuilder:
    """Builds the module of a changed graph of a stage.

    Attributes:
        find_operators: finds the operators of a graph.
        has_regions: whether equal runs of nodes are modules of their own. Only a compiler needs them: to find them took 1.0 s of 1.2 s for
            4 layers.
        gated: the module of the stage that asks for its weights, which the others do as it does; None if it asks for none.
        folded: the graph of the stage as this module has it.
        uses: the uses of weights that it asks for.
    """

    find_operators: Callable[[Graph], Sequence[Callable[..., Any]]]
    device: torch.device
    has_regions: bool
    gated: GatedModule | None
    folded: FoldedGraph
    graph: Graph
    uses: Sequence[WeightUse]

    def build(self, changed: ChangedGraph) -> torch.nn.Module:
        """Return the module of a changed graph."""
        graph, operators = changed.graph, self.find_operators(changed.graph)
        folded = outline_graph(graph) if self.has_regions else trivially_folded(graph)
        module = build_graph_module(folded, graph, operators, self.device)
        if self.gated is None:
            return module
        uses = _moved_uses(self.uses, _first_nodes(self.folded, self.graph), changed.starts)
        gated = GatedModule(module, StageParts(trivially_folded(graph), graph, operators), self.device, uses)
        gated.gate = self.gated.gate
        return gated


def _first_nodes(folded: FoldedGraph, graph: Graph) -> list[int]:
    """The first node of each step of a graph, and the number of all nodes; see `WeightUse`."""
    items, regions = region_functions(folded, graph)
    lengths = [regions[item.region].length if isinstance(item, RegionCallSite) else 1 for item in items]
    return [0, *itertools.accumulate(lengths)]


def _moved_uses(uses: Sequence[WeightUse], first_nodes: Sequence[int], starts: Sequence[int]) -> list[WeightUse]:
    """The uses of weights in a changed graph, whose steps are its nodes; they begin and end with those of the graph before, in order."""
    ends = [*(starts[node] - 1 for node in first_nodes[1:]), starts[-1]]
    return [replace(use, first_step=starts[first_nodes[use.first_step]], last_step=ends[use.last_step]) for use in uses]


def adapter_use(bundle: AdaptedBundle, folded: FoldedGraph, graph: Graph) -> WeightUse:
    """Return the tensors of the adapters of a stage as a use that stays in the memory of its device, of none of its weights."""
    byte_count = 0
    for adapter in bundle.adapters.values():
        shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
        modules = {use.change.module: use.weight.dtype for use in find_uses(graph, adapter.changes)}
        for name, shape in shapes.items():
            dtype = modules.get(name.rpartition(".")[0])
            if dtype is not None and name not in adapter.document.replaced:
                byte_count += math.prod(shape) * ITEM_SIZE[computing_dtype(dtype)]
        for weight in graph.weights:
            if weight.names[0] in adapter.document.replaced:
                byte_count += math.prod(weight.shape) * ITEM_SIZE[weight.dtype]
    step_count = len(_first_nodes(folded, graph)) - 1
    return WeightUse(first_step=step_count, last_step=step_count, byte_count=byte_count, must_stay=True)
