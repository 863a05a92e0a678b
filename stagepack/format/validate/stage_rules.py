"""The agreement of the graph of a stage with the manifest (SPEC G14, G17 and G18)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from stagepack.errors import Problem
from stagepack.format.aliasing import AliasClasses, alias_classes, may_write, written_weight_names
from stagepack.format.graph import Graph, Node, Value, ValueArg
from stagepack.format.manifest import Edge, EntryPoint, Stage
from stagepack.format.operators import ALLOWED_NAMESPACES, SIZE_OPERATOR, operator_namespace
from stagepack.format.rules import format_names
from stagepack.format.shapes import Dim, Symbol
from stagepack.format.traversal import body_values

# A broken rule and the message.
_Difference = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPointFacts:
    """What the manifest states of an entry point, by name."""

    edges: Mapping[str, Edge]
    symbols: Mapping[str, Symbol]
    # The graph file of the stage that states a weight as its state, by the name of the weight.
    state_owners: Mapping[str, str]

    @classmethod
    def of(cls, entry_point: EntryPoint) -> Self:
        """Collect the facts of an entry point."""
        return cls(
            edges={edge.name: edge for edge in entry_point.edges},
            symbols={symbol.name: symbol for symbol in entry_point.symbols},
            state_owners={name: stage.graph for stage in reversed(entry_point.stages) for name in stage.state},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """The graph of a stage, and what follows from it, computed once for all entry points that have the file."""

    graph: Graph
    flops: int  # the floating-point operations of its nodes
    namespaces: frozenset[str]  # the namespaces of its operators that the caller must allow
    types: Mapping[str, tuple[str, tuple[Dim, ...], Dim | None]]  # the dtype, shape and expr of each value, by name
    written_weights: tuple[str, ...]  # the first names of the weights that its nodes write
    written_inputs: tuple[str, ...]  # the names of the inputs that they write

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Derive what follows from a graph."""
        types = {value.name: (value.dtype, value.shape, value.expr) for value in body_values(graph)}
        types.update((weight.value, (weight.dtype, weight.shape, None)) for weight in graph.weights)
        # Most graphs write nothing; the alias classes of 2,500 nodes take 20 ms.
        classes = alias_classes(graph) if may_write(graph) else AliasClasses(representatives={}, writers={})
        return cls(
            graph=graph,
            flops=sum(node.cost.flops for node in graph.nodes),
            namespaces=frozenset(operator_namespace(op.name) for op in graph.ops) - ALLOWED_NAMESPACES,
            types=types,
            written_weights=written_weight_names(graph, classes),
            written_inputs=tuple(value.name for value in graph.inputs if classes.is_written(value.name)),
        )


def check_stage(stage_graph: StageGraph, stage: Stage, facts: EntryPointFacts) -> Iterator[Problem]:
    """Yield the problems of a stage whose graph and manifest do not agree."""
    for rule, message in (
        *_differences(stage_graph, stage, facts),
        *_state_differences(stage_graph, stage, facts),
        *_wrong_added_nodes(stage_graph.graph, stage),
    ):
        yield Problem(rule=rule, where=stage.graph, message=message)


def _differences(stage_graph: StageGraph, stage: Stage, facts: EntryPointFacts) -> Iterator[_Difference]:
    graph = stage_graph.graph
    if tuple(value.name for value in graph.inputs) != stage.inputs:
        yield "G14", f"the manifest lists the inputs {format_names(stage.inputs)}, the graph has other ones"
    if graph.outputs != stage.outputs:
        yield "G14", f"the manifest lists the outputs {format_names(stage.outputs)}, the graph has other ones"
    if len(graph.nodes) != stage.nodes:
        yield "G14", f"the manifest counts {stage.nodes} nodes, the graph has {len(graph.nodes)}"
    if stage_graph.flops != stage.flops:
        yield "G14", f"the manifest counts {stage.flops} flops, the nodes of the graph have {stage_graph.flops}"
    if set(stage.namespaces) != stage_graph.namespaces:
        yield "G14", f"the manifest lists the namespaces {format_names(stage.namespaces)}, the graph has other ones"
    for symbol in graph.symbols:
        if facts.symbols.get(symbol.name) != symbol:
            message = "is not in the manifest, or has another min, max or example there"
            yield "G14", f"the symbol {symbol.name[:80]} {message}"
    for edge_name in (*stage.inputs, *stage.outputs):
        edge, graph_type = facts.edges.get(edge_name), stage_graph.types.get(edge_name)
        if edge is not None and graph_type not in (None, (edge.dtype, edge.shape, edge.expr)):
            yield "G14", f"the value {edge_name[:80]} has another dtype, shape or expr than its edge"


def _state_differences(stage_graph: StageGraph, stage: Stage, facts: EntryPointFacts) -> Iterator[_Difference]:
    """Yield where the stated state is not what the nodes write, and where they write memory that other stages have."""
    weights = stage_graph.graph.weights
    if len(set(stage.state)) != len(stage.state) or not {weight.names[0] for weight in weights}.issuperset(stage.state):
        expected = "expected first names of its weights, each once"
        yield "G17", f"the manifest lists the state {format_names(stage.state)}: {expected}"
    if unstated := set(stage_graph.written_weights).difference(stage.state):
        yield (
            "G17",
            f"its nodes write the weights {format_names(sorted(unstated))}, which the manifest does not list as state",
        )
    for weight in weights:
        for owned_name in weight.owned_names:
            if (owner := facts.state_owners.get(owned_name, stage.graph)) != stage.graph:
                yield "G18", f"it has the weight {owned_name[:80]!r}, which is state of {owner}"
    for input_name in stage_graph.written_inputs:
        edge = facts.edges.get(input_name)
        if edge is not None and (edge.producer is not None or len(edge.consumers) != 1):
            yield "G18", f"its nodes write {input_name[:80]}, which another stage has too"


def _wrong_added_nodes(graph: Graph, stage: Stage) -> Iterator[_Difference]:
    """Yield the added nodes that are more than the reading of a size off an input of the stage."""
    inputs = {value.name: value for value in graph.inputs}
    for node_index, node in enumerate(graph.nodes[: stage.added]):
        if graph.ops[node.op].name != SIZE_OPERATOR or not _reads_size(node, inputs):
            yield (
                "G19",
                f"the added node {node_index} does not read a size off an input of the stage, or states another one",
            )


def _reads_size(node: Node, inputs: Mapping[str, Value]) -> bool:
    """Whether a node passes an input and one of its dimensions, and has the size of this dimension as its result."""
    match node:
        case Node(args=(ValueArg(name), int(dimension)), kwargs=(), outputs=(Value() as size,)) if name in inputs:
            shape = inputs[name].shape
            return (
                type(dimension) is int
                and 0 <= dimension < len(shape)
                and size.dtype == "symint"
                and shape[dimension] == size.expr
            )
    return False
