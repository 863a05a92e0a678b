"""The ONNX model of a stage, and changes of its weights -> the model that applies to each row the change of its own adapter.

Messages of protobuf are changed as bytes: hosts that run ONNX models need no library of ONNX. The tensors of all adapters are stacked along
their first dimension, in the order of the numbers of the adapters; index 0 is for none.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stagepack.adapter.rewrite import Pair, computing_dtype
from stagepack.adapter.uses import MERGE_ADVICE, Use, weight_users
from stagepack.errors import AdapterError
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import Graph
from stagepack.format.onnx import ELEMENT_TYPES
from stagepack.format.protobuf import Field, decode_fields, encode_fields
from stagepack.graph.region_functions import value_types

# Field numbers of onnx.proto.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT = 1, 5, 11
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE = 1, 2, 4, 5
# Operators that only pass a matrix on or exchange its dimensions, and those of each kind of use, whose inputs are rows and matrix.
_SAME: Final = frozenset({"Identity", "Transpose"})
_PRODUCTS: Final = frozenset({"Gemm", "MatMul"})
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor with those of all adapters, an initializer of the model.

    Attributes:
        dtype: the torch name of its dtype.
        start: its first byte in the file of the stacked tensors.
        module: the changed module.
        role: ``a`` [adapters, in, rank], or [adapters * in, rank] of an embedding, ``b`` [adapters, rank, out], ``bias``
            [adapters, 1, out], ``scale`` and ``has``, whether an adapter changes the module, [adapters, 1, 1].
    """

    name: str
    module: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """An ONNX model that takes the number of the adapter of each row.

    Attributes:
        tensors: the further tensors that it needs, all in one file.
        byte_count: the size of the file.
    """

    content: bytes
    tensors: Sequence[StackedTensor]
    byte_count: int


def adapt_model(
    content: bytes,
    graph: Graph,
    uses: Sequence[Use],
    pairs: Mapping[str, Pair],
    count: int,
    rows_name: str,
    shared_modules: Sequence[str],
    file_name: str,
) -> AdaptedModel:
    """Return a model that applies changes.

    Args:
        content: the ONNX file of the stage.
        graph: its graph.
        uses: the uses of the changed weights, from `find_uses`.
        pairs: what the stacked tensors of each change are like, by the path of the module.
        count: the number of adapters.
        rows_name: the name of the further input, the numbers of the adapters of the rows.
        shared_modules: the modules that compute the same for all rows: that of the first row is for all.
        file_name: the name of the file of the stacked tensors.

    Raises:
        AdapterError: the model uses a weight otherwise than the graph.
    """
    model = decode_fields(content)
    [graph_index] = [index for index, part in enumerate(model) if part.number == _MODEL_GRAPH]
    [graph_message] = _messages(model, _MODEL_GRAPH)
    parts = decode_fields(graph_message)
    nodes = [decode_fields(message) for message in _messages(parts, _GRAPH_NODE)]
    names = {text for node in nodes for text in (*_texts(node, _NODE_INPUT), *_texts(node, _NODE_OUTPUT))}
    prefix = "adapter"
    while any(name.startswith(f"{prefix}.") for name in names):
        prefix += "_"
    changes = _Changes(graph, pairs, count + 1, rows_name, frozenset(shared_modules), file_name, prefix)
    use_of_node = _use_of_node(nodes, graph, uses)
    for number, node in enumerate(nodes):
        changes.apply(node, use_of_node[number]) if number in use_of_node else changes.nodes.append(node)
    others = [part for part in parts if part.number != _GRAPH_NODE]
    new_parts = [
        *(Field(_GRAPH_NODE, encode_fields(node)) for node in changes.nodes),
        *others,
        *(Field(_GRAPH_INITIALIZER, tensor) for tensor in changes.initializers),
        Field(_GRAPH_INPUT, _rows_input(rows_name)),
    ]
    model[graph_index] = Field(_MODEL_GRAPH, encode_fields(new_parts))
    return AdaptedModel(encode_fields(model), changes.tensors, changes.byte_count)


def _texts(message: Sequence[Field], number: int) -> list[str]:
    return [str(content, "utf-8") for content in _messages(message, number)]


def _messages(message: Sequence[Field], number: int) -> list[bytes]:
    return [part.content for part in message if part.number == number and isinstance(part.content, bytes)]


