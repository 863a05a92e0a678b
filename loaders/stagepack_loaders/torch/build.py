"""`Graph` -> `torch.fx.GraphModule`.

The weights are inputs of the module, after the graph's own inputs, in the order of the weight table. Strings of a bundle do not reach
the code that fx generates: constants that are strings hang on the module as attributes, and names are checked identifiers.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import getitem as _getitem
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.errors import OperatorError
from stagepack.format.graph import (
    Argument,
    ComplexArg,
    Context,
    DeviceArg,
    DictArg,
    DtypeArg,
    Graph,
    LayoutArg,
    ListArg,
    MemoryFormatArg,
    Node,
    SliceArg,
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)
from stagepack.format.walk import leaves, values_made, values_used
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.ops import check_call
from stagepack_loaders.torch.regions import run_with_autocast, run_with_grad_mode


def build(graph: Graph, targets: Sequence[Callable[..., Any]], device: torch.device) -> GraphModule:
    """Make a module of a graph: called with the inputs and then the weights, it returns a tuple of the outputs.

    `targets` are the operators of the op table; `device` is what the graph calls its own device.

    Raises:
        OperatorError: a dtype, layout or memory format does not exist in this torch, or a call does not fit its operator.
        DeviceError: the graph names a device that this machine does not have.
    """
    builder = _Builder(graph, targets, device)
    names = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights)]
    return builder.module(names, graph.nodes, TupleArg(tuple(map(ValueArg, graph.outputs))), None, "Stage")


class _Builder:
    """What all modules of one graph share."""

    def __init__(self, graph: Graph, targets: Sequence[Callable[..., Any]], device: torch.device) -> None:
        self.graph = graph
        self.targets = targets
        self.device = device
        self.names = {value.name for value in _values(graph)} | {weight.value for weight in graph.weights}
        self.subgraphs: list[GraphModule] = []
        for number, subgraph in enumerate(graph.subgraphs):
            names = [value.name for value in subgraph.inputs]
            self.subgraphs.append(self.module(names, subgraph.nodes, subgraph.result, None, f"Subgraph{number}"))

    def module(
        self, inputs: Sequence[str], nodes: Sequence[Node], result: Argument, context: int | None, name: str
    ) -> GraphModule:
        """A module of nodes that stand in one region (`context`) or in regions inside it."""
        body = _Body(self, inputs)
        uses = _uses(nodes)
        uses.update(_names(result))
        for region, run in _runs(self.graph.contexts, nodes, context):
            if region is None or region == context:
                for node in run:
                    body.call(node)
            else:
                inside = _uses(run)
                made = (name for node in run for name in values_made(node))
                body.region(region, run, [name for name in made if uses[name] > inside[name]])
        body.graph.output(body.argument(result))
        module = GraphModule(body.attributes, body.graph, class_name=name)
        # fx's own call prints a traceback beside the error that it raises.
        type(module).__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]
        return module


class _Body:
    """One fx graph while it grows."""

    def __init__(self, builder: _Builder, inputs: Sequence[str]) -> None:
        self.builder = builder
        self.graph = FxGraph()
        self.attributes: dict[str, Any] = {}
        self.attribute_of: dict[int, str] = {}  # by the identity of what is held
        # fx writes the names of parameters into the code as they stand, and a value may be called `self` or `torch`: they get
        # names that no value begins with. All other names fx makes safe itself.
        free = next(n for n in itertools.count() if not any(name.startswith(f"given{n}") for name in builder.names))
        self.values = {
            name: self._node("placeholder", f"given{free}_{number}", name=name) for number, name in enumerate(inputs)
        }

    def call(self, node: Node) -> None:
        """Append a call, and take a result of several parts apart."""
        target = self.builder.targets[node.op]
        check_call(self.builder.graph.ops[node.op].name, target, len(node.args), [name for name, _ in node.kwargs])
        args = tuple(map(self.argument, node.args))
        kwargs = {name: self.argument(argument) for name, argument in node.kwargs}
        name = next(iter(values_made(node)), None) if not node.unpack else None
        result = self._node("call_function", target, args, kwargs, name)
        for index, output in enumerate(node.outputs):
            if output is not None and node.unpack:
                self.values[output.name] = self._item(result, index, output.name)
            elif output is not None:
                self.values[output.name] = result

    def region(self, region: int, nodes: Sequence[Node], outputs: Sequence[str]) -> None:
        """Append a region: a module of its own, called by a function that opens and closes the context around it."""
        made = {name for node in nodes for name in values_made(node)}
        inputs = [
            name for name in dict.fromkeys(name for node in nodes for name in values_used(node)) if name not in made
        ]
        module = self.builder.module(inputs, nodes, TupleArg(tuple(map(ValueArg, outputs))), region, f"Region{region}")
        target, args = _opener(self.builder.graph.contexts[region], self.builder.device)
        called = self._attribute(module, "region")
        result = self._node("call_function", target, (*args, called, *(self.values[name] for name in inputs)))
        for index, name in enumerate(outputs):
            self.values[name] = self._item(result, index, name)

    def argument(self, argument: Argument) -> Any:
        """An argument as fx takes it."""
        match argument:
            case ValueArg(name):
                return self.values[name]
            case ListArg(items):
                return [self.argument(item) for item in items]
            case TupleArg(items):
                return tuple(self.argument(item) for item in items)
            case DictArg(items):
                return {key: self.argument(item) for key, item in items}
            case SliceArg(start, stop, step):
                return slice(self.argument(start), self.argument(stop), self.argument(step))
            case ComplexArg(real, imag):
                return complex(real, imag)
            case DtypeArg(name):
                return named(name, torch.dtype)
            case LayoutArg(name):
                return named(name, torch.layout)
            case MemoryFormatArg(name):
                return named(name, torch.memory_format)
            case DeviceArg(name):
                return self.builder.device if name is None else parse_device(name)
            case SubgraphArg(index):
                return self._attribute(self.builder.subgraphs[index], "subgraph")
            case str():
                return self._attribute(argument, "text")
            case _:
                return argument

    def _attribute(self, held: object, kind: str) -> FxNode:
        name = self.attribute_of.setdefault(id(held), f"_{kind}_{len(self.attributes)}")
        self.attributes[name] = held
        return self._node("get_attr", name)

    def _item(self, result: FxNode, index: int, name: str) -> FxNode:
        return self._node("call_function", _getitem, (result, index), name=name)

    def _node(
        self, kind: str, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None, name: str | None = None
    ) -> FxNode:
        # The code reads attributes from `self`, so no value may take that name.
        return self.graph.create_node(kind, target, args, kwargs, "self_" if name == "self" else name)


def named(name: str, kind: type) -> Any:
    """A dtype, layout or memory format of torch by its name.

    Raises:
        OperatorError: this torch has none of that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise OperatorError(f"torch {torch.__version__} has no {kind.__name__} {name!r}")
    return found


