"""Where a graph uses a weight that an adapter changes: the calls of operators of its module, found by the flow of values."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from stagepack.adapter.document import LowRankChange
from stagepack.errors import AdapterError
from stagepack.format.graph import Graph, ListArg, Node, ValueArg, Weight
from stagepack.format.rules import split_call_path
from stagepack.format.traversal import input_names, output_names, parameter_argument

# Operators that only pass a tensor on, and those that exchange the dimensions of a matrix.
_SAME: Final = frozenset({"aten.alias.default", "aten.detach.default", "aten.contiguous.default"})
_TRANSPOSED: Final = frozenset({"aten.t.default", "aten.numpy_T.default", "aten.mT.default"})
# Operators that multiply rows by a matrix [in, out] -> the parameters of the rows and of the matrix.
_PRODUCTS: Final = {
    "aten.addmm.default": ("mat1", "mat2"),
    "aten.mm.default": ("self", "mat2"),
    "aten.matmul.default": ("self", "other"),
}
# Operators that give a tensor another shape: modules such as Conv1D have them around their product.
VIEWS: Final = frozenset(
    {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_as.default"}
)


@dataclass(frozen=True, slots=True)
class Use:
    """A call of an operator with a weight that gets a low-rank change.

    Attributes:
        change: the change.
        node: the number of the node.
        rows: the name of what is multiplied: the input of a linear layer, or the indices of an embedding.
        kind: ``linear`` for a weight [out, in], ``conv1d`` for [in, out], ``embedding`` for [in, out] that is looked up.
        weight: the entry of the weight in the graph.
    """

    change: LowRankChange
    node: int
    rows: str
    kind: Literal["linear", "conv1d", "embedding"]
    weight: Weight

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of inputs and of outputs of the weight."""
        first, second = self.weight.shape
        return (second, first) if self.kind == "linear" else (first, second)


def find_uses(graph: Graph, changes: Mapping[str, LowRankChange]) -> list[Use]:
    """Return the uses in a graph of the weights of changed modules, in the order of the nodes.

    changes: the changes by the path of their module. Modules that the graph has no weight of are left out.
    """
    weights = {weight.value: weight for weight in graph.weights}
    weight_names = {change.weight for change in changes.values()}
    matrices = dict(_matrices(graph, {value for value, weight in weights.items() if weight.names[0] in weight_names}))
    nodes_of_scope: defaultdict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        nodes_of_scope[node.scope].append(node)
    uses = []
    for node_number, node in enumerate(graph.nodes):
        used = [name for name in input_names(node) if name in matrices]
        change = changes.get(split_call_path(graph.scopes[node.scope].path)[0]) if used else None
        if change is None or all(output in matrices for output in output_names(node)):
            continue
        for name in used:
            weight_value, is_transposed = matrices[name]
            if weights[weight_value].names[0] == change.weight:
                use = _use(graph, node_number, name, weights[weight_value], change, is_transposed=is_transposed)
                _check_module(graph, use, nodes_of_scope[node.scope])
                uses.append(use)
    return uses


def weight_users(graph: Graph, weight_values: set[str]) -> dict[str, list[int]]:
    """Return the nodes of a graph that use each of some weights, maybe transposed, in order, by the name of its value."""
    matrices = dict(_matrices(graph, weight_values))
    users: dict[str, list[int]] = {value: [] for value in weight_values}
    for number, node in enumerate(graph.nodes):
        used = {matrices[name][0] for name in input_names(node) if name in matrices}
        if used and not all(name in matrices for name in output_names(node)):
            for value in used:
                users[value].append(number)
    return users


def unused_changes(graphs: Sequence[Graph], changes: Mapping[str, LowRankChange]) -> dict[str, str]:
    """Return the changed modules whose weight is in graphs, but not used by a node of the module, with the reason."""
    found = {use.change.module for graph in graphs for use in find_uses(graph, changes)}
    users: dict[str, str] = {}
    for module, change in changes.items():
        if module in found:
            continue
        values = [
            (graph, weight.value) for graph in graphs for weight in graph.weights if weight.names[0] == change.weight
        ]
        paths = {
            graph.scopes[node.scope].path or "the model itself"
            for graph, value in values
            for node in graph.nodes
            if value in input_names(node)
        }
        users[module] = f"its weight is used by {', '.join(sorted(paths)[:3])}" if paths else "no node uses its weight"
    return users


