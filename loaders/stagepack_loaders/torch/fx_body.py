"""One fx graph under construction. Strings of a bundle do not reach the code that fx generates, except checked identifiers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.format.graph import (
    Argument,
    ComplexArg,
    DeviceArg,
    Graph,
    Node,
    SubgraphArg,
    ValueArg,
)
from stagepack.format.traversal import all_values, output_names
from stagepack.format.tree import constant_identity
from stagepack.torch_internals import child_modules
from stagepack_loaders.torch.devices import parse_graph_device
from stagepack_loaders.torch.torch_attributes import torch_argument

# Key of the `meta` of an fx node that calls an operator: the node of the graph.
GRAPH_NODE = "stagepack_node"


@dataclass(frozen=True, slots=True)
class GraphParts:
    """What all modules that are built from one graph share.

    Attributes:
        graph: the graph.
        operators: the operator of each entry of its op table.
        device: the device that the graph calls its own.
        subgraphs: the modules of its subgraphs that are built already.
        regions: the modules of its regions that are built already.
        input_prefix: the prefix of the parameter names of generated functions. fx writes these names into the code as they are, and a
            value may be called ``self`` or ``torch``: no name of a value starts with the prefix. fx makes all other names safe itself.
        module_stacks: the modules that a node of each scope came from, in the form of torch.export; only the innermost one.
    """

    graph: Graph
    operators: Sequence[Callable[..., Any]]
    device: torch.device
    subgraphs: list[GraphModule] = field(default_factory=list)
    regions: list[GraphModule] = field(default_factory=list)
    input_prefix: str = field(init=False)
    module_stacks: list[dict[str, tuple[str, str]]] = field(init=False)

    def __post_init__(self) -> None:
        value_names = [value.name for value in all_values(self.graph)]
        value_names += [weight.value for weight in self.graph.weights]
        prefix = _free_prefix("given", value_names)
        stacks = [{scope.path: (scope.path, scope.type)} for scope in self.graph.scopes]
        object.__setattr__(self, "input_prefix", prefix)
        object.__setattr__(self, "module_stacks", stacks)


def _free_prefix(word: str, value_names: Sequence[str]) -> str:
    """Return a word with a number that no name starts with."""
    endings = [value_name.removeprefix(word) for value_name in value_names if value_name.startswith(word)]
    digit_count = len(str(len(endings)))
    # Each name takes at most one number of so many digits, and there are more numbers than names.
    taken = {ending[:digit_count] for ending in endings}
    numbers = (f"{index:0{digit_count}}" for index in range(10**digit_count))
    return word + next(number for number in numbers if number not in taken)


class FxBody:
    """An fx graph that grows node by node, and the attributes of its module."""

    def __init__(self, parts: GraphParts, inputs: Sequence[str], *, anonymous: bool = False) -> None:
        self._parts = parts
        self._anonymous = anonymous
        self._fx_graph = FxGraph()
        self._attributes: dict[str, Any] = {}
        self._attribute_names: dict[int, str] = {}  # by the identity of the object
        self._fx_nodes = {
            value_name: self._create(
                "placeholder", f"{parts.input_prefix}_{index}", fx_name=None if anonymous else value_name
            )
            for index, value_name in enumerate(inputs)
        }

    def read_size(self, value_name: str, tensor_name: str, dim: int) -> None:
        """Define a value as a size of a tensor."""
        args = (self._fx_nodes[tensor_name], dim)
        self._fx_nodes[value_name] = self._create(
            "call_function", torch.ops.aten.sym_size.int, args, fx_name=value_name
        )

    def call_operator(self, node: Node) -> None:
        """Append a call of an operator. If the operator returns a sequence, its items are defined one by one."""
        operator = self._parts.operators[node.op]
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

    def call_region(self, region: int, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Append a call of the module of a region."""
        attribute_name = f"region_{region}"
        self._attributes[attribute_name] = self._parts.regions[region]
        args = tuple(self._fx_nodes[value_name] for value_name in inputs)
        self._define_items(self._create("call_module", attribute_name, args), outputs)

    def attribute(self, value: object, kind: str) -> FxNode:
        """Return a node that reads an attribute of the module, which holds an object."""
        attribute_name = self._attribute_names.setdefault(id(value), f"_{kind}_{len(self._attributes)}")
        self._attributes[attribute_name] = value
        return self._create("get_attr", attribute_name)

    def finish(self, result: Argument, class_name: str) -> GraphModule:
        """Return the module of the graph, with a result."""
        self._fx_graph.output(self._argument(result))
        # Child modules are added after the module is made: fx would generate the code of each again.
        children = {
            attribute_name: value
            for attribute_name, value in self._attributes.items()
            if isinstance(value, GraphModule)
        }
        attributes = self._attributes | dict.fromkeys(children, torch.nn.Module())
        module = GraphModule(attributes, self._fx_graph, class_name=class_name)
        child_modules(module).update(children)
        # The call of fx prints a traceback beside the error that it raises.
        type(module).__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]
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
