"""Build a `torch.fx.GraphModule` from a graph.

The weights are inputs of the module, after the inputs of the graph, in the order of the weight table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.format.graph import Argument, Graph, Node, Value, Weight
from stagepack.format.unfold import FoldedGraph
from stagepack.graph.region_functions import (
    BodyItem,
    RegionCallSite,
    RegionFunction,
    region_functions,
    size_sources,
    value_types,
)
from stagepack_loaders.torch.contexts import context_call
from stagepack_loaders.torch.fx_body import FxBody, GraphParts
from stagepack_loaders.torch.steps import (
    FunctionStep,
    RegionStep,
    Step,
    argument_names,
    produced_names,
    runs_by_context,
    tuple_of,
    use_counts,
    used_names,
)

# Keys of the `meta` of the module of a stage and of a region: how many nodes it has, and the `Value` or `Weight` of each input.
NODE_COUNT, INPUT_TYPES = "stagepack_nodes", "stagepack_inputs"


def build_graph_module(
    folded: FoldedGraph, graph: Graph, operators: Sequence[Callable[..., Any]], device: torch.device
) -> GraphModule:
    """Return a module of a graph: called with the inputs and then the weights, it returns a tuple of the outputs.

    Each region becomes one module, ``region_0`` and so on, which all its calls share.
    """
    items, regions = region_functions(folded, graph)
    builder = GraphBuilder(graph, regions, operators, device)
    stage_inputs = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights)]
    module = builder.build_module(stage_inputs, builder.steps(items), tuple_of(graph.outputs), None, "Stage")
    module.meta |= {NODE_COUNT: len(graph.nodes), INPUT_TYPES: builder.input_types(stage_inputs)}
    return module


@dataclass(frozen=True, slots=True)
class _RegionModule:
    """A region that is built.

    Attributes:
        function: the region.
        size_sources: the inputs that are not passed, since they are sizes of other inputs: input -> (input, dimension). The module
            reads them off, so that a compiler knows that they are not constants.
    """

    function: RegionFunction
    size_sources: Mapping[int, tuple[int, int]]

    def passed_names(self, graph: Graph, start: int) -> list[str]:
        """Return the names of the values that a call passes, whose first node is `start`."""
        input_names = self.function.input_names(graph, start)
        return [value_name for index, value_name in enumerate(input_names) if index not in self.size_sources]


class GraphBuilder:
    """Builds the modules of one graph: of its subgraphs, its regions, its contexts, and of itself."""

    def __init__(
        self,
        graph: Graph,
        regions: Sequence[RegionFunction],
        operators: Sequence[Callable[..., Any]],
        device: torch.device,
    ) -> None:
        self._graph = graph
        self._types = value_types(graph)
        self._parts = GraphParts(graph, operators, device)
        for index, subgraph in enumerate(graph.subgraphs):
            subgraph_inputs = [value.name for value in subgraph.inputs]
            module = self.build_module(subgraph_inputs, subgraph.nodes, subgraph.result, None, f"Subgraph{index}")
            self._parts.subgraphs.append(module)
        self._regions: list[_RegionModule] = []
        for region in regions:
            self._build_region(region)

    def input_types(self, value_names: Sequence[str]) -> list[Value | Weight]:
        """Return the entries of inputs in the graph."""
        return [self._types[value_name] for value_name in value_names]

    def steps(self, items: Iterable[BodyItem]) -> list[Step]:
        """Return the steps of a body: nodes, and calls of regions."""
        return [
            self._region_step(item) if isinstance(item, RegionCallSite) else self._graph.nodes[item] for item in items
        ]

    def build_module(
        self, inputs: Sequence[str], steps: Sequence[Step], result: Argument, context: int | None, class_name: str
    ) -> GraphModule:
        """Return a module of steps.

        context: the context that it is called in; None for none.
        """
        return self._finish(FxBody(self._parts, inputs), steps, result, context, class_name)

    def _build_region(self, region: RegionFunction) -> None:
        start = region.first_call.start
        input_names, outputs = region.input_names(self._graph, start), region.output_names(self._graph, start)
        built = _RegionModule(region, size_sources([self._types[value_name] for value_name in input_names]))
        passed = built.passed_names(self._graph, start)
        body = FxBody(self._parts, passed, anonymous=True)
        for index, (tensor_index, dim) in built.size_sources.items():
            body.read_size(input_names[index], input_names[tensor_index], dim)
        class_name = f"Region{len(self._regions)}"
        module = self._finish(body, self.steps(region.items), tuple_of(outputs), None, class_name)
        module.meta |= {NODE_COUNT: region.length, INPUT_TYPES: self.input_types(passed)}
        self._parts.regions.append(module)
        self._regions.append(built)

    def _region_step(self, call: RegionCallSite) -> RegionStep:
        region = self._regions[call.region]
        outputs = region.function.output_names(self._graph, call.start)
        return RegionStep(call.region, region.passed_names(self._graph, call.start), outputs)

    def _finish(
        self, body: FxBody, steps: Sequence[Step], result: Argument, context: int | None, class_name: str
    ) -> GraphModule:
        """The module of a body, after its last steps."""
        uses = use_counts(steps)
        uses.update(argument_names(result))
        for run_context, run in runs_by_context(self._graph.contexts, steps, context):
            if run_context is None or run_context == context:
                for step in run:
                    _append(body, step)
            else:
                uses_inside = use_counts(run)
                produced = (value_name for step in run for value_name in produced_names(step))
                outputs = [value_name for value_name in produced if uses[value_name] > uses_inside[value_name]]
                self._append_context(body, run_context, run, outputs)
        return body.finish(result, class_name)

    def _append_context(self, body: FxBody, context: int, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        """Append steps of a context: a module of their own, called by a function that opens and closes the context around it."""
        produced = {value_name for step in steps for value_name in produced_names(step)}
        used = dict.fromkeys(value_name for step in steps for value_name in used_names(step))
        inputs = [value_name for value_name in used if value_name not in produced]
        module = self.build_module(inputs, steps, tuple_of(outputs), context, f"Context{context}")
        function, arguments = context_call(self._graph.contexts[context], self._parts.device)
        body.call_function(function, (*arguments, body.attribute(module, "context")), inputs, outputs)


def _append(body: FxBody, step: Step) -> None:
    """Append a step that needs no context of its own."""
    match step:
        case Node():
            body.call_operator(step)
        case RegionStep():
            body.call_region(step.region, step.inputs, step.outputs)
        case FunctionStep():
            first_argument = body.attribute(step.first_argument, "held")
            body.call_function(step.function, (first_argument,), step.inputs, step.outputs)
