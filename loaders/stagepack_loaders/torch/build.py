"""`Graph` -> `torch.fx.GraphModule`.

The weights are inputs of the module, after the graph's own inputs, in the order of the weight table. Strings of a bundle do not reach
the code that fx generates: constants that are strings hang on the module as attributes, and names are checked identifiers.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem as _getitem
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.errors import OperatorError
from stagepack.format.folded import FoldedGraph
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
    Weight,
)
from stagepack.format.shapes import Dim
from stagepack.format.traversal import input_names, leaf_arguments, output_names
from stagepack.graph.region_functions import BodyItem, RegionCallSite, RegionFunction, region_functions
from stagepack.torch_internals import child_modules
from stagepack_loaders.torch.contexts import run_with_autocast, run_with_grad_mode
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.ops import check_call


def build(
    folded: FoldedGraph, graph: Graph, targets: Sequence[Callable[..., Any]], device: torch.device
) -> GraphModule:
    """Make a module of a graph: called with the inputs and then the weights, it returns a tuple of the outputs.

    Each region becomes one module, `region_0` and so on, that all its calls share.

    Args:
        folded: the graph as its file holds it.
        graph: the same unfolded.
        targets: the operators of the op table.
        device: what the graph calls its own device.

    Raises:
        OperatorError: a dtype, layout or memory format does not exist in this torch, or a call does not fit its operator.
        DeviceError: the graph names a device that this machine does not have.
    """
    items, regions = region_functions(folded, graph)
    builder = Builder(graph, regions, targets, device)
    names = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights)]
    module = builder.module(names, builder.steps(items), values_of(graph.outputs), None, "Stage")
    module.meta |= {NODES: len(graph.nodes), INPUTS: builder.described(names)}
    return module


# What the `meta` of a stage and of a region says: how many nodes it has, and what each input is, a `Value` or a `Weight`.
NODES, INPUTS = "stagepack_nodes", "stagepack_inputs"


@dataclass(frozen=True, slots=True)
class _RegionCall:
    """A call of a region, with the names of the values that it takes and gives. It has no context: its nodes have theirs."""

    region: int
    inputs: Sequence[str]
    outputs: Sequence[str]
    context: None = None


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function with an object of Python and then values; it returns a tuple of values."""

    function: Callable[..., Any]
    held: object
    inputs: Sequence[str]
    outputs: Sequence[str]
    context: int | None


Step = Node | _RegionCall | FunctionCall


