"""`torch.export.ExportedProgram` -> `Graph`: the only place on the writing side that knows torch.fx.

Two things change on the way, and nothing else: regions of grad mode and autocast are opened, so that their nodes
stand in the list and carry the region as their context; and results of several parts get names instead of
``getitem`` nodes.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.costs import CostModel
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
    Graph,
    LayoutArg,
    ListArg,
    MemoryFormatArg,
    Node,
    Op,
    Scope,
    SliceArg,
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)
from stagepack.format.manifest import Signature
from stagepack.format.walk import parts
from stagepack.operators import describe
from stagepack.signature import signature_of
from stagepack.symbols import SymbolTable
from stagepack.tensors import Kind, WeightTable, weight_table

_MARKS = ("stagepack.split_here.default", "pippy._pipe_split.default")
_SCALARS = {
    torch.SymInt: "symint",
    torch.SymFloat: "symfloat",
    torch.SymBool: "symbool",
    int: "symint",
    float: "symfloat",
    bool: "symbool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearized:
    """A program as data.

    Attributes:
        graph: the whole model.
        signature: how it is called.
        weights: its weights and where their bytes are.
        marks: the numbers of the nodes before which ``split_here`` stood.
        device: the type of the device it was captured on.
    """

    graph: Graph
    signature: Signature
    weights: WeightTable
    marks: tuple[int, ...]
    device: str


def linearize(program: ExportedProgram, names: Mapping[str, str], forward: Callable[..., Any] | None) -> Linearized:
    """Turn a program into data.

    `names` gives names to torch's symbols; `forward` is the call of the original model, for its parameters' order and
    defaults.

    Raises:
        UnsupportedError: the program holds something that a bundle cannot hold; it is named.
    """
    return _Linearizer(program, names).run(forward)


class _Linearizer:
    def __init__(self, program: ExportedProgram, names: Mapping[str, str]) -> None:
        self.program = program
        self.symbols = SymbolTable(program.range_constraints, names)
        self.costs = CostModel()
        self.weights = weight_table(_tensors(program))
        self.device = _device(program)
        self.ops: dict[Any, int] = {}
        self.op_rows: list[Op] = []
        self.scopes: dict[Scope, int] = {}
        self.contexts: dict[Context, int] = {}
        self.subgraphs: list[Subgraph] = []
        self.marks: list[int] = []
        self.taken: set[str] = {weight.value for weight in self.weights.weights}

    def run(self, forward: Callable[..., Any] | None) -> Linearized:
        signature = self.program.graph_signature
        body = _Body(self, self.program.graph_module)
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        leaves: list[str | ConstantArgument] = []
        inputs = []
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                body.env[node] = ValueArg(self.weights.values[str(spec.target)])
            elif spec.kind != InputKind.USER_INPUT:
                raise UnsupportedError(f"the input {node.name} is a {spec.kind.name}, which a bundle cannot hold")
            elif isinstance(spec.arg, ConstantArgument):
                body.env[node] = _constant(spec.arg.value, f"the input {node.name}")
                leaves.append(spec.arg)
            else:
                value = body.value(node.name, node.meta["val"], node)
                inputs.append(value)
                body.env[node] = ValueArg(value.name)
                leaves.append(value.name)
        body.convert()
        results = self._results(body, {node.name: node for node in placeholders})
        graph = Graph(
            symbols=self.symbols.symbols,
            inputs=tuple(inputs),
            weights=self.weights.weights,
            nodes=tuple(body.nodes),
            outputs=tuple(dict.fromkeys(leaf for leaf in results if isinstance(leaf, str))),
            subgraphs=tuple(self.subgraphs),
            ops=tuple(self.op_rows),
            scopes=tuple(self.scopes),
            contexts=tuple(self.contexts),
        )
        return Linearized(
            graph=graph,
            signature=signature_of(self.program, leaves, results, forward),
            weights=self.weights,
            marks=tuple(self.marks),
            device=self.device,
        )

    def _results(self, body: "_Body", placeholders: Mapping[str, FxNode]) -> list[str | ConstantArgument]:
        """The leaves of the model's result; what a functional program gives back to be written is written here."""
        signature = self.program.graph_signature
        buffers = {
            str(spec.target): placeholders[spec.arg.name] for spec in signature.input_specs if spec.target is not None
        }
        leaves: list[str | ConstantArgument] = []
        for given, spec in zip(parts(body.result), signature.output_specs, strict=True):
            if spec.kind == OutputKind.USER_OUTPUT:
                leaves.append(self._result(given, spec.arg))
            elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
                body.copy_into(buffers[str(spec.target)], given)
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                body.copy_into(placeholders[str(spec.target)], given)
            else:
                raise UnsupportedError(f"the output {spec.arg.name} is a {spec.kind.name}, which a bundle cannot hold")
        return leaves

    def _result(self, given: Argument, spec: object) -> str | ConstantArgument:
        if isinstance(given, ValueArg):
            return given.name
        if isinstance(spec, TensorArgument | SymIntArgument | SymFloatArgument | SymBoolArgument):
            if isinstance(given, None | bool | int | float | str):
                return ConstantArgument(name="", value=given)
            raise UnsupportedError(f"the output {spec.name} is not a value")
        assert isinstance(spec, ConstantArgument)
        return spec

    def op(self, target: Any) -> int:
        if target not in self.ops:
            self.ops[target] = len(self.op_rows)
            self.op_rows.append(describe(target))
        return self.ops[target]

    def context(self, context: Context) -> int:
        return self.contexts.setdefault(context, len(self.contexts))

    def scope(self, node: FxNode) -> int:
        stack = node.meta.get("nn_module_stack") or {}
        if not stack:
            return self.scopes.setdefault(Scope(path=""), len(self.scopes))
        key, (path, cls) = list(stack.items())[-1]
        call = key.rpartition("@")[2] if "@" in key else ""
        name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
        return self.scopes.setdefault(Scope(path=f"{path}@{call}" if call else path, type=name), len(self.scopes))

    def fresh(self, name: str) -> str:
        """A name that no value has yet, made from another."""
        candidate, number = name, 0
        while candidate in self.taken:
            number += 1
            candidate = f"{name}_{number}"
        self.taken.add(candidate)
        return candidate


