"""The order of the nodes in which a model is cut into consecutive stages: execution order, except that written state is touched late.

Some models set all their counters, or the lengths of all their caches, before the first layer. State that is written must stay
in one stage, so in execution order no cut could separate the layers.
"""

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from stagepack.format.graph import Graph
from stagepack.graph.analysis import GraphAnalysis


@dataclass(frozen=True)
class NodeOrder:
    """An order of the nodes of a graph in which every node comes after all that it depends on.

    Attributes:
        keys: for each node, the number of the node in front of which it is placed, or its own number. The nodes are sorted by these
            keys, and by their numbers where keys are equal.
    """

    keys: Sequence[int]

    @cached_property
    def node_numbers(self) -> Sequence[int]:
        """The number of the node at each position."""
        return sorted(range(len(self.keys)), key=self.keys.__getitem__)

    @cached_property
    def positions(self) -> Sequence[int]:
        """The position of each node."""
        positions = [0] * len(self.keys)
        for position, node_number in enumerate(self.node_numbers):
            positions[node_number] = position
        return positions

    @property
    def is_execution_order(self) -> bool:
        """Whether the position of each node is its number."""
        return all(position == node_number for position, node_number in enumerate(self.node_numbers))

    def position_in_front_of(self, node_number: int) -> int:
        """Return the number of nodes that this order places before a split in front of a node."""
        return bisect.bisect_left(sorted(self.keys), node_number)

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with its nodes in this order."""
        return replace(graph, nodes=tuple([graph.nodes[node_number] for node_number in self.node_numbers]))


def execution_order(graph: Graph) -> NodeOrder:
    """Return the order in which the nodes of a graph run."""
    return NodeOrder(range(len(graph.nodes)))


def late_state_order(analysis: GraphAnalysis) -> NodeOrder:
    """Move nodes that touch written memory in front of the first node that depends on them; all others stay."""
    classes = analysis.alias_classes
    if not classes.writers:
        return execution_order(analysis.graph)
    node_count = len(analysis.graph.nodes)
    keys = list(range(node_count))
    # The least key of the nodes that use a value or touch written memory, among those seen so far: the nodes are visited backwards.
    first_uses: dict[str, int] = defaultdict(lambda: node_count)
    for node_number in reversed(range(node_count)):
        used_names, defined_names = analysis.node_inputs[node_number], analysis.node_outputs[node_number]
        touched = {
            classes.representative(value_name)
            for value_name in (*defined_names, *used_names)
            if classes.is_written(value_name)
        }
        if touched and node_number not in analysis.random_nodes:
            first_use = min(first_uses[value_name] for value_name in (*defined_names, *touched))
            keys[node_number] = first_use if first_use < node_count else node_number
        for value_name in (*used_names, *touched):
            first_uses[value_name] = min(first_uses[value_name], keys[node_number])
    return NodeOrder(keys)