class Builder:
    """What all modules of one graph share."""

    def __init__(
        self,
        graph: Graph,
        regions: Sequence[RegionFunction],
        targets: Sequence[Callable[..., Any]],
        device: torch.device,
    ) -> None:
        self.graph = graph
        self.targets = targets
        self.device = device
        self.types = {value.name: value for value in _values(graph)}
        self.names = {*self.types, *(weight.value for weight in graph.weights)}
        # As torch.export has it: the modules that a node is of, here the innermost alone.
        self.stacks = [{scope.path: (scope.path, scope.type)} for scope in graph.scopes]
        self.subgraphs: list[GraphModule] = []
        for number, subgraph in enumerate(graph.subgraphs):
            names = [value.name for value in subgraph.inputs]
            self.subgraphs.append(self.module(names, subgraph.nodes, subgraph.result, None, f"Subgraph{number}"))
        self.functions = regions
        self.regions: list[GraphModule] = []
        self.sizes: list[
            dict[int, tuple[int, int]]
        ] = []  # of each region: its inputs that are sizes of others of its inputs
        for number, region in enumerate(regions):
            names, given = (
                region.input_names(graph, region.first_call.start),
                region.output_names(graph, region.first_call.start),
            )
            self.sizes.append(self._sizes(names))
            body = _Body(self, self._less_sizes(number, names), short=True)
            for place, (tensor, dim) in self.sizes[number].items():
                body.size(names[place], names[tensor], dim)
            module = self.fill(body, self.steps(region.items), values_of(given), None, f"Region{number}")
            module.meta |= {NODES: region.length, INPUTS: self.described(self._less_sizes(number, names))}
            self.regions.append(module)

    def described(self, names: Sequence[str]) -> list[Value | Weight]:
        """What inputs of these names are."""
        weights = {weight.value: weight for weight in self.graph.weights}
        return [weights[name] if name in weights else self.types[name] for name in names]

    def _sizes(self, names: Sequence[str]) -> dict[int, tuple[int, int]]:
        """Numbers among some values that are sizes of tensors among them: the place of each, that of the tensor, and the dimension.

        A region reads them off: a compiler knows then that they are no constants.
        """
        known = [self.types.get(name) for name in names]
        where: dict[Dim, tuple[int, int]] = {}
        for place, value in enumerate(known):
            for dim, size in enumerate(value.shape if value is not None else ()):
                where.setdefault(size, (place, dim))
        return {
            place: where[value.expr]
            for place, value in enumerate(known)
            if value is not None and value.expr is not None and value.expr in where
        }

    def _less_sizes(self, number: int, names: Sequence[str]) -> list[str]:
        return [name for place, name in enumerate(names) if place not in self.sizes[number]]

    def steps(self, items: Iterable[BodyItem]) -> list[Step]:
        """What a body consists of: nodes, and calls of regions with the names at their places."""
        return [
            self._region_call(item) if isinstance(item, RegionCallSite) else self.graph.nodes[item] for item in items
        ]

    def _region_call(self, call: RegionCallSite) -> _RegionCall:
        region = self.functions[call.region]
        taken = self._less_sizes(call.region, region.input_names(self.graph, call.start))
        return _RegionCall(call.region, taken, region.output_names(self.graph, call.start))

    def module(
        self, inputs: Sequence[str], steps: Sequence[Step], result: Argument, context: int | None, name: str
    ) -> GraphModule:
        """A module of steps that stand in one context or in contexts inside it."""
        return self.fill(_Body(self, inputs), steps, result, context, name)

    def fill(
        self, body: "_Body", steps: Sequence[Step], result: Argument, context: int | None, name: str
    ) -> GraphModule:
        """The module of a body, with these steps at its end."""
        uses = _uses(steps)
        uses.update(_names(result))
        for inner, run in _runs(self.graph.contexts, steps, context):
            if inner is None or inner == context:
                for step in run:
                    body.append(step)
            else:
                inside = _uses(run)
                made = (name for step in run for name in made_by(step))
                body.in_context(inner, run, [name for name in made if uses[name] > inside[name]])
        body.graph.output(body.argument(result))
        # Inner modules come after it is made: fx would write the code of each anew.
        children = {name: held for name, held in body.attributes.items() if isinstance(held, GraphModule)}
        module = GraphModule(body.attributes | dict.fromkeys(children, torch.nn.Module()), body.graph, class_name=name)
        child_modules(module).update(children)
        # fx's own call prints a traceback beside the error that it raises.
        type(module).__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]
        return module


