"""Nodes with all that they refer to by index: operator, scope, contexts and subgraphs."""

import hashlib

from msgspec.msgpack import encode
from msgspec.structs import replace

from stagepack.format.graph import (
    Argument,
    Context,
    Graph,
    Node,
    Subgraph,
    SubgraphArg,
)
from stagepack.format.traversal import leaf_arguments, map_arguments, map_node_arguments, subgraph_indices


class NodeContents:
    """The contents of the nodes of a graph, which are equal for nodes that are the same in two graphs with other tables."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # By digest: a subgraph that calls another one twice, which does so too, is as long as all paths through them.
        self._subgraphs: list[bytes] = []

    def content(self, node: Node) -> bytes:
        """Return the content of a node, encoded: in Python 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
        contexts: list[Context] = []
        index = node.context
        while index is not None:
            contexts.append(replace(self._graph.contexts[index], parent=None))
            index = self._graph.contexts[index].parent
        called = (
            [self._subgraph(subgraph_index) for subgraph_index in subgraph_indices(node)]
            if self._graph.subgraphs
            else []
        )
        rows = self._graph.ops[node.op], self._graph.scopes[node.scope]
        node = replace(node, op=0, scope=0, context=None)
        return encode((map_node_arguments(node, _without_index) if called else node, *rows, contexts, called))

    def _subgraph(self, subgraph_index: int) -> bytes:
        # A subgraph calls only those before it (G6).
        for subgraph in self._graph.subgraphs[len(self._subgraphs) : subgraph_index + 1]:
            self._subgraphs.append(self._digest(subgraph))
        return self._subgraphs[subgraph_index]

    def _digest(self, subgraph: Subgraph) -> bytes:
        results = list(leaf_arguments(subgraph.result))
        called = [self._subgraphs[leaf.index] for leaf in results if isinstance(leaf, SubgraphArg)]
        nodes = [self.content(node) for node in subgraph.nodes]
        return hashlib.sha256(
            encode((subgraph.inputs, nodes, map_arguments(subgraph.result, _without_index), called))
        ).digest()


def _without_index(leaf: Argument) -> Argument:
    return SubgraphArg(0) if isinstance(leaf, SubgraphArg) else leaf