class _Body:
    """The nodes of one graph module, with the regions inside it opened."""

    def __init__(self, linearizer: _Linearizer, module: GraphModule, *, inner: bool = False) -> None:
        self.linearizer = linearizer
        self.module = module
        self.inner = inner
        self.env: dict[FxNode, Argument | list[Argument]] = {}
        self.nodes: list[Node] = []
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
        symbols = self.linearizer.symbols
        if isinstance(meta, torch.Tensor):
            dtype = str(meta.dtype).removeprefix("torch.")
            return Value(name=self.linearizer.fresh(name), dtype=dtype, shape=tuple(map(symbols.dim, meta.shape)))
        if type(meta) in _SCALARS:
            known = symbols.known(meta) if isinstance(meta, torch.SymInt) else meta if type(meta) is int else None
            return Value(name=self.linearizer.fresh(name), dtype=_SCALARS[type(meta)], expr=known)
        raise UnsupportedError(
            f"the value {node.name} of {node.target} is a {type(meta).__name__}, which a bundle cannot hold"
        )

    def copy_into(self, target: FxNode, given: Argument) -> None:
        """Write a result into a buffer or an input, as a program that is not functional does."""
        op = self.linearizer.op(torch.ops.aten.copy_.default)
        scope = self.linearizer.scope(target)
        self.nodes.append(Node(op=op, args=(self.argument(target, target), given), outputs=(None,), scope=scope))

    def argument(self, given: object, node: FxNode) -> Argument:
        """One argument of a node as data."""
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
            return DeviceArg(None if given.type == self.linearizer.device else given.type)
        return _constant(given, f"an argument of {node.name} ({node.target})")

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
        body = _Body(self.linearizer, module, inner=True)
        inputs = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                value = body.value(node.name, node.meta["val"], node)
                inputs.append(value)
                body.env[node] = ValueArg(value.name)
        result = body.convert()
        self.linearizer.subgraphs.append(Subgraph(inputs=tuple(inputs), nodes=tuple(body.nodes), result=result))
        return len(self.linearizer.subgraphs) - 1

    def _call(self, module: GraphModule, node: FxNode, context: int | None) -> None:
        whole: Any = self.env.get(node.args[0]) if node.target is operator.getitem else None  # type: ignore[arg-type]
        if isinstance(whole, list):
            self.env[node] = whole[node.args[1]]  # type: ignore[index]
        elif _is_region(node):
            self.env[node] = self._open(module, node, context)
        elif str(node.target) in _MARKS:
            if self.inner:
                raise UnsupportedError(f"{node.target} stands inside a branch or a loop, where no stage can begin")
            self.linearizer.marks.append(len(self.nodes))
        else:
            self._append(node, context)

    def _open(self, module: GraphModule, node: FxNode, context: int | None) -> list[Argument]:
        """The nodes of a grad mode or autocast region, here."""
        region, position = _region(node, context, self.linearizer.device)
        called, given = node.args[position], node.args[position + 1 :]
        assert isinstance(called, FxNode)
        inside = getattr(module, str(called.target))
        placeholders = [inner for inner in inside.graph.nodes if inner.op == "placeholder"]
        for placeholder, argument in zip(placeholders, given, strict=True):
            self.env[placeholder] = self.argument(argument, node)
        return list(parts(self.convert(inside, self.linearizer.context(region))))

    def _append(self, node: FxNode, context: int | None) -> None:
        meta: Any = node.meta.get("val")
        unpack = isinstance(meta, list | tuple)
        outputs = self._outputs(node, list(meta) if unpack else [meta])
        args = tuple(self.argument(given, node) for given in node.args)
        kwargs = tuple((name, self.argument(given, node)) for name, given in node.kwargs.items())
        self.nodes.append(
            Node(
                op=self.linearizer.op(node.target),
                args=args,
                kwargs=kwargs,
                outputs=tuple(outputs),
                unpack=unpack,
                scope=self.linearizer.scope(node),
                context=context,
                cost=self.linearizer.costs.of(node),
            )
        )
        results = [None if output is None else ValueArg(output.name) for output in outputs]
        self.env[node] = list(results) if unpack else results[0]

    def _outputs(self, node: FxNode, metas: list[object]) -> list[Value | None]:
        """The values that a node makes, under the names of the ``getitem`` nodes that take them apart."""
        if len(metas) == 1 and not isinstance(node.meta.get("val"), list | tuple):
            return [None if metas[0] is None else self.value(node.name, metas[0], node)]
        names = {user.args[1]: user.name for user in reversed(node.users) if user.target is operator.getitem}
        return [
            None if meta is None else self.value(names.get(index, f"{node.name}_item{index}"), meta, node)
            for index, meta in enumerate(metas)
        ]