def _use_of_node(nodes: Sequence[Sequence[Field]], graph: Graph, uses: Sequence[Use]) -> dict[int, Use]:
    """The use that each node of a model is. Graph and model use a weight equally often, in the same order."""
    weight_of_value = {use.weight.names[0]: use.weight.names[0] for use in uses}
    users: defaultdict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        inputs, [operator] = _texts(node, _NODE_INPUT), _texts(node, _NODE_OPERATOR)
        for name in dict.fromkeys(name for name in inputs if name in weight_of_value):
            if operator in _SAME:
                weight_of_value[_texts(node, _NODE_OUTPUT)[0]] = weight_of_value[name]
            else:
                users[weight_of_value[name]].append(number)
    found = {}
    for use in uses:
        numbers, graph_nodes = users[use.weight.names[0]], weight_users(graph, use.weight.value)
        is_alike = len(numbers) == len(graph_nodes)
        if not is_alike or not _fits(nodes[numbers[graph_nodes.index(use.node)]], use, weight_of_value):
            raise AdapterError(
                f"{use.change.module[:120]}: expected an ONNX model that uses its weight as the graph of the stage does: write the models "
                f"again (stagepack onnx), choose runtime='torch', or {MERGE_ADVICE}"
            )
        found[numbers[graph_nodes.index(use.node)]] = use
    return found


def _fits(node: Sequence[Field], use: Use, weight_of_value: Mapping[str, str]) -> bool:
    [operator], inputs = _texts(node, _NODE_OPERATOR), _texts(node, _NODE_INPUT)
    if use.kind == "embedding":
        return operator == "Gather" and inputs[0] == use.weight.names[0]
    return operator in _PRODUCTS and weight_of_value.get(inputs[1]) == use.weight.names[0]


def _rows_input(name: str) -> bytes:
    """The further input, int64 [rows]."""
    dimension = encode_fields([Field(2, b"adapter rows")])
    tensor_type = encode_fields([Field(1, ELEMENT_TYPES["int64"]), Field(2, encode_fields([Field(1, dimension)]))])
    return encode_fields([Field(1, name.encode()), Field(2, encode_fields([Field(1, tensor_type)]))])


