"""Stages of a bundle -> one graph: that of the whole model, as it was before the cut, or that of consecutive stages."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from msgspec.structs import replace

from stagepack.errors import CutError
from stagepack.format.assembly import GraphAssembler
from stagepack.format.graph import Graph, Node, Value, Weight
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.rules import raise_problems
from stagepack.format.traversal import input_names, output_names, sort_module_calls
from stagepack.format.tree import value_names
from stagepack.format.validate.whole_model import check_whole_model


def canonical_graph(graph: Graph) -> Graph:
    """Return the graph of a whole model in the one form that `join_stages` returns."""
    canonical = GraphAssembler(graph.symbols).graph(graph, graph.nodes, graph.inputs, (), graph.outputs)
    weights = _in_order_of_use(graph.weights, graph.nodes)
    return replace(canonical, symbols=graph.symbols, weights=weights, calls=sort_module_calls(graph.calls))


def _in_order_of_use(weights: Iterable[Weight], nodes: Iterable[Node]) -> tuple[Weight, ...]:
    used_names = dict.fromkeys(value_name for node in nodes for value_name in input_names(node))
    ranks = {value_name: rank for rank, value_name in enumerate(used_names)}
    return tuple(sorted(weights, key=lambda weight: (ranks.get(weight.value, len(ranks)), weight.names)))


def join_stages(entry_point: EntryPoint, stages: Sequence[Graph]) -> Graph:
    """Join the graphs of all stages, in order.

    A node that several stages compute is in the result once, and a node that a cut added is not in it.
    """
    raise_problems(check_whole_model(entry_point, stages))
    inputs = [edge for edge in entry_point.edges if edge.producer is None]
    outputs = dict.fromkeys(value_names(entry_point.signature.result))
    joined, _ = join_consecutive(entry_point, range(len(stages)), stages, inputs, tuple(outputs))
    return canonical_graph(replace(joined, symbols=entry_point.symbols))


def join_consecutive(
    entry_point: EntryPoint, numbers: range, graphs: Sequence[Graph], inputs: Sequence[Edge], outputs: Sequence[str]
) -> tuple[Graph, list[int]]:
    """Join the graphs of consecutive stages.

    A node that several of them compute is in the result once. A node that a cut added, which reads a size, is in it if the stages
    neither define nor receive the size.

    numbers: the numbers of the stages, whose `graphs` these are.
    inputs: the values that the joined stages take.
    outputs: the names of the values that they return.

    The result is the graph, and the position of each node in the whole model, -1 for an added one.
    """
    placed, copied_positions = _placed_nodes(entry_point, numbers, graphs)
    positions = {name: node.position for node in placed for name in output_names(node.node) if node.position >= 0}
    received = {edge.name for edge in inputs}
    nodes = _in_running_order(placed, copied_positions, positions, received)
    weights: dict[str, Weight] = {}
    for weight in (weight for graph in graphs for weight in graph.weights):
        if weights.setdefault(weight.value, weight) != weight:
            raise CutError(f"the weight {weight.names[0][:80]!r} differs in two stages: export the model again")
    # A value that one of these stages computes again and another one receives: the nodes of the one are all that its memory needs.
    own_names = {*positions, *weights}
    taken_names = own_names | received
    values = [
        Value(
            name=_free_name(edge.name, taken_names) if edge.name in own_names else edge.name,
            dtype=edge.dtype,
            shape=edge.shape,
            expr=edge.expr,
        )
        for edge in inputs
    ]
    calls = {call.path: call for graph in graphs for call in graph.calls}
    assembler = GraphAssembler(entry_point.symbols)
    joined_nodes = [assembler.add_node(node.graph, node.node) for node in nodes]
    joined = assembler.finish(joined_nodes, values, _in_order_of_use(weights.values(), joined_nodes), outputs)
    return replace(joined, calls=sort_module_calls(calls.values())), [node.position for node in nodes]


class _PlacedNode(NamedTuple):
    """A node of one of several stages."""

    stage_number: int
    position: int  # in the whole model; -1 for a node that a cut added
    graph: Graph
    node: Node


def _placed_nodes(
    entry_point: EntryPoint, numbers: range, graphs: Sequence[Graph]
) -> tuple[list[_PlacedNode], set[int]]:
    """The nodes of some stages, in the order in which the stages run them, each node of the whole model once.

    The positions of the nodes that several of the stages compute come with them.
    """
    placed: list[_PlacedNode] = []
    seen_positions, copied_positions = set[int](), set[int]()
    for stage_number, graph in zip(numbers, graphs, strict=True):
        entry = entry_point.stages[stage_number]
        if len(graph.nodes) > entry.added and not entry.places:
            raise CutError(
                "the bundle does not record the positions of its nodes in the whole model: export the model again"
            )
        for position, node in zip(entry.node_numbers, graph.nodes, strict=True):
            if position in seen_positions:
                copied_positions.add(position)
                continue
            if position >= 0:
                seen_positions.add(position)
            placed.append(_PlacedNode(stage_number, position, graph, node))
    return placed, copied_positions


def _in_running_order(
    placed: Sequence[_PlacedNode],
    copied_positions: AbstractSet[int],
    positions: Mapping[str, int],
    received: AbstractSet[str],
) -> list[_PlacedNode]:
    """Nodes in the order of the whole model, with a node that reads a size behind the one that defines its tensor.

    Where a node uses a size before its tensor is there, because a stage runs the node later than the whole model does: in the order of
    the stages, with each size as the first of them reads or computes it.
    """

    def place_in_model(node: _PlacedNode) -> tuple[int, bool]:
        if node.position >= 0:
            return node.position, False
        [tensor_name] = input_names(node.node)
        return positions.get(tensor_name, -1), True

    def place_in_stages(node: _PlacedNode) -> tuple[int, int]:
        return node.stage_number, node.position

    in_model = list(_without_repeated_sizes(sorted(placed, key=place_in_model), {*positions, *received}))
    if _defines_before_use(in_model):
        return in_model
    in_stages = list(_without_repeated_sizes(sorted(placed, key=place_in_stages), received))
    if any(node.position in copied_positions and node.graph.ops[node.node.op].mutates for node in placed):
        reason = "write memory which they compute again"
    elif not _defines_before_use(in_stages):
        reason = "compute values again before their sizes are known"
    else:
        return in_stages
    raise CutError(f"stages that {reason} cannot be joined: cut the bundle again with stagepack.recut")


def _without_repeated_sizes(placed: Iterable[_PlacedNode], known_names: AbstractSet[str]) -> Iterator[_PlacedNode]:
    """Yield nodes without those that read a size which is known or defined before, or that compute one which was read before."""
    defined_names, read_names = set(known_names), set[str]()
    for node in placed:
        names = set(output_names(node.node))
        if names and names <= (defined_names if node.position < 0 else read_names):
            continue
        if node.position < 0:
            read_names |= names
        defined_names |= names
        yield node


def _defines_before_use(nodes: Sequence[_PlacedNode]) -> bool:
    """Whether each node comes after those that define the values which it uses."""
    index_of = {name: index for index, node in enumerate(nodes) for name in output_names(node.node)}
    return all(index_of.get(name, -1) < index for index, node in enumerate(nodes) for name in input_names(node.node))


def _free_name(name: str, taken_names: set[str]) -> str:
    """A name for a value of which the stages have their own."""
    free = next(candidate for n in itertools.count() if (candidate := f"{name}_received_{n}") not in taken_names)
    taken_names.add(free)
    return free
