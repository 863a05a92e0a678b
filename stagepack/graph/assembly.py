"""Nodes of one or several graphs -> one graph, whose tables hold what these nodes use: in the order of first use, scopes sorted.

So a graph depends on its nodes alone, not on the way that they went: cut, joined, and cut again, it is the same.
"""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from stagepack.format.graph import Argument, Context, Graph, Node, Op, Scope, Subgraph, SubgraphArg, Value, Weight
from stagepack.format.shapes import Symbol, symbol_names
from stagepack.format.traversal import (
    input_names,
    map_arguments,
    map_node_arguments,
    sort_module_calls,
    subgraph_indices,
)


def canonical_graph(graph: Graph) -> Graph:
    """The graph of a whole model in the one form that `join` gives back: the tables in the order of use, and so the weights.

    Weights that no node uses follow by name.
    """
    used = dict.fromkeys(name for node in graph.nodes for name in input_names(node))
    place = {name: number for number, name in enumerate(used)}
    weights = sorted(graph.weights, key=lambda weight: (place.get(weight.value, len(place)), weight.names))
    assembly = GraphAssembler(graph.symbols)
    made = assembly.graph(graph, graph.nodes, graph.inputs, weights, graph.outputs)
    return replace(made, symbols=graph.symbols, calls=sort_module_calls(graph.calls))


class GraphAssembler:
    """A graph while it is put together."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        """`symbols` are all that its values may use."""
        self._symbols = symbols
        self._ops: dict[Op, int] = {}
        self._scopes: dict[Scope, int] = {}
        self._contexts: dict[Context, int] = {}
        self._subgraphs: list[Subgraph] = []
        self._index_of: dict[bytes, int] = {}  # of a subgraph, by its encoding: 1, 1.0 and true are equal in Python

    def graph(
        self,
        source: Graph,
        nodes: Iterable[Node],
        inputs: Sequence[Value],
        weights: Sequence[Weight],
        outputs: Sequence[str],
    ) -> Graph:
        """The graph of some nodes of one graph."""
        return self.finish([self.node(source, node) for node in nodes], inputs, weights, outputs)

    def finish(
        self, nodes: Sequence[Node], inputs: Sequence[Value], weights: Sequence[Weight], outputs: Sequence[str]
    ) -> Graph:
        """The graph of nodes that `node` has moved here."""
        inner = [node for subgraph in self._subgraphs for node in subgraph.nodes]
        values = (
            *inputs,
            *(value for node in (*nodes, *inner) for value in node.outputs if value is not None),
            *(value for subgraph in self._subgraphs for value in subgraph.inputs),
        )
        dims = (dim for value in values for dim in (*value.shape, *(() if value.expr is None else (value.expr,))))
        used = {name for dim in dims for name in symbol_names(dim)}
        scopes = sorted(self._scopes, key=lambda scope: (scope.path, scope.type))
        number_of = {scope: number for number, scope in enumerate(scopes)}
        place = [number_of[scope] for scope in self._scopes]
        return Graph(
            symbols=tuple(symbol for symbol in self._symbols if symbol.name in used),
            inputs=tuple(inputs),
            weights=tuple(weights),
            nodes=_in_scopes(nodes, place),
            outputs=tuple(outputs),
            subgraphs=tuple(replace(body, nodes=_in_scopes(body.nodes, place)) for body in self._subgraphs),
            ops=tuple(self._ops),
            scopes=tuple(scopes),
            contexts=tuple(self._contexts),
        )

    def node(self, source: Graph, node: Node) -> Node:
        """Move a node here from another graph."""
        if any(True for _ in subgraph_indices(node)):
            node = map_node_arguments(node, lambda leaf: self._leaf(source, leaf))
        return replace(
            node,
            op=self._ops.setdefault(source.ops[node.op], len(self._ops)),
            scope=self._scopes.setdefault(source.scopes[node.scope], len(self._scopes)),
            context=None if node.context is None else self._context(source, node.context),
        )

    def _context(self, source: Graph, index: int) -> int:
        context = source.contexts[index]
        if context.parent is not None:
            context = replace(context, parent=self._context(source, context.parent))
        return self._contexts.setdefault(context, len(self._contexts))

    def _leaf(self, source: Graph, leaf: Argument) -> Argument:
        """Move the subgraph that an argument names here; any other leaf stays as it is."""
        if not isinstance(leaf, SubgraphArg):
            return leaf
        subgraph = source.subgraphs[leaf.index]
        nodes = tuple(self.node(source, node) for node in subgraph.nodes)
        result = map_arguments(subgraph.result, lambda inner_leaf: self._leaf(source, inner_leaf))
        moved = replace(subgraph, nodes=nodes, result=result)
        index = self._index_of.setdefault(msgspec.msgpack.encode(moved), len(self._subgraphs))
        self._subgraphs[index:] = self._subgraphs[index:] or [moved]
        return SubgraphArg(index)


def _in_scopes(nodes: Iterable[Node], place: Sequence[int]) -> tuple[Node, ...]:
    """Nodes that refer to scopes by other indices."""
    return tuple(replace(node, scope=place[node.scope]) for node in nodes)