@dataclass
class _Changes:
    """The nodes of a model while changes are added to it."""

    graph: Graph
    pairs: Mapping[str, Pair]
    count: int
    rows_name: str
    shared_modules: frozenset[str]
    file_name: str
    prefix: str
    nodes: list[Sequence[Field]] = field(default_factory=list)
    initializers: list[bytes] = field(default_factory=list)
    tensors: list[StackedTensor] = field(default_factory=list)
    byte_count: int = 0

    def __post_init__(self) -> None:
        self.types = value_types(self.graph)
        self.modules: dict[str, int] = {}
        self.known: dict[object, str] = {}

    def apply(self, node: Sequence[Field], use: Use) -> None:
        """Append a node, and what its change adds; the sum has the name of the result of the node."""
        [result] = _texts(node, _NODE_OUTPUT)
        base = self._new_name()
        self.nodes.append(
            [Field(_NODE_OUTPUT, base.encode()) if part.number == _NODE_OUTPUT else part for part in node]
        )
        dtype = computing_dtype(use.weight.dtype)
        is_narrow = dtype != use.weight.dtype
        rows = self._first_row() if use.change.module in self.shared_modules else self.rows_name
        size_in, size_out = use.sizes
        pair = self.pairs[use.change.module]
        if use.kind == "embedding":
            x = self._looked_up(use, _texts(node, _NODE_INPUT)[1], rows, dtype)
        else:
            x = _texts(node, _NODE_INPUT)[0]
            x = self._cast(x, dtype) if is_narrow else x
            matrix = self._of_rows(use, "a", (self.count, size_in, pair.rank), dtype, rows)
            x = self._add("MatMul", [self._by_row(x, rows, size_in), matrix])
        if use.kind == "embedding":
            x = self._by_row(x, rows, pair.rank)
        x = self._add("MatMul", [x, self._of_rows(use, "b", (self.count, pair.rank, size_out), dtype, rows)])
        if pair.has_bias:
            x = self._add("Add", [x, self._of_rows(use, "bias", (self.count, 1, size_out), dtype, rows)])
        x = self._add("Mul", [x, self._of_rows(use, "scale", (self.count, 1, 1), dtype, rows)])
        wide = self._by_row(self._cast(base, dtype) if is_narrow else base, rows, size_out)
        # A row without the change keeps its bits: 0 times infinity is NaN, and -0 plus 0 is 0.
        has = self._of_rows(use, "has", (self.count, 1, 1), "bool", rows)
        total = self._add("Where", [has, self._add("Add", [wide, x]), wide])
        total = self._cast(total, use.weight.dtype) if is_narrow else total
        self._add("Reshape", [total, self._add("Shape", [base])], {"allowzero": 1}, result)

    def _looked_up(self, use: Use, indices: str, rows: str, dtype: str) -> str:
        """The rows of the table of an embedding: that of each adapter begins after that of the one before."""
        size_in, _ = use.sizes
        pair, rank = self.pairs[use.change.module], len(self.types[use.rows].shape)
        table = self._stacked(use.change.module, "a", (self.count * size_in, pair.rank), dtype)
        offsets = self._add("Mul", [rows, self._integers(size_in)])
        offsets = self._add("Reshape", [offsets, self._integers(-1, *[1] * (rank - 1))])
        return self._add("Gather", [table, self._add("Add", [self._cast(indices, "int64"), offsets])])

    def _of_rows(self, use: Use, role: str, shape: tuple[int, ...], dtype: str, rows: str) -> str:
        """The tensors of the adapters of the rows."""
        return self._add("Gather", [self._stacked(use.change.module, role, shape, dtype), rows])

    def _by_row(self, x: str, rows: str, size: int) -> str:
        """A tensor as [rows, any, size]."""
        key = "shape", rows, size
        if key not in self.known:
            self.known[key] = self._add("Concat", [self._add("Shape", [rows]), self._integers(-1, size)], {"axis": 0})
        return self._add("Reshape", [x, self.known[key]])

    def _first_row(self) -> str:
        if "first" not in self.known:
            self.known["first"] = self._add("Slice", [self.rows_name, self._integers(0), self._integers(1)])
        return self.known["first"]

    def _cast(self, x: str, dtype: str) -> str:
        return self._add("Cast", [x], {"to": ELEMENT_TYPES[dtype]})

    def _stacked(self, module: str, role: str, shape: tuple[int, ...], dtype: str) -> str:
        """The stacked tensor of a role, which all calls of a module share."""
        if (module, role) not in self.known:
            name = self.known[module, role] = self._new_name()
            start, length = -(-self.byte_count // _ALIGNMENT) * _ALIGNMENT, math.prod(shape) * ITEM_SIZE[dtype]
            self.tensors.append(StackedTensor(name, module, role, dtype, shape, start))
            self.byte_count = start + length
            entries = {"location": self.file_name, "offset": str(start), "length": str(length)}
            places = [
                Field(13, encode_fields([Field(1, key.encode()), Field(2, text.encode())]))
                for key, text in entries.items()
            ]
            fields = [*(Field(1, size) for size in shape), Field(2, ELEMENT_TYPES[dtype]), Field(8, name.encode())]
            self.initializers.append(encode_fields([*fields, *places, Field(14, 1)]))
        return self.known[module, role]

    def _integers(self, *values: int) -> str:
        """A constant tensor of integers, [values]."""
        if values not in self.known:
            name = self.known[values] = self._new_name()
            content = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
            fields = [
                Field(1, len(values)),
                Field(2, ELEMENT_TYPES["int64"]),
                Field(8, name.encode()),
                Field(9, content),
            ]
            self.initializers.append(encode_fields(fields))
        return self.known[values]

    def _new_name(self) -> str:
        return f"{self.prefix}.{len(self.nodes)}.{len(self.known)}"

    def _add(
        self,
        operator: str,
        inputs: Sequence[str],
        attributes: Mapping[str, int] | None = None,
        output: str | None = None,
    ) -> str:
        """Append a node, and return the name of its result."""
        output = output or self._new_name()
        self.nodes.append(
            [
                *(Field(_NODE_INPUT, name.encode()) for name in inputs),
                Field(_NODE_OUTPUT, output.encode()),
                Field(_NODE_OPERATOR, operator.encode()),
                *(
                    Field(_NODE_ATTRIBUTE, encode_fields([Field(1, name.encode()), Field(3, value), Field(20, 2)]))
                    for name, value in (attributes or {}).items()
                ),
            ]
        )
        return output
