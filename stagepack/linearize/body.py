"""The nodes of an fx graph -> nodes of ours, with the regions of grad mode and autocast opened."""

import operator
from typing import Any

import torch
from msgspec.structs import replace
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.errors import UnsupportedError
from stagepack.format.codec import is_plain
from stagepack.format.graph import (
    Argument,
    Autocast,
    ComplexArg,
    Context,
    DeviceArg,
    DictArg,
    DtypeArg,
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
from stagepack.format.traversal import child_arguments, subgraph_indices
from stagepack.format.tree import UNUSED_VALUE
from stagepack.linearize.operators import seen_aliases
from stagepack.linearize.tables import Tables
from stagepack.linearize.tensors import inner_name

_MARKS = ("stagepack.split_here.default", "pippy._pipe_split.default")
_INNER = "export.access_subclass_inner_tensor.default"
_SCALARS = {
    torch.SymInt: "symint",
    torch.SymFloat: "symfloat",
    torch.SymBool: "symbool",
    int: "symint",
    float: "symfloat",
    bool: "symbool",
}


class BodyBuilder:
    """The nodes of one graph module, with the regions inside it opened."""

    def __init__(self, tables: Tables, module: GraphModule, *, inner: bool = False) -> None:
        self.tables = tables
        self.module = module
        self.inner = inner
        self.taken = set() if inner else {UNUSED_VALUE, *tables.weights.values()}
        self.env: dict[FxNode, Argument | list[Argument]] = {}
        self.wrapped: dict[
            FxNode, str
        ] = {}  # weights of a tensor subclass, by name: only the tensors inside are values
        self.weight_nodes: set[FxNode] = set()
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.sources: list[FxNode] = []  # what each of the nodes was
        self.result: Argument = None

    def convert(self, module: GraphModule | None = None, context: int | None = None) -> Argument:
        """Append the nodes of a module, and return what it gives."""
        module = module or self.module
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.env[node] = self._attribute(module, node)
            elif node.op == "call_function":
                self._call(module, node, context)
            elif node.op == "output":
                self.result = self.argument(node.args[0], node)
        return self.result

    def value(self, name: str, meta: object, node: FxNode) -> Value:
        """Describe a value of torch by a name of ours."""
        symbols = self.tables.symbols
        if isinstance(meta, torch.Tensor):
            dtype = str(meta.dtype).removeprefix("torch.")
            return Value(name=self._fresh(name), dtype=dtype, shape=tuple(map(symbols.dim, meta.shape)))
        if type(meta) in _SCALARS:
            known = symbols.known(meta) if isinstance(meta, torch.SymInt) else meta if type(meta) is int else None
            return Value(name=self._fresh(name), dtype=_SCALARS[type(meta)], expr=known)
        raise UnsupportedError(
            f"the value {node.name} of {node.target} is a {type(meta).__name__}, which a bundle cannot hold"
        )

    def copy_into(self, target: FxNode, given: Argument) -> None:
        """Write a result into a buffer or an input, as a program that is not functional does."""
        op = self.tables.op(torch.ops.aten.copy_.default)
        scope = self.tables.scope(target)
        self.nodes.append(Node(op=op, args=(self.argument(target, target), given), outputs=(None,), scope=scope))
        self.sources.append(target)

    def argument(self, given: object, node: FxNode) -> Argument:
        """One argument of a node as data."""
        if given in self.wrapped:
            raise UnsupportedError(
                f"{node.target} takes the weight {self.wrapped[given]!r} as one tensor of its class: quantize it in a way that "
                "torch.export traces into, or make it a plain tensor"
            )
        if isinstance(given, FxNode):
            found = self.env[given]
            return ListArg(tuple(found)) if isinstance(found, list) else found
        if isinstance(given, list):
            return ListArg(tuple(self.argument(part, node) for part in given))
        if isinstance(given, tuple):
            return TupleArg(tuple(self.argument(part, node) for part in given))
        if isinstance(given, dict) and all(isinstance(key, str) for key in given):
            return DictArg(tuple((key, self.argument(part, node)) for key, part in given.items()))
        if isinstance(given, slice):
            return SliceArg(*(self.argument(part, node) for part in (given.start, given.stop, given.step)))
        if isinstance(given, torch.device):
            return DeviceArg(None if given.type == self.tables.device else given.type)
        return constant(given, f"an argument of {node.name} ({node.target})")

    def _attribute(self, module: GraphModule, node: FxNode) -> Argument | list[Argument]:
        held = getattr(module, str(node.target), None)
        if not isinstance(held, GraphModule):
            raise UnsupportedError(
                f"the attribute {node.target} is a {type(held).__name__}, which a bundle cannot hold"
            )
        if all(_is_region(user) for user in node.users):
            return []  # opened where it is called
        return SubgraphArg(self._subgraph(held))

    def _subgraph(self, module: GraphModule) -> int:
        body = BodyBuilder(self.tables, module, inner=True)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                value = body.value(f"arg_{len(body.inputs)}", node.meta["val"], node)
                body.inputs.append(value)
                body.env[node] = ValueArg(value.name)
        result = body.convert()
        self.tables.subgraphs.append(Subgraph(inputs=tuple(body.inputs), nodes=tuple(body.nodes), result=result))
        return len(self.tables.subgraphs) - 1

    def _call(self, module: GraphModule, node: FxNode, context: int | None) -> None:
        whole: Any = self.env.get(node.args[0]) if node.target is operator.getitem else None  # type: ignore[arg-type]
        if isinstance(whole, list):
            self.env[node] = whole[node.args[1]]  # type: ignore[index]
        elif _is_region(node):
            self.env[node] = self._open(module, node, context)
        elif str(node.target) == _INNER:
            self._unwrap(node)
        elif str(node.target) in _MARKS:
            if self.inner:
                raise UnsupportedError(f"{node.target} stands inside a branch or a loop, where no stage can begin")
            self.tables.split_positions.append(len(self.nodes))
        else:
            self._append(node, context)

    def give_weight(self, node: FxNode, name: str) -> None:
        """Say that a node stands for a weight, by its fully qualified name."""
        value = self.tables.weights.get(name)
        if value is None:
            self.wrapped[node] = name
        else:
            self.env[node] = ValueArg(value)
            self.weight_nodes.add(node)

    def _unwrap(self, node: FxNode) -> None:
        """A tensor inside a weight of a tensor subclass."""
        outer, attribute = node.args
        assert isinstance(outer, FxNode)
        self.give_weight(node, inner_name(self.wrapped[outer], str(attribute)))

    def _open(self, module: GraphModule, node: FxNode, context: int | None) -> list[Argument]:
        """The nodes of a grad mode or autocast region, here."""
        region, position = _region(node, context, self.tables.device)
        called, given = node.args[position], node.args[position + 1 :]
        assert isinstance(called, FxNode)
        inside = getattr(module, str(called.target))
        placeholders = [inner for inner in inside.graph.nodes if inner.op == "placeholder"]
        for placeholder, argument in zip(placeholders, given, strict=True):
            self.env[placeholder] = self.argument(argument, node)
            if argument in self.weight_nodes:
                self.weight_nodes.add(placeholder)
        return list(child_arguments(self.convert(inside, self.tables.context(region))))

    def _append(self, node: FxNode, context: int | None) -> None:
        meta: Any = node.meta.get("val")
        unpack = isinstance(meta, list | tuple)
        op = self.tables.op(node.target)
        # By the place of the node, so that the names of repeated parts differ by one number alone.
        name = f"{self.tables.ops[op].name.split('.')[1]}_{len(self.nodes)}"
        names = [f"{name}_{index}" for index in range(len(meta))] if unpack else [name]
        outputs = [
            None if part is None else self.value(name, part, node)
            for name, part in zip(names, meta if unpack else [meta], strict=True)
        ]
        args = tuple(self.argument(given, node) for given in node.args)
        kwargs = tuple((name, self.argument(given, node)) for name, given in node.kwargs.items())
        self.tables.add_aliases(op, seen_aliases(node))
        made = Node(
            op=op,
            args=args,
            kwargs=kwargs,
            outputs=tuple(outputs),
            unpack=unpack,
            scope=self.tables.scope(node),
            context=context,
        )
        body_costs = [inside.cost for index in subgraph_indices(made) for inside in self.tables.subgraphs[index].nodes]
        cost = self.tables.costs.node_cost(node, self.tables.ops[op].name, self.weight_nodes, body_costs)
        self.nodes.append(replace(made, cost=cost))
        self.sources.append(node)
        results = [None if output is None else ValueArg(output.name) for output in outputs]
        self.env[node] = list(results) if unpack else results[0]

    def _fresh(self, name: str) -> str:
        """A name that no value has yet: this one, or else with underscores at its end."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


def _is_region(node: FxNode) -> bool:
    return str(node.target) in ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _region(node: FxNode, parent: int | None, device: str) -> tuple[Context, int]:
    """The context that a region node opens, and the position of the called module among its arguments."""
    if str(node.target) == "wrap_with_set_grad_enabled":
        return Context(parent=parent, grad=bool(node.args[0])), 1
    kind, dtype, enabled, cache = node.args[:4]
    dtype = torch.get_autocast_dtype(str(kind)) if dtype is None else dtype
    autocast = Autocast(
        device=None if kind == device else str(kind),
        dtype=str(dtype).removeprefix("torch."),
        enabled=bool(enabled),
        cache=torch.is_autocast_cache_enabled() if cache is None else bool(cache),
    )
    return Context(parent=parent, autocast=autocast), 4


def constant(given: object, where: str) -> Argument:
    """A constant argument as data.

    Raises:
        UnsupportedError: it is not of a kind that a bundle can hold.
    """
    if is_plain(given):
        return given  # type: ignore[return-value]
    if isinstance(given, complex):
        return ComplexArg(given.real, given.imag)
    if isinstance(given, torch.dtype):
        return DtypeArg(str(given).removeprefix("torch."))
    if isinstance(given, torch.layout):
        return LayoutArg(str(given).removeprefix("torch."))
    if isinstance(given, torch.memory_format):
        return MemoryFormatArg(str(given).removeprefix("torch."))
    found = repr(given) if isinstance(given, int | str) else f"a {type(given).__name__}"
    raise UnsupportedError(f"{where} is {found}, which a bundle cannot hold")
