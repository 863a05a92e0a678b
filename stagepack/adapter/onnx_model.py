"""The ONNX model of a stage, and changes of its weights -> the model that applies to each row the change of its own adapter.

Messages of protobuf are changed as bytes: hosts that run ONNX models need no library of ONNX. The tensors of all adapters are stacked along
their first dimension, in the order of the numbers of the adapters; index 0 is for none.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagepack.adapter.onnx_nodes import (
    NODE_INPUT,
    NODE_OPERATOR,
    NODE_OUTPUT,
    AddedNodes,
    StackedTensor,
    encoded,
    rows_input,
)
from stagepack.adapter.rewrite import Pair, computing_dtype
from stagepack.adapter.uses import MERGE_ADVICE, Use, weight_users
from stagepack.errors import AdapterError
from stagepack.format.graph import Graph, Weight
from stagepack.format.protobuf import Field, join_message, split_message
from stagepack.graph.region_functions import value_types

# Field numbers of onnx.proto.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT = 1, 5, 11
_TENSOR_NAME: Final = 8
# Operators that only pass a matrix on or exchange its dimensions, and those that multiply rows by a matrix.
_SAME: Final = frozenset({"Identity", "Transpose"})
_PRODUCTS: Final = frozenset({"Gemm", "MatMul"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChanges:
    """What the adapters of a stage change.

    Attributes:
        uses: the uses of the changed weights, from `find_uses`.
        pairs: what the stacked tensors of each change are like, by the path of the module.
        replaced: how many adapters replace a weight, for each that is replaced.
        count: the number of adapters.
        shared_modules: the modules that compute the same for all rows: that of the first row is for all.
    """

    uses: Sequence[Use]
    pairs: Mapping[str, Pair]
    replaced: Sequence[tuple[Weight, int]]
    count: int
    shared_modules: frozenset[str]


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """An ONNX model that takes the number of the adapter of each row.

    Attributes:
        tensors: the further tensors that it needs, all in one file.
        byte_count: the size of the file.
        new_names: the new names of initializers.
    """

    content: bytes
    tensors: Sequence[StackedTensor]
    byte_count: int
    new_names: Mapping[str, str]


def adapt_model(content: bytes, graph: Graph, changes: ModelChanges, rows_name: str, file_name: str) -> AdaptedModel:
    """Return a model that applies changes, in the place of the model of the stage with this graph; refuse one that uses a weight otherwise.

    rows_name: the name of the further input, the numbers of the adapters of the rows.
    file_name: the name of the file of the stacked tensors.
    """
    model = split_message(content)
    [graph_index] = [index for index, part in enumerate(model) if part.number == _MODEL_GRAPH]
    [graph_message] = _messages(model, _MODEL_GRAPH)
    parts = split_message(graph_message)
    nodes = [split_message(message) for message in _messages(parts, _GRAPH_NODE)]
    names = {text for node in nodes for text in (*_texts(node, NODE_INPUT), *_texts(node, NODE_OUTPUT))}
    prefix = "adapter"
    while any(name.startswith(f"{prefix}.") for name in names):
        prefix += "_"
    added = AddedNodes(prefix, rows_name, file_name)
    use_of_node = _use_of_node(nodes, graph, changes.uses)
    new_names = {weight.names[0]: _choose_whole(added, weight, count, changes) for weight, count in changes.replaced}
    initializers = [_renamed(message, new_names) for message in _messages(parts, _GRAPH_INITIALIZER)]
    _check_found(new_names, initializers)
    changing = _Changing(added, graph, changes, rows_name)
    for number, node in enumerate(nodes):
        changing.apply(node, use_of_node[number]) if number in use_of_node else added.nodes.append(node)
    new_parts = [
        *(Field(_GRAPH_NODE, join_message(node)) for node in added.nodes),
        *(part for part in parts if part.number not in (_GRAPH_NODE, _GRAPH_INITIALIZER)),
        *(Field(_GRAPH_INITIALIZER, tensor) for tensor in (*initializers, *added.initializers)),
        Field(_GRAPH_INPUT, rows_input(rows_name)),
    ]
    model[graph_index] = Field(_MODEL_GRAPH, join_message(new_parts))
    return AdaptedModel(join_message(model), added.tensors, added.byte_count, new_names)


def _texts(message: Sequence[Field], number: int) -> list[str]:
    # Names that are no text are compared, and written as they are.
    return [str(content, "utf-8", "surrogateescape") for content in _messages(message, number)]


def _text(message: Sequence[Field], number: int) -> str:
    return next(iter(_texts(message, number)), "")


def _messages(message: Sequence[Field], number: int) -> list[bytes]:
    return [part.content for part in message if part.number == number and isinstance(part.content, bytes)]


def _use_of_node(nodes: Sequence[Sequence[Field]], graph: Graph, uses: Sequence[Use]) -> dict[int, Use]:
    """The use that each node of a model is. Graph and model use a weight equally often, in the same order."""
    weight_of_value = {use.weight.names[0]: use.weight.names[0] for use in uses}
    users: defaultdict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        inputs, operator = _texts(node, NODE_INPUT), _text(node, NODE_OPERATOR)
        for name in dict.fromkeys(name for name in inputs if name in weight_of_value):
            if operator in _SAME:
                weight_of_value[_text(node, NODE_OUTPUT)] = weight_of_value[name]
            else:
                users[weight_of_value[name]].append(number)
    found, users_in_graph = {}, weight_users(graph, {use.weight.value for use in uses})
    for use in uses:
        numbers, graph_nodes = users[use.weight.names[0]], users_in_graph[use.weight.value]
        is_alike = len(numbers) == len(graph_nodes)
        if not is_alike or not _fits(nodes[numbers[graph_nodes.index(use.node)]], use, weight_of_value):
            raise _other_use(f"{use.change.module[:120]}: expected an ONNX model that uses its weight")
        found[numbers[graph_nodes.index(use.node)]] = use
    return found


def _fits(node: Sequence[Field], use: Use, weight_of_value: Mapping[str, str]) -> bool:
    operator, inputs, outputs = _text(node, NODE_OPERATOR), _texts(node, NODE_INPUT), _texts(node, NODE_OUTPUT)
    if len(inputs) < 2 or len(outputs) != 1:
        return False
    if use.kind == "embedding":
        return operator == "Gather" and inputs[0] == use.weight.names[0]
    return operator in _PRODUCTS and weight_of_value.get(inputs[1]) == use.weight.names[0]


def _other_use(what: str) -> AdapterError:
    return AdapterError(
        f"{what} as the graph of the stage does: write the models again (stagepack onnx), choose runtime='torch', or {MERGE_ADVICE}"
    )


def _choose_whole(added: AddedNodes, weight: Weight, count: int, changes: ModelChanges) -> str:
    """Append what has the name of a weight, and is it or what the adapter of the call replaces it by; return its own new name."""
    name, first = weight.names[0], added.first_row()
    places = added.stacked(name, "place", (changes.count + 1,), "int64")
    place = added.add("Reshape", [added.add("Gather", [places, first]), added.integers()])
    whole = added.stacked(name, "whole", (count, *weight.shape), weight.dtype)
    replaces = added.stacked(name, "replaces", (changes.count + 1,), "bool")
    own_name = f"{added.new_name()}.own"
    added.choose(added.add("Gather", [replaces, first]), ("Gather", [whole, place]), own_name, name)
    return own_name


def _renamed(tensor: bytes, new_names: Mapping[str, str]) -> bytes:
    fields = split_message(tensor)
    name = _text(fields, _TENSOR_NAME)
    if name not in new_names:
        return tensor
    new_name = Field(_TENSOR_NAME, encoded(new_names[name]))
    return join_message(new_name if part.number == _TENSOR_NAME else part for part in fields)


def _check_found(new_names: Mapping[str, str], initializers: Sequence[bytes]) -> None:
    found = {name for tensor in initializers for name in _texts(split_message(tensor), _TENSOR_NAME)}
    for name, new_name in new_names.items():
        if new_name not in found:
            raise _other_use(f"{name[:120]}: expected an ONNX model that has this weight")


class _Changing:
    """Adds low-rank changes to the nodes of a model."""

    def __init__(self, added: AddedNodes, graph: Graph, changes: ModelChanges, rows_name: str) -> None:
        self._added, self._types, self._changes, self._rows_name = added, value_types(graph), changes, rows_name
        self._count = changes.count + 1

    def apply(self, node: Sequence[Field], use: Use) -> None:
        """Append a node, and what its change adds; the sum has the name of the result of the node."""
        added, result, x = self._added, _text(node, NODE_OUTPUT), _text(node, NODE_INPUT)
        base = added.new_name()
        added.nodes.append([Field(NODE_OUTPUT, encoded(base)) if part.number == NODE_OUTPUT else part for part in node])
        dtype = computing_dtype(use.weight.dtype)
        is_narrow = dtype != use.weight.dtype
        module, pair, (size_in, size_out) = use.change.module, self._changes.pairs[use.change.module], use.sizes
        rows = added.first_row() if module in self._changes.shared_modules else self._rows_name

        def of_rows(role: str, first: int, second: int, role_dtype: str = dtype) -> str:
            return added.add("Gather", [added.stacked(module, role, (self._count, first, second), role_dtype), rows])

        if use.kind == "embedding":
            x = added.by_row(self._looked_up(use, _texts(node, NODE_INPUT)[1], rows, dtype), rows, pair.rank)
        else:
            x = added.by_row(added.cast(x, dtype) if is_narrow else x, rows, size_in)
            x = added.add("MatMul", [x, of_rows("a", size_in, pair.rank)])
        x = added.add("MatMul", [x, of_rows("b", pair.rank, size_out)])
        if pair.has_bias:
            x = added.add("Add", [x, of_rows("bias", 1, size_out)])
        x = added.add("Mul", [x, of_rows("scale", 1, 1)])
        wide = added.by_row(added.cast(base, dtype) if is_narrow else base, rows, size_out)
        # A row without the change keeps its bits: 0 times infinity is NaN, and -0 plus 0 is 0.
        total = added.add("Where", [of_rows("has", 1, 1, "bool"), added.add("Add", [wide, x]), wide])
        total = added.cast(total, use.weight.dtype) if is_narrow else total
        added.add("Reshape", [total, added.add("Shape", [base])], {"allowzero": 1}, result)

    def _looked_up(self, use: Use, indices: str, rows: str, dtype: str) -> str:
        """The rows of the table of an embedding: that of each adapter begins after that of the one before."""
        added, module, (size_in, _) = self._added, use.change.module, use.sizes
        rank = len(self._types[use.rows].shape)
        table = added.stacked(module, "a", (self._count * size_in, self._changes.pairs[module].rank), dtype)
        offsets = added.add("Mul", [rows, added.integers(size_in)])
        offsets = added.add("Reshape", [offsets, added.integers(-1, *[1] * (rank - 1))])
        return added.add("Gather", [table, added.add("Add", [added.cast(indices, "int64"), offsets])])