def _tensors(program: ExportedProgram) -> dict[str, tuple[Kind, torch.Tensor]]:
    """The parameters, buffers and constants of a program by fully qualified name, in the model's order."""
    tensors: dict[str, tuple[Kind, torch.Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        name = str(spec.target)
        if spec.kind == InputKind.PARAMETER:
            tensors[name] = "parameter", program.state_dict[name]
        elif spec.kind == InputKind.BUFFER and spec.persistent:
            tensors[name] = "buffer", program.state_dict[name]
        elif spec.kind == InputKind.BUFFER:
            tensors[name] = "non_persistent_buffer", _constant_tensor(program, name)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            tensors[name] = "constant", _constant_tensor(program, name)
    return tensors


def _constant_tensor(program: ExportedProgram, name: str) -> torch.Tensor:
    held = program.constants[name]
    if not isinstance(held, torch.Tensor):
        raise UnsupportedError(f"the constant {name} is a {type(held).__name__}, which a bundle cannot hold")
    return held


def _device(program: ExportedProgram) -> str:
    """The type of the device that the program was captured on: that of its weights, else of its inputs."""
    held: Iterable[Any] = [tensor for _, tensor in _tensors(program).values()]
    inputs = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    types = [tensor.device.type for tensor in (*held, *inputs) if isinstance(tensor, torch.Tensor)]
    return types[0] if types else "cpu"


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


def _constant(given: object, where: str) -> Argument:
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