def _runs(
    contexts: Sequence[Context], nodes: Sequence[Node], context: int | None
) -> Iterator[tuple[int | None, list[Node]]]:
    """Consecutive nodes by the region directly inside `context` that they stand in, or `context` itself."""
    run: list[Node] = []
    current: int | None = None
    for node in nodes:
        region = node.context
        while region != context and region is not None and contexts[region].parent != context:
            region = contexts[region].parent
        if run and region != current:
            yield current, run
            run = []
        current = region
        run.append(node)
    if run:
        yield current, run


def _uses(nodes: Sequence[Node]) -> Counter[str]:
    """How often each value is used."""
    return Counter(name for node in nodes for name in values_used(node))


def _names(argument: Argument) -> Iterator[str]:
    return (leaf.name for leaf in leaves(argument) if isinstance(leaf, ValueArg))


def _opener(context: Context, device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that runs a module inside a context, and its arguments before the module."""
    autocast = context.autocast
    if autocast is None:
        return run_with_grad_mode, (context.grad,)
    kind = device.type if autocast.device is None else parse_device(autocast.device).type
    return run_with_autocast, (kind, named(autocast.dtype, torch.dtype), autocast.enabled, autocast.cache)


def _values(graph: Graph) -> Iterator[Value]:
    """All values of a graph and its subgraphs that are not weights."""
    bodies: list[Graph | Subgraph] = [graph, *graph.subgraphs]
    for body in bodies:
        yield from body.inputs
        yield from (value for node in body.nodes for value in node.outputs if value is not None)
