"""Build a `torch.fx.GraphModule` from a graph.

The weights are inputs of the module, after the inputs of the graph, in the order of the weight table. Strings of a bundle do not reach the
code that fx generates, except checked identifiers.
"""

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.format.graph import (
    Argument,
    ComplexArg,
    DeviceArg,
    FoldedGraph,
    Graph,
    Node,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
    Weight,
)
from stagepack.format.traversal import all_values, input_names, leaf_arguments, output_names
from stagepack.format.tree import constant_identity
from stagepack.graph.region_functions import (
    BodyItem,
    RegionCallSite,
    RegionFunction,
    region_functions,
    size_sources,
    value_types,
)
from stagepack.torch_internals import child_modules
from stagepack.unwritten_memory import ALLOCATING_OPERATORS, Call, overwritten_results
from stagepack_loaders.torch.contexts import context_call
from stagepack_loaders.torch.devices import parse_graph_device
from stagepack_loaders.torch.stage_module import StageModule
from stagepack_loaders.torch.torch_attributes import torch_argument

# Key of the `meta` of an fx node that calls an operator: the node of the graph.
GRAPH_NODE = "stagepack_node"
# Keys of the `meta` of the module of a stage and of a region: how many nodes it has, and the `Value` or `Weight` of each input.
NODE_COUNT, INPUT_TYPES = "stagepack_nodes", "stagepack_inputs"

Operator = Callable[..., Any]


class _GraphParts:
    """What all modules that are built from one graph share.

    Attributes:
        device: the device that the graph calls its own.
        subgraphs: the modules of its subgraphs that are built already.
        regions: the modules of its regions that are built already.
        input_prefix: the prefix of the parameter names of generated functions. fx writes these names into the code as they are, and a
            value may be called ``self`` or ``torch``: no name of a value starts with the prefix. fx makes all other names safe itself.
        module_stacks: the modules that a node of each scope came from, in the form of torch.export; only the innermost one.
    """

    def __init__(self, graph: Graph, operators: Sequence[Operator], device: torch.device) -> None:
        self.operators = operators
        self.device = device
        self.subgraphs: list[GraphModule] = []
        self.regions: list[GraphModule] = []
        value_names = [*(value.name for value in all_values(graph)), *(weight.value for weight in graph.weights)]
        self.input_prefix = _free_prefix("given", value_names)
        self.module_stacks = [{scope.path: (scope.path, scope.type)} for scope in graph.scopes]


def _free_prefix(word: str, value_names: Sequence[str]) -> str:
    """Return a word with a number that no name starts with."""
    endings = [value_name.removeprefix(word) for value_name in value_names if value_name.startswith(word)]
    digit_count = len(str(len(endings)))
    # Each name takes at most one number of so many digits, and there are more numbers than names.
    taken = {ending[:digit_count] for ending in endings}
    numbers = (f"{index:0{digit_count}}" for index in range(10**digit_count))
    return word + next(number for number in numbers if number not in taken)


