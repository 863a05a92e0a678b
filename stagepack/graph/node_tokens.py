"""The nodes of a graph as numbers that are equal for nodes which differ in names alone."""

import itertools
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from stagepack.format.folded_graph import rename_value
from stagepack.format.graph import Argument, Graph, Node, Value, ValueArg
from stagepack.format.traversal import body_values, map_arguments

_encode = msgspec.msgpack.Encoder().encode
_NAMELESS = ValueArg("")


class NodeTokens:
    """Nodes as numbers.

    Names are names of values, symbols, weights and scopes. Everything else counts: operators, arguments, the types of the values that
    are used and defined, and the classes of the modules that the nodes came from.

    Attributes:
        tokens: the number of each node; equal numbers mean equal nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._token_of_encoding: dict[bytes, int] = {}
        self._types = dict(self._value_types())
        # For each node, its names in the order of `_encode_node`.
        self._node_names: list[list[str]] = []
        self.tokens: list[int] = []
        for node in graph.nodes:
            node_names: list[str] = []
            self.tokens.append(self._token(self._encode_node(node, node_names)))
            self._node_names.append(node_names)

    def equality_key(self, start: int, end: int) -> object:
        """Return a key that is equal for runs of nodes that are equal up to names."""
        index_of: dict[str, int] = {}
        run_names = itertools.chain.from_iterable(self._node_names[start:end])
        indices = [index_of.setdefault(run_name, len(index_of)) for run_name in run_names]
        return tuple(self.tokens[start:end]), tuple(indices)

    def _token(self, encoding: bytes) -> int:
        return self._token_of_encoding.setdefault(encoding, len(self._token_of_encoding))

    def _value_types(self) -> Iterator[tuple[str, tuple[int, list[str]]]]:
        """Yield each value and weight with the token of its type, and the names of the symbols in it."""
        known: dict[object, tuple[int, list[str]]] = {}
        for value in body_values(self._graph):
            key = value.dtype, value.shape, value.expr
            if key not in known:
                value_names: list[str] = []
                token = self._token(_encode(_without_names(value, value_names)))
                known[key] = token, value_names[1:]
            yield value.name, known[key]
        for weight in self._graph.weights:
            base = None if weight.base is None else ""
            nameless = replace(weight, value="", names=("",) * len(weight.names), base=base)
            yield weight.value, (self._token(_encode(nameless)), [])

    def _encode_node(self, node: Node, node_names: list[str]) -> bytes:
        """Encode a node without its names, which are appended to `node_names`: of values used, with the symbols of their types, first."""
        types: list[int | None] = []

        def take(value_name: str) -> None:
            type_token, symbols = self._types[value_name]
            types.append(type_token)
            node_names.append(value_name)
            node_names.extend(symbols)

        def without_name(leaf: Argument) -> Argument:
            if type(leaf) is not ValueArg:
                return leaf
            take(leaf.name)
            return _NAMELESS

        args = tuple([map_arguments(argument, without_name) for argument in node.args])
        kwargs = [(key, map_arguments(argument, without_name)) for key, argument in node.kwargs]
        for value in node.outputs:
            if value is None:
                types.append(None)
            else:
                take(value.name)
        rest = node.op, node.unpack, node.context, node.cost, self._graph.scopes[node.scope].type
        return _encode((args, kwargs, types, rest))


def _without_names(value: Value, removed_names: list[str]) -> Value:
    """A value without its names, which are appended to `removed_names`, its own name first."""

    def remove(value_name: str) -> str:
        removed_names.append(value_name)
        return ""

    return rename_value(value, remove)