def _matrices(graph: Graph, weight_values: set[str]) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield the values that are a weight, maybe transposed: the value of the weight, and whether it is."""
    found = {value: (value, False) for value in weight_values}
    yield from found.items()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, ValueArg) or source.name not in found:
            continue
        is_exchange = _exchanges_dimensions(graph, node)
        if is_exchange or graph.ops[node.op].name in _SAME:
            weight_value, is_transposed = found[source.name]
            for output in output_names(node):
                found[output] = weight_value, is_transposed != is_exchange
                yield output, found[output]


def _exchanges_dimensions(graph: Graph, node: Node) -> bool:
    operator = graph.ops[node.op].name
    if operator in _TRANSPOSED:
        return True
    if operator == "aten.transpose.int":
        return sorted(dim % 2 for dim in node.args[1:3] if isinstance(dim, int)) == [0, 1]
    if operator == "aten.permute.default" and isinstance(node.args[1], ListArg):
        return [dim % 2 for dim in node.args[1].items if isinstance(dim, int)] == [1, 0]
    return False


def _use(
    graph: Graph, node_number: int, matrix: str, weight: Weight, change: LowRankChange, *, is_transposed: bool
) -> Use:
    node = graph.nodes[node_number]
    op = graph.ops[node.op]
    where = f"{change.module}: the weight {change.weight}"
    if len(weight.shape) != 2 or weight.dtype not in ("float32", "float64", "bfloat16", "float16"):
        raise AdapterError(
            f"{where} is {weight.dtype}{list(weight.shape)}, expected a matrix of floats: {MERGE_ADVICE}"
        )
    rows_name = matrix_name = ""
    kind: Literal["linear", "conv1d", "embedding"] = "linear" if is_transposed else "conv1d"
    if op.name == "aten.linear.default":
        rows_name, matrix_name, kind = "input", "weight", "conv1d" if is_transposed else "linear"
    elif op.name == "aten.embedding.default" and not is_transposed:
        rows_name, matrix_name, kind = "indices", "weight", "embedding"
    elif op.name in _PRODUCTS:
        rows_name, matrix_name = _PRODUCTS[op.name]
    rows = parameter_argument(node, op, rows_name) if rows_name in op.parameters else None
    used = parameter_argument(node, op, matrix_name) if rows is not None else None
    if not isinstance(rows, ValueArg) or used != ValueArg(matrix):
        raise AdapterError(
            f"{where} is used by {op.name}, expected a linear layer, a Conv1D or an embedding: {MERGE_ADVICE}"
        )
    return Use(change=change, node=node_number, rows=rows.name, kind=kind, weight=weight)


# What to do with an adapter that no graph can apply.
MERGE_ADVICE: Final = (
    "merge it (merge_and_unload of peft), save the model, and export it with stagepack export --graph-from"
)


def _check_module(graph: Graph, use: Use, module_nodes: Sequence[Node]) -> None:
    """Refuse a module that computes more than the product, such as an embedding that is scaled: its change would be another one."""
    node = graph.nodes[use.node]
    made, given = set(output_names(node)), {use.rows}
    for other in module_nodes:
        if other is node:
            continue
        operator = graph.ops[other.op].name
        is_view = operator in VIEWS or operator.startswith(("aten.sym_size", "aten.dropout", "aten.alias"))
        if made.intersection(input_names(other)):
            if not is_view:
                raise AdapterError(f"{use.change.module}: computes {operator} behind its weight: {MERGE_ADVICE}")
            made.update(output_names(other))
        elif given.intersection(output_names(other)) and not is_view:
            raise AdapterError(f"{use.change.module}: computes {operator} before its weight: {MERGE_ADVICE}")