class _FxBody:
    """An fx graph that grows node by node, and the attributes of its module."""

    def __init__(self, parts: _GraphParts, inputs: Sequence[str], *, anonymous: bool = False) -> None:
        self._parts = parts
        self._anonymous = anonymous
        self._fx_graph = FxGraph()
        self._attributes: dict[str, Any] = {}
        self._attribute_names: dict[int, str] = {}  # by the identity of the object
        self._fx_nodes: dict[str, FxNode] = {}
        # Results of allocating operators that are not filled with zeros, since the next step with them writes them whole.
        self.overwritten: set[str] = set()
        for index, value_name in enumerate(inputs):
            fx_name = None if anonymous else value_name
            parameter = self._create("placeholder", f"{parts.input_prefix}_{index}", fx_name=fx_name)
            self._fx_nodes[value_name] = parameter

    def read_size(self, value_name: str, tensor_name: str, dim: int) -> None:
        """Define a value as a size of a tensor."""
        args = (self._fx_nodes[tensor_name], dim)
        self._fx_nodes[value_name] = self._create(
            "call_function", torch.ops.aten.sym_size.int, args, fx_name=value_name
        )

    def append(self, step: "Step") -> None:
        """Append a step that needs no context of its own."""
        match step:
            case Node():
                self._call_operator(step)
            case RegionStep():
                attribute_name = f"region_{step.region}"
                self._attributes[attribute_name] = self._parts.regions[step.region]
                args = tuple(self._fx_nodes[value_name] for value_name in step.inputs)
                self._define_items(self._create("call_module", attribute_name, args), step.outputs)
            case FunctionStep():
                first_argument = self.attribute(step.first_argument, "held")
                self.call_function(step.function, (first_argument,), step.inputs, step.outputs)

    def _call_operator(self, node: Node) -> None:
        """Append a call of an operator. If the operator returns a sequence, its items are defined one by one."""
        operator = self._parts.operators[node.op]
        if not self.overwritten.isdisjoint(output_names(node)):
            operator = inspect.unwrap(operator)
        args = tuple(map(self._argument, node.args))
        kwargs = {parameter_name: self._argument(argument) for parameter_name, argument in node.kwargs}
        fx_name = next(iter(output_names(node)), None) if not node.unpack else None
        result = self._create("call_function", operator, args, kwargs, fx_name)
        result.meta |= {"nn_module_stack": self._parts.module_stacks[node.scope], GRAPH_NODE: node}
        for index, output in enumerate(node.outputs):
            if output is not None:
                self._fx_nodes[output.name] = self._item(result, index, output.name) if node.unpack else result

    def call_function(
        self,
        function: Callable[..., Any],
        first_arguments: Sequence[Any],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        """Append a call of a function that returns a tuple."""
        args = (*first_arguments, *(self._fx_nodes[value_name] for value_name in inputs))
        self._define_items(self._create("call_function", function, args), outputs)

    def attribute(self, value: object, kind: str) -> FxNode:
        """Return a node that reads an attribute of the module, which holds an object."""
        attribute_name = self._attribute_names.setdefault(id(value), f"_{kind}_{len(self._attributes)}")
        self._attributes[attribute_name] = value
        return self._create("get_attr", attribute_name)

    def finish(self, result: Argument, class_name: str) -> GraphModule:
        """Return the module of the graph, with a result."""
        self._fx_graph.output(self._argument(result))
        # Child modules are added after the module is made: fx would generate the code of each again.
        children = {key: value for key, value in self._attributes.items() if isinstance(value, GraphModule)}
        attributes = self._attributes | dict.fromkeys(children, torch.nn.Module())
        module = StageModule(attributes, self._fx_graph, class_name=class_name)
        child_modules(module).update(children)
        return module

    def _define_items(self, result: FxNode, outputs: Sequence[str]) -> None:
        for index, value_name in enumerate(outputs):
            self._fx_nodes[value_name] = self._item(result, index, value_name)

    def _argument(self, argument: Argument) -> Any:
        """Return an argument as fx takes it."""
        return torch_argument(argument, self._leaf)

    def _leaf(self, leaf: Argument) -> Any:
        match leaf:
            case ValueArg(value_name):
                return self._fx_nodes[value_name]
            case ComplexArg(real, imag):
                # fx would write its text: "(inf+infj)" does not run, and "-2j" has a negative zero as its real part.
                return self.attribute(complex(real, imag), "number")
            case float() if math.isnan(leaf) and constant_identity(leaf) != constant_identity(math.nan):
                # fx would write `nan`, which has another sign or payload.
                return self.attribute(leaf, "number")
            case DeviceArg(device_name):
                return self._parts.device if device_name is None else parse_graph_device(device_name)
            case SubgraphArg(index):
                return self.attribute(self._parts.subgraphs[index], "subgraph")
            case str():
                return self.attribute(leaf, "text")
            case _:
                return leaf

    def _item(self, result: FxNode, index: int, value_name: str) -> FxNode:
        return self._create("call_function", getitem, (result, index), fx_name=value_name)

    def _create(
        self, kind: str, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None, fx_name: str | None = None
    ) -> FxNode:
        if fx_name is None and kind != "placeholder":
            # fx looks for a free number from the last one on that it gave to a name, and values may take numbers: not of this name.
            fx_name = f"{self._parts.input_prefix}_{kind}"
        elif self._anonymous and fx_name is not None:
            fx_name = fx_name.rstrip("0123456789_") or "value"
        # The code reads attributes from `self`, so no value may have that name.
        return self._fx_graph.create_node(kind, target, args, kwargs, "self_" if fx_name == "self" else fx_name)


@dataclass(frozen=True, slots=True)
class RegionStep:
    """A call of a region, with the names of the values that it takes and returns. It has no context: its nodes have theirs."""

    region: int
    inputs: Sequence[str]
    outputs: Sequence[str]
    context: None = None


@dataclass(frozen=True, slots=True)
class FunctionStep:
    """A call of a Python function, which takes any object and then values, and returns a tuple of values, in a context."""

    function: Callable[..., tuple[object, ...]]
    first_argument: object
    inputs: Sequence[str]
    outputs: Sequence[str]
    context: int | None


Step = Node | RegionStep | FunctionStep


def used_names(step: Step) -> Sequence[str]:
    """Return the names of the values that a step takes, with repeats."""
    return input_names(step) if isinstance(step, Node) else step.inputs


def produced_names(step: Step) -> Iterable[str]:
    """Return the names of the values that a step makes."""
    return output_names(step) if isinstance(step, Node) else step.outputs


def _use_counts(steps: Iterable[Step]) -> Counter[str]:
    return Counter(value_name for step in steps for value_name in used_names(step))


def argument_names(argument: Argument) -> Iterator[str]:
    """Yield the names of the values in an argument, with repeats."""
    return (leaf.name for leaf in leaf_arguments(argument) if isinstance(leaf, ValueArg))


def tuple_of(value_names: Iterable[str]) -> TupleArg:
    """Return a tuple of values as an argument."""
    return TupleArg(tuple(map(ValueArg, value_names)))


class StageParts(NamedTuple):
    """What the module of a stage is built from. In `folded`, each region is one function for all its calls."""

    folded: FoldedGraph
    graph: Graph
    operators: Sequence[Operator]


def build_graph_module(
    folded: FoldedGraph, graph: Graph, operators: Sequence[Operator], device: torch.device
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


class GraphBuilder:
    """Builds the modules of one graph: of its subgraphs, its regions, its contexts, and of itself."""

    def __init__(
        self, graph: Graph, regions: Sequence[RegionFunction], operators: Sequence[Operator], device: torch.device
    ) -> None:
        self._graph = graph
        self._types = value_types(graph)
        self._allocates = any(op.name in ALLOCATING_OPERATORS for op in graph.ops)
        self._parts = _GraphParts(graph, operators, device)
        for index, subgraph in enumerate(graph.subgraphs):
            subgraph_inputs = [value.name for value in subgraph.inputs]
            module = self.build_module(subgraph_inputs, subgraph.nodes, subgraph.result, None, f"Subgraph{index}")
            self._parts.subgraphs.append(module)
        # Regions, with the inputs that are not passed, since they are sizes of other inputs: input -> (input, dimension). Their modules
        # read these off, so that a compiler knows that they are not constants.
        self._regions: list[tuple[RegionFunction, Mapping[int, tuple[int, int]]]] = []
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
        """Return a module of steps, which is called in a context."""
        return self._finish(_FxBody(self._parts, inputs), steps, result, context, class_name)

    def _build_region(self, region: RegionFunction) -> None:
        start = region.first_call.start
        input_names = region.input_names(self._graph, start)
        sources = size_sources(self.input_types(input_names))
        self._regions.append((region, sources))
        call = self._region_step(region.first_call)
        body = _FxBody(self._parts, call.inputs, anonymous=True)
        for index, (tensor_index, dim) in sources.items():
            body.read_size(input_names[index], input_names[tensor_index], dim)
        class_name = f"Region{call.region}"
        module = self._finish(body, self.steps(region.items), tuple_of(call.outputs), None, class_name)
        module.meta |= {NODE_COUNT: region.length, INPUT_TYPES: self.input_types(call.inputs)}
        self._parts.regions.append(module)

    def _region_step(self, call: RegionCallSite) -> RegionStep:
        region, sources = self._regions[call.region]
        input_names = region.input_names(self._graph, call.start)
        passed = [value_name for index, value_name in enumerate(input_names) if index not in sources]
        return RegionStep(call.region, passed, region.output_names(self._graph, call.start))

    def _finish(
        self, body: _FxBody, steps: Sequence[Step], result: Argument, context: int | None, class_name: str
    ) -> GraphModule:
        """The module of a body, after its last steps."""
        uses = _use_counts(steps)
        uses.update(argument_names(result))
        if self._allocates:
            body.overwritten.update(overwritten_results(map(self._call, steps)))
        for run_context, step_run in itertools.groupby(steps, lambda step: self._context_inside(step, context)):
            run = list(step_run)
            if run_context is None or run_context == context:
                for step in run:
                    body.append(step)
            else:
                uses_inside = _use_counts(run)
                produced = (value_name for step in run for value_name in produced_names(step))
                outputs = [value_name for value_name in produced if uses[value_name] > uses_inside[value_name]]
                self._append_context(body, run_context, run, outputs)
        return body.finish(result, class_name)

    def _call(self, step: Step) -> Call:
        operator_name = self._graph.ops[step.op].name if isinstance(step, Node) else ""
        first = step.args[0] if isinstance(step, Node) and step.args else None
        first_name = first.name if isinstance(first, ValueArg) else None
        return Call(operator_name, first_name, used_names(step), produced_names(step))

    def _context_inside(self, step: Step, context: int | None) -> int | None:
        """The context that a step has directly inside another one; that one itself, or None, if it has none there."""
        child = step.context
        while child != context and child is not None and self._graph.contexts[child].parent != context:
            child = self._graph.contexts[child].parent
        return child

    def _append_context(self, body: _FxBody, context: int, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        """Append steps of a context: a module of their own, called by a function that opens and closes the context around it."""
        produced = {value_name for step in steps for value_name in produced_names(step)}
        used = dict.fromkeys(value_name for step in steps for value_name in used_names(step))
        inputs = [value_name for value_name in used if value_name not in produced]
        module = self.build_module(inputs, steps, tuple_of(outputs), context, f"Context{context}")
        function, arguments = context_call(self._graph.contexts[context], self._parts.device)
        body.call_function(function, (*arguments, body.attribute(module, "context")), inputs, outputs)
