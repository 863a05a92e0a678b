"""A graph and the stage of each node -> the stages as graphs, and the edges between them.

A value goes straight from where it is made to every stage that uses it. Weights go to every stage that uses them.
Names of values stay as they are, so joining the stages gives the graph back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stagepack.format.graph import (
    Argument,
    Context,
    DictArg,
    Graph,
    ListArg,
    Node,
    Op,
    Scope,
    SliceArg,
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    Weight,
)
from stagepack.format.manifest import Edge
from stagepack.format.shapes import symbols_in
from stagepack.format.walk import subgraphs_used, values_made, values_used
from stagepack.split.policy import Assignment
from stagepack.split.rematerialize import rematerialize_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The stages in order, and the values that cross a boundary: inputs of the model first, then in the order of their making."""

    stages: tuple[Graph, ...]
    edges: tuple[Edge, ...]


def cut(graph: Graph, assignment: Assignment) -> Cut:
    """Cut a graph into the stages that a function of `policy` assigned."""
    stage_of, count = assignment
    parts = rematerialize_sizes(
        graph,
        [
            [node for node, stage in zip(graph.nodes, stage_of, strict=True) if stage == number]
            for number in range(count)
        ],
    )
    weights = _weights(graph, parts)
    edges = tuple(_edges(graph, parts, weights))
    values = {value.name: value for value in (*graph.inputs, *_made(graph))}
    return Cut(
        stages=tuple(
            _stage(
                graph,
                parts[number],
                weights[number],
                inputs=tuple(values[edge.name] for edge in edges if number in edge.consumers),
                outputs=tuple(edge.name for edge in edges if edge.producer == number),
            )
            for number in range(count)
        ),
        edges=edges,
    )


def _made(graph: Graph) -> Iterator[Value]:
    for node in graph.nodes:
        yield from (value for value in node.outputs if value is not None)


def _weights(graph: Graph, parts: Sequence[Sequence[Node]]) -> list[list[Weight]]:
    """The weights of each stage in the order of their first use; one that nobody uses goes where the weight before it went."""
    weights = {weight.value: weight for weight in graph.weights}
    stages: list[list[Weight]] = []
    home: dict[str, int] = {}
    for number, part in enumerate(parts):
        used = dict.fromkeys(name for node in part for name in values_used(node) if name in weights)
        stages.append([weights[name] for name in used])
        for name in used:
            home.setdefault(name, number)
    last = 0
    for weight in graph.weights:
        last = home.get(weight.value, last)
        if weight.value not in home:
            stages[last].append(weight)
    return stages


def _edges(graph: Graph, parts: Sequence[Sequence[Node]], weights: Sequence[Sequence[Weight]]) -> Iterator[Edge]:
    used: dict[str, list[int]] = {}
    made_in: dict[str, int] = {}
    for number, part in enumerate(parts):
        made = {name for node in part for name in values_made(node)}
        for name in made:
            made_in.setdefault(name, number)
        for name in dict.fromkeys(name for node in part for name in values_used(node)):
            if name not in made:
                used.setdefault(name, []).append(number)
    for value in graph.inputs:
        yield _edge(value, None, used.get(value.name, []))
    for value in _made(graph):
        if value.name in used or value.name in graph.outputs:
            yield _edge(value, made_in[value.name], used.get(value.name, []))
    for number, held in enumerate(weights):
        for weight in held:
            if weight.value in graph.outputs and not any(weight in earlier for earlier in weights[:number]):
                yield Edge(name=weight.value, dtype=weight.dtype, shape=weight.shape, producer=number)


def _edge(value: Value, producer: int | None, consumers: list[int]) -> Edge:
    return Edge(
        name=value.name,
        dtype=value.dtype,
        shape=value.shape,
        expr=value.expr,
        producer=producer,
        consumers=tuple(consumers),
    )


def _stage(
    graph: Graph, nodes: Sequence[Node], weights: Sequence[Weight], inputs: tuple[Value, ...], outputs: tuple[str, ...]
) -> Graph:
    """A graph of some nodes, with tables that hold what these use and nothing else, in the order of first use."""
    tables = _Tables(graph)
    kept = tuple(tables.node(node) for node in nodes)
    values = (
        *inputs,
        *(value for node in (*kept, *tables.inner_nodes) for value in node.outputs if value is not None),
        *tables.inner_values,
    )
    dims = (dim for value in values for dim in (*value.shape, *(() if value.expr is None else (value.expr,))))
    symbols = {name for dim in dims for name in symbols_in(dim)}
    return Graph(
        symbols=tuple(symbol for symbol in graph.symbols if symbol.name in symbols),
        inputs=inputs,
        weights=tuple(weights),
        nodes=kept,
        outputs=outputs,
        subgraphs=tuple(tables.subgraphs),
        ops=tuple(tables.ops),
        scopes=tuple(tables.scopes),
        contexts=tuple(tables.contexts),
    )


class _Tables:
    """The tables of one stage while its nodes are moved over."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: dict[Op, int] = {}
        self.scopes: dict[Scope, int] = {}
        self.contexts: dict[Context, int] = {}
        self.subgraphs: list[Subgraph] = []
        self.moved: dict[int, int] = {}

    @property
    def inner_nodes(self) -> Iterator[Node]:
        return (node for subgraph in self.subgraphs for node in subgraph.nodes)

    @property
    def inner_values(self) -> Iterator[Value]:
        return (value for subgraph in self.subgraphs for value in subgraph.inputs)

    def node(self, node: Node) -> Node:
        op, scope = self.graph.ops[node.op], self.graph.scopes[node.scope]
        if any(True for _ in subgraphs_used(node)):
            node = replace(
                node,
                args=tuple(map(self._argument, node.args)),
                kwargs=tuple((name, self._argument(argument)) for name, argument in node.kwargs),
            )
        return replace(
            node,
            op=self.ops.setdefault(op, len(self.ops)),
            scope=self.scopes.setdefault(scope, len(self.scopes)),
            context=None if node.context is None else self._context(node.context),
        )

    def _context(self, index: int) -> int:
        context = self.graph.contexts[index]
        if context.parent is not None:
            context = replace(context, parent=self._context(context.parent))
        return self.contexts.setdefault(context, len(self.contexts))

    def _argument(self, argument: Argument) -> Argument:
        if isinstance(argument, SubgraphArg):
            return SubgraphArg(self._subgraph(argument.index))
        if isinstance(argument, ListArg | TupleArg):
            return type(argument)(tuple(map(self._argument, argument.items)))
        if isinstance(argument, DictArg):
            return DictArg(tuple((key, self._argument(item)) for key, item in argument.items))
        if isinstance(argument, SliceArg):
            return SliceArg(*map(self._argument, (argument.start, argument.stop, argument.step)))
        return argument

    def _subgraph(self, index: int) -> int:
        if index not in self.moved:
            subgraph = self.graph.subgraphs[index]
            nodes = tuple(self.node(node) for node in subgraph.nodes)
            self.subgraphs.append(replace(subgraph, nodes=nodes, result=self._argument(subgraph.result)))
            self.moved[index] = len(self.subgraphs) - 1
        return self.moved[index]
