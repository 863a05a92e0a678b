"""The graph of a stage, and changes of its weights -> the graph that applies them, without torch.

The changed graph takes further inputs after its own: the tensors of the changes. It computes in the order of peft: what the module returns
with the weight of the bundle, plus what its input gives through the pair, times the scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec.structs import replace

from stagepack.adapter.uses import VIEWS, Use
from stagepack.format.graph import Argument, DtypeArg, Graph, ListArg, Node, Op, Value, ValueArg
from stagepack.format.shapes import Dim, Expr
from stagepack.format.traversal import output_names
from stagepack.graph.region_functions import value_types

# What a further input is: the pair, the bias behind it, the scale, and, in a batch, what is added to indices of an embedding.
Role = Literal["a", "b", "bias", "scale", "offset"]

_LINEAR: Final = Op(
    name="aten.linear.default",
    schema="aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    parameters=("input", "weight", "bias"),
)
_EMBEDDING: Final = Op(
    name="aten.embedding.default",
    schema="aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False)"
    " -> Tensor",
    parameters=("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
)
_MUL: Final = Op(
    name="aten.mul.Tensor",
    schema="aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
    parameters=("self", "other"),
)
_ADD: Final = Op(
    name="aten.add.Tensor",
    schema="aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
    parameters=("self", "other", "alpha"),
)
_BMM: Final = Op(
    name="aten.bmm.default",
    schema="aten::bmm(Tensor self, Tensor mat2) -> Tensor",
    parameters=("self", "mat2"),
)
_SIZE: Final = Op(
    name="aten.sym_size.int",
    schema="aten::sym_size.int(Tensor self, int dim) -> SymInt",
    parameters=("self", "dim"),
)
_TO: Final = Op(
    name="aten.to.dtype",
    schema="aten::to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool copy=False, "
    "MemoryFormat? memory_format=None) -> Tensor(a)",
    parameters=("self", "dtype", "non_blocking", "copy", "memory_format"),
    aliases=((0, "self"),),
)
_RESHAPE: Final = Op(
    name="aten.reshape.default",
    schema="aten::reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)",
    parameters=("self", "shape"),
    aliases=((0, "self"),),
)
_RESHAPE_AS: Final = Op(
    name="aten.reshape_as.default",
    schema="aten::reshape_as(Tensor(a) self, Tensor other) -> Tensor(a)",
    parameters=("self", "other"),
    aliases=((0, "self"),),
)
OPERATORS: Final = (_LINEAR, _EMBEDDING, _MUL, _ADD, _BMM, _SIZE, _TO, _RESHAPE, _RESHAPE_AS)


@dataclass(frozen=True, slots=True)
class Pair:
    """What the tensors of a change are like: the rank of the pair, and whether a bias is added behind it."""

    rank: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ChangedGraph:
    """A graph that applies changes.

    Attributes:
        graph: the graph.
        inputs: the module and the role of each further input, in order.
        starts: where the nodes begin that each node of the graph before has become, and the number of all nodes.
    """

    graph: Graph
    inputs: tuple[tuple[str, Role], ...]
    starts: tuple[int, ...]


def computing_dtype(weight_dtype: str) -> str:
    """Return the dtype that the change of a weight is computed in: peft keeps pairs of smaller floats than float32 in float32."""
    return "float32" if weight_dtype in ("float16", "bfloat16") else weight_dtype


def change_graph(
    graph: Graph, uses: Sequence[Use], pairs: Mapping[str, Pair], batch: str | None = None
) -> ChangedGraph:
    """Return a graph that applies changes of its weights.

    uses: the uses of the changed weights, from `find_uses`.
    pairs: what the tensors of each change are like, by the path of the module.
    batch: the symbol of the first dimension of the inputs, to give each row its own tensors: the further inputs then have the rows as
        their first dimension, and matrices are [rows, in, rank] and [rows, rank, out]. None for one change of all rows, whose matrices are
        [rank, in] and [out, rank], or [in, rank] of an embedding.
    """
    rewriting = _Rewriting(graph, pairs, batch)
    use_of_node = {use.node: use for use in uses}
    starts = []
    for node_number, node in enumerate(graph.nodes):
        starts.append(len(rewriting.nodes))
        if node_number in use_of_node:
            rewriting.apply(node, use_of_node[node_number])
        else:
            rewriting.nodes.append(node)
    changed = replace(
        graph,
        inputs=(*graph.inputs, *rewriting.inputs.values()),
        nodes=tuple(rewriting.nodes),
        ops=tuple(rewriting.ops),
        calls=(),
    )
    return ChangedGraph(changed, tuple(rewriting.inputs), (*starts, len(rewriting.nodes)))


def without_rows(graph: Graph, uses: Sequence[Use], batch: str) -> list[str]:
    """Return the modules whose input does not have the rows of a batch as its first dimension, or one row after the other."""
    types = value_types(graph)
    producers = {name: node for node in graph.nodes for name in output_names(node)}

    def has_rows(value_name: str) -> bool:
        while True:
            shape = types[value_name].shape
            if shape and shape[0] == batch:
                return True
            producer = producers.get(value_name)
            # A view keeps the order of elements, so that one row still follows the other.
            if (
                producer is None
                or graph.ops[producer.op].name not in VIEWS
                or not isinstance(producer.args[0], ValueArg)
            ):
                return False
            value_name = producer.args[0].name

    return list(dict.fromkeys(use.change.module for use in uses if not has_rows(use.rows)))


def _row_length(shape: Sequence[Dim], batch: str) -> Dim:
    """The number of vectors in one row of a batch; `shape` has all dimensions of the tensor but the last one."""
    factors = [
        factor for dim in shape for factor in (dim.args if isinstance(dim, Expr) and dim.op == "mul" else (dim,))
    ]
    if batch in factors:
        factors.remove(batch)
        return factors[0] if len(factors) == 1 else Expr(op="mul", args=tuple(factors)) if factors else 1
    return Expr(op="floordiv", args=(Expr(op="mul", args=tuple(factors)), batch))


@dataclass
class _Rewriting:
    """A graph while changes are added to it."""

    graph: Graph
    pairs: Mapping[str, Pair]
    batch: str | None
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[tuple[str, Role], Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops = list(self.graph.ops)
        self.types = dict(value_types(self.graph))
        taken = tuple(self.types)
        self.prefix = "lora"
        while any(name.startswith(self.prefix) for name in taken):
            self.prefix += "_"
        self.modules: dict[str, int] = {}
        self.row_count: Value | None = None

    def apply(self, node: Node, use: Use) -> None:
        """Append a node, and what its change adds; the sum has the name of the result of the node."""
        [result] = [value for value in node.outputs if value is not None]
        module = use.change.module
        number = self.modules.setdefault(module, len(self.modules))
        # A module may be called several times.
        name = (
            f"{self.prefix}_{number}"
            if (module, "b") not in self.inputs
            else f"{self.prefix}_{number}_{len(self.nodes)}"
        )
        base = replace(result, name=f"{name}_base")
        self.nodes.append(replace(node, outputs=(base, *node.outputs[1:])))
        dtype = computing_dtype(use.weight.dtype)
        steps = _Steps(self, node, module, name, dtype)
        change = self._change_of_rows(steps, use) if self.batch is not None else self._change(steps, use)
        if change.shape != base.shape:
            change = steps.add("shaped", _RESHAPE_AS, (change, base), base.shape)
        total_dtype = dtype if dtype != base.dtype else base.dtype
        if total_dtype == result.dtype:
            self.nodes.append(steps.node(_ADD, (base, change), result))
        else:
            total = steps.add("sum", _ADD, (base, change), base.shape)
            self.nodes.append(steps.node(_TO, (total, DtypeArg(result.dtype)), result))

    def _change(self, steps: "_Steps", use: Use) -> Value:
        """What a module adds, if all rows have one pair."""
        size_in, size_out = use.sizes
        pair = self.pairs[use.change.module]
        rows = self.types[use.rows]
        if use.kind == "embedding":
            table = steps.input("a", (size_in, pair.rank))
            arguments = (table, *steps.source.args[1:])
            low = steps.add("low", _EMBEDDING, arguments, (*rows.shape, pair.rank))
        else:
            x = steps.converted(use.rows, rows.dtype, rows.shape)
            low = steps.add("low", _LINEAR, (x, steps.input("a", (pair.rank, size_in))), (*rows.shape[:-1], pair.rank))
        bias = (steps.input("bias", (size_out,)),) if pair.has_bias else ()
        matrix = steps.input("b", (size_out, pair.rank))
        high = steps.add("high", _LINEAR, (low, matrix, *bias), (*low.shape[:-1], size_out))
        # A tensor without dimensions is a number: it changes no dtype.
        return steps.add("change", _MUL, (high, steps.input("scale", (), "float64")), high.shape)

    def _change_of_rows(self, steps: "_Steps", use: Use) -> Value:
        """What a module adds, if each row has its own pair."""
        assert self.batch is not None
        size_in, size_out = use.sizes
        pair = self.pairs[use.change.module]
        rows = self.types[use.rows]
        middle = _row_length(rows.shape if use.kind == "embedding" else rows.shape[:-1], self.batch)
        if use.kind == "embedding":
            offset = steps.input("offset", (self.batch, *[1] * (len(rows.shape) - 1)), "int64")
            places = steps.add("places", _ADD, (ValueArg(use.rows), offset), rows.shape, "int64")
            table = steps.input("a", (size_in, pair.rank))
            low = steps.add("low", _EMBEDDING, (table, places), (*rows.shape, pair.rank))
            x = self._by_row(steps, low, pair.rank)
        else:
            matrix = steps.input("a", (self.batch, size_in, pair.rank))
            x = self._by_row(steps, steps.converted(use.rows, rows.dtype, rows.shape), size_in)
            x = steps.add("low", _BMM, (x, matrix), (self.batch, middle, pair.rank))
        matrix = steps.input("b", (self.batch, pair.rank, size_out))
        high = steps.add("high", _BMM, (x, matrix), (self.batch, middle, size_out))
        if pair.has_bias:
            high = steps.add("biased", _ADD, (high, steps.input("bias", (self.batch, 1, size_out))), high.shape)
        return steps.add("change", _MUL, (high, steps.input("scale", (self.batch, 1, 1))), high.shape)

    def _by_row(self, steps: "_Steps", x: Value, size: int) -> Value:
        """A tensor as [rows, any, size]."""
        assert self.batch is not None
        if len(x.shape) == 3 and x.shape[0] == self.batch:
            return x
        if self.row_count is None:
            self.row_count = Value(name=f"{self.prefix}_rows", dtype="symint", expr=self.batch)
            scale = steps.input("scale", (self.batch, 1, 1))
            self.nodes.append(steps.node(_SIZE, (scale, 0), self.row_count))
        shape = ListArg((ValueArg(self.row_count.name), -1, size))
        return steps.add("rows", _RESHAPE, (x, shape), (self.batch, _row_length(x.shape[:-1], self.batch), size))


@dataclass
class _Steps:
    """The nodes that one change adds."""

    rewriting: _Rewriting
    source: Node
    module: str
    name: str
    dtype: str

    def input(self, role: Role, shape: tuple[Dim, ...], dtype: str | None = None) -> Value:
        """A further input of the graph, which all calls of a module share."""
        value = Value(name=f"{self.name}_{role}", dtype=dtype or self.dtype, shape=shape)
        return self.rewriting.inputs.setdefault((self.module, role), value)

    def converted(self, name: str, dtype: str, shape: tuple[Dim, ...]) -> Value:
        """A value in the dtype that the change is computed in."""
        if dtype == self.dtype:
            return Value(name=name, dtype=dtype, shape=shape)
        return self.add("input", _TO, (ValueArg(name), DtypeArg(self.dtype)), shape)

    def add(
        self, word: str, op: Op, args: Sequence[Argument | Value], shape: tuple[Dim, ...], dtype: str | None = None
    ) -> Value:
        """Append a node, and return its result."""
        value = Value(name=f"{self.name}_{word}", dtype=dtype or self.dtype, shape=shape)
        self.rewriting.nodes.append(self.node(op, args, value))
        return value

    def node(self, op: Op, args: Sequence[Argument | Value], output: Value) -> Node:
        """A node in the module and the context of the changed one."""
        ops = self.rewriting.ops
        if op not in ops:
            ops.append(op)
        arguments = tuple(ValueArg(argument.name) if isinstance(argument, Value) else argument for argument in args)
        return Node(
            op=ops.index(op), args=arguments, outputs=(output,), scope=self.source.scope, context=self.source.context
        )