class _Body:
    """One fx graph while it grows."""

    def __init__(self, builder: Builder, inputs: Sequence[str], *, short: bool = False) -> None:
        self.builder = builder
        self.short = (
            short  # so that regions of several stages that are equal have equal code: no number of a place in a name
        )
        self.graph = FxGraph()
        self.attributes: dict[str, Any] = {}
        self.attribute_of: dict[int, str] = {}  # by the identity of what is held
        # fx writes the names of parameters into the code as they stand, and a value may be called `self` or `torch`: they get
        # names that no value begins with. All other names fx makes safe itself.
        free = next(n for n in itertools.count() if not any(name.startswith(f"given{n}") for name in builder.names))
        self.values = {
            name: self._node("placeholder", f"given{free}_{number}", name=None if short else name)
            for number, name in enumerate(inputs)
        }

    def size(self, name: str, tensor: str, dim: int) -> None:
        """Read a size off a tensor."""
        given = (self.values[tensor], dim)
        self.values[name] = self._node("call_function", torch.ops.aten.sym_size.int, given, name=name)

    def append(self, step: Step) -> None:
        """Append a step."""
        if isinstance(step, Node):
            self._call(step)
            return
        given = tuple(self.values[name] for name in step.inputs)
        if isinstance(step, FunctionCall):
            held = self._attribute(step.held, "held")
            self._take_apart("call_function", step.function, (held, *given), step.outputs)
            return
        name = f"region_{step.region}"
        self.attributes[name] = self.builder.regions[step.region]
        self._take_apart("call_module", name, given, step.outputs)

    def in_context(self, context: int, steps: Sequence[Step], outputs: Sequence[str]) -> None:
        """Append steps of a context: a module of its own, called by a function that opens and closes the context around it."""
        made = {name for step in steps for name in made_by(step)}
        used = dict.fromkeys(name for step in steps for name in used_by(step))
        inputs = [name for name in used if name not in made]
        module = self.builder.module(inputs, steps, values_of(outputs), context, f"Context{context}")
        target, args = _opener(self.builder.graph.contexts[context], self.builder.device)
        called = self._attribute(module, "context")
        given = (*args, called, *(self.values[name] for name in inputs))
        self._take_apart("call_function", target, given, outputs)

    def _take_apart(self, kind: str, target: Any, given: tuple[Any, ...], outputs: Sequence[str]) -> None:
        """A call of a module, and each part of its result."""
        result = self._node(kind, target, given)
        for index, name in enumerate(outputs):
            self.values[name] = self._item(result, index, name)

    def _call(self, node: Node) -> None:
        """Append a call of an operator, and take a result of several parts apart."""
        target = self.builder.targets[node.op]
        check_call(self.builder.graph.ops[node.op].name, target, len(node.args), [name for name, _ in node.kwargs])
        args = tuple(map(self.argument, node.args))
        kwargs = {name: self.argument(argument) for name, argument in node.kwargs}
        name = next(iter(output_names(node)), None) if not node.unpack else None
        result = self._node("call_function", target, args, kwargs, name)
        result.meta["nn_module_stack"] = self.builder.stacks[node.scope]
        for index, output in enumerate(node.outputs):
            if output is not None and node.unpack:
                self.values[output.name] = self._item(result, index, output.name)
            elif output is not None:
                self.values[output.name] = result

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
        if self.short and name is not None:
            name = name.rstrip("0123456789_") or "value"
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
    contexts: Sequence[Context], steps: Sequence[Step], context: int | None
) -> Iterator[tuple[int | None, list[Step]]]:
    """Consecutive steps by the context directly inside `context` that they stand in, or `context` itself."""
    run: list[Step] = []
    current: int | None = None
    for step in steps:
        inner = step.context
        while inner != context and inner is not None and contexts[inner].parent != context:
            inner = contexts[inner].parent
        if run and inner != current:
            yield current, run
            run = []
        current = inner
        run.append(step)
    if run:
        yield current, run


def used_by(step: Step) -> Sequence[str]:
    """The names of the values that a step is given, with repeats."""
    return input_names(step) if isinstance(step, Node) else step.inputs


def made_by(step: Step) -> Iterable[str]:
    """The names of the values that a step makes."""
    return output_names(step) if isinstance(step, Node) else step.outputs


def _uses(steps: Iterable[Step]) -> Counter[str]:
    """How often each value is used."""
    return Counter(name for step in steps for name in used_by(step))


def values_of(names: Iterable[str]) -> TupleArg:
    """Values as one tuple."""
    return TupleArg(tuple(map(ValueArg, names)))


def _names(argument: Argument) -> Iterator[str]:
    return (leaf.name for leaf in leaf_arguments(argument) if isinstance(leaf, ValueArg))


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
