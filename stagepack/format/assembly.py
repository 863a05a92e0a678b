"""Nodes of one or several graphs -> one graph, whose tables have what these nodes use: in the order of first use, scopes sorted.

So a graph depends on its nodes alone, not on its history: after it was cut, joined and cut again, it is the same.
"""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from stagepack.format.graph import Argument, Context, Graph, Node, Op, Scope, Subgraph, SubgraphArg, Value, Weight
from stagepack.format.shapes import Symbol, symbol_names
from stagepack.format.traversal import (
    body_values,
    map_arguments,
    map_node_arguments,
    subgraph_indices,
    subgraphs_with_scopes,
    with_scopes,
)


class GraphAssembler:
    """A graph while it is assembled: `add_node` copies each node, then `finish` returns the graph."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self._symbols = symbols
        self._ops: dict[Op, int] = {}
        self._scopes: dict[Scope, int] = {}
        self._contexts: dict[Context, int] = {}
        self._subgraphs: list[Subgraph] = []
        # By encoding, since 1, 1.0 and True are equal in Python.
        self._subgraph_indices: dict[bytes, int] = {}
        # The subgraphs that were copied, by the identity of their graph and their index in it. The graph is kept, and so its identity.
        self._copied_subgraphs: dict[tuple[int, int], tuple[Graph, SubgraphArg]] = {}

    def graph(
        self,
        source: Graph,
        nodes: Iterable[Node],
        inputs: Sequence[Value],
        weights: Sequence[Weight],
        outputs: Sequence[str],
    ) -> Graph:
        """Assemble the graph of some nodes of one graph."""
        return self.finish([self.add_node(source, node) for node in nodes], inputs, weights, outputs)

    def finish(
        self, nodes: Sequence[Node], inputs: Sequence[Value], weights: Sequence[Weight], outputs: Sequence[str]
    ) -> Graph:
        """Assemble the graph of nodes that `add_node` returned."""
        scopes = sorted(self._scopes, key=lambda scope: (scope.path, scope.type))
        sorted_indices = {scope: index for index, scope in enumerate(scopes)}
        new_scopes = [sorted_indices[scope] for scope in self._scopes]
        used_symbols = self._used_symbols(nodes, inputs)
        return Graph(
            symbols=tuple(symbol for symbol in self._symbols if symbol.name in used_symbols),
            inputs=tuple(inputs),
            weights=tuple(weights),
            nodes=with_scopes(nodes, new_scopes),
            outputs=tuple(outputs),
            subgraphs=subgraphs_with_scopes(self._subgraphs, new_scopes),
            ops=tuple(self._ops),
            scopes=tuple(scopes),
            contexts=tuple(self._contexts),
        )

    def add_node(self, source: Graph, node: Node) -> Node:
        """Copy a node, and the entries of tables that it uses, from another graph."""
        if source.subgraphs and any(True for _ in subgraph_indices(node)):
            node = map_node_arguments(node, lambda leaf: self._copy_subgraph(source, leaf))
        return replace(
            node,
            op=self._ops.setdefault(source.ops[node.op], len(self._ops)),
            scope=self._scopes.setdefault(source.scopes[node.scope], len(self._scopes)),
            context=None if node.context is None else self._copy_context(source, node.context),
        )

    def _used_symbols(self, nodes: Sequence[Node], inputs: Sequence[Value]) -> set[str]:
        node_values = (value for node in nodes for value in node.outputs if value is not None)
        values = (*inputs, *node_values, *(value for subgraph in self._subgraphs for value in body_values(subgraph)))
        types = {(value.shape, value.expr) for value in values}  # few, each many times
        dims = (dim for shape, expr in types for dim in (*shape, *(() if expr is None else (expr,))))
        return {symbol_name for dim in dims for symbol_name in symbol_names(dim)}

    def _copy_context(self, source: Graph, context_index: int) -> int:
        context = source.contexts[context_index]
        if context.parent is not None:
            context = replace(context, parent=self._copy_context(source, context.parent))
        return self._contexts.setdefault(context, len(self._contexts))

    def _copy_subgraph(self, source: Graph, leaf: Argument) -> Argument:
        """Copy the subgraph that an argument refers to; any other argument stays as it is."""
        if not isinstance(leaf, SubgraphArg):
            return leaf
        source_key = id(source), leaf.index
        if source_key not in self._copied_subgraphs:
            self._copied_subgraphs[source_key] = source, self._new_subgraph(source, leaf.index)
        return self._copied_subgraphs[source_key][1]

    def _new_subgraph(self, source: Graph, subgraph_index: int) -> SubgraphArg:
        """Copy a subgraph with those that it calls; one that is equal to an earlier copy becomes the same one."""
        subgraph = source.subgraphs[subgraph_index]
        nodes = tuple(self.add_node(source, node) for node in subgraph.nodes)
        result = map_arguments(subgraph.result, lambda inner_leaf: self._copy_subgraph(source, inner_leaf))
        copied = replace(subgraph, nodes=nodes, result=result)
        index = self._subgraph_indices.setdefault(msgspec.msgpack.encode(copied), len(self._subgraphs))
        if index == len(self._subgraphs):
            self._subgraphs.append(copied)
        return SubgraphArg(index)
