"""What the nodes of a graph use and define, computed once for a graph and passed to all that need it."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stagepack.format.aliasing import (
    AliasClasses,
    ColocationGroup,
    alias_classes,
    colocation_groups,
    written_weight_names,
)
from stagepack.format.graph import Graph, Value
from stagepack.format.traversal import body_values, input_names, output_names, random_nodes


@dataclass(frozen=True, eq=False)
class GraphAnalysis:
    """A graph with the facts that follow from it; each is computed at its first use and kept.

    Nodes are identified by their numbers in execution order, from 0; values by their names. Uses inside of subgraphs do not count:
    a node passes to its subgraphs what they use.

    Examples:
        ::

            analysis = GraphAnalysis(graph)
            last_reader = analysis.users["hidden"][-1]
            groups = analysis.colocation_groups
    """

    graph: Graph  # the graph of a whole model or of a stage

    @cached_property
    def node_inputs(self) -> tuple[tuple[str, ...], ...]:
        """For each node, the distinct names of the values that it uses, in the order of its arguments."""
        return tuple([tuple(dict.fromkeys(input_names(node))) for node in self.graph.nodes])

    @cached_property
    def node_outputs(self) -> tuple[tuple[str, ...], ...]:
        """For each node, the names of the values that it defines."""
        return tuple([tuple(output_names(node)) for node in self.graph.nodes])

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """The inputs of the graph and the values that its nodes define, in this order, by name; weights are not among them."""
        return {value.name: value for value in body_values(self.graph)}

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """The number of the node that defines each value; inputs of the graph and weights have none."""
        return {
            value_name: node_number for node_number, outputs in enumerate(self.node_outputs) for value_name in outputs
        }

    @cached_property
    def users(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers of the nodes that use each value, ascending; a value that no node uses is missing."""
        users: dict[str, list[int]] = {}
        for node_number, inputs in enumerate(self.node_inputs):
            for value_name in inputs:
                users.setdefault(value_name, []).append(node_number)
        return {value_name: tuple(node_numbers) for value_name, node_numbers in users.items()}

    @cached_property
    def last_uses(self) -> Mapping[str, int]:
        """The number of the last node that uses each value; for an output of the graph, the number of nodes."""
        last_uses = {
            value_name: node_number for node_number, inputs in enumerate(self.node_inputs) for value_name in inputs
        }
        return last_uses | dict.fromkeys(self.graph.outputs, len(self.graph.nodes))

    @cached_property
    def random_nodes(self) -> frozenset[int]:
        """The numbers of the nodes that draw from a random generator, themselves or in a subgraph that they call."""
        return random_nodes(self.graph)

    @cached_property
    def alias_classes(self) -> AliasClasses:
        """Which values may share memory, and which nodes write it."""
        return alias_classes(self.graph)

    @cached_property
    def colocation_groups(self) -> tuple[ColocationGroup, ...]:
        """The nodes that must stay in one stage, because one of them writes memory that the others touch."""
        touched_values = list(map(tuple.__add__, self.node_inputs, self.node_outputs))
        return colocation_groups(self.graph, self.alias_classes, touched_values)

    @cached_property
    def written_weight_names(self) -> tuple[str, ...]:
        """The names in the model of the weights that nodes write, in the order of the weight table."""
        return written_weight_names(self.graph, self.alias_classes)

    def used_by(self, node_numbers: Iterable[int]) -> dict[str, None]:
        """Return the distinct names of the values that nodes use, in the order of first use."""
        return dict.fromkeys(
            itertools.chain.from_iterable(self.node_inputs[node_number] for node_number in node_numbers)
        )

    def defined_by(self, node_numbers: Iterable[int]) -> dict[str, None]:
        """Return the names of the values that nodes define, in the order of the nodes."""
        return dict.fromkeys(
            itertools.chain.from_iterable(self.node_outputs[node_number] for node_number in node_numbers)
        )
