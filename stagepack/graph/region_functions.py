"""The regions of a graph as functions: their inputs, their outputs, and where they are called."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagepack.format.folded import FoldedGraph, RegionCall
from stagepack.format.graph import Graph, Node
from stagepack.format.template import fill_template
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.analysis import GraphAnalysis


class RegionCallSite(NamedTuple):
    """A call of a region.

    Attributes:
        start: the number of its first node in the unfolded graph.
        region: the index of the region.
        hole_texts: the texts for its holes.
    """

    start: int
    region: int
    hole_texts: tuple[str, ...]


# The number of a node in the unfolded graph, or a call.
BodyItem = int | RegionCallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFunction:
    """A region as a function of the values that it uses and does not define.

    Attributes:
        items: its nodes and the regions that it calls, as its first call has them.
        first_call: the call with the first node.
        call_count: the number of its calls.
        length: the number of its nodes, those of the regions that it calls included.
        inputs: for each value that it takes, its first use: the offset of the node from the first node of the region, and the index
            among the values that this node uses.
        outputs: for each value that it returns, which something outside uses at one of its calls: the offset of the node, and the
            index among the values that this node defines.
    """

    items: tuple[BodyItem, ...]
    first_call: RegionCallSite
    call_count: int
    length: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    def input_names(self, graph: Graph, start_node: int) -> list[str]:
        """Return the names of the values that a call takes.

        Args:
            graph: the unfolded graph.
            start_node: the number of the first node of the call.

        Returns:
            A name for each entry of `inputs`.
        """
        return [input_names(graph.nodes[start_node + offset])[value_index] for offset, value_index in self.inputs]

    def output_names(self, graph: Graph, start_node: int) -> list[str]:
        """Return the names of the values that a call returns.

        Args:
            graph: the unfolded graph.
            start_node: the number of the first node of the call.

        Returns:
            A name for each entry of `outputs`.
        """
        return [
            list(output_names(graph.nodes[start_node + offset]))[value_index] for offset, value_index in self.outputs
        ]


def region_functions(folded: FoldedGraph, graph: Graph) -> tuple[list[BodyItem], list[RegionFunction]]:
    """Describe a folded graph as calls of functions.

    Args:
        folded: the folded graph.
        graph: the same graph, unfolded.

    Returns:
        The items of the graph in order, and a function for each region.
    """
    bodies = _Bodies(folded)
    graph_items = list(bodies.items(folded.nodes, 0))
    call_sites: list[list[RegionCallSite]] = [[] for _ in folded.regions]
    pending = [item for item in graph_items if isinstance(item, RegionCallSite)]
    for call in pending:
        call_sites[call.region].append(call)
        items = bodies.items(folded.regions[call.region].nodes, call.start, call.hole_texts)
        pending += (item for item in items if isinstance(item, RegionCallSite))
    last_uses = GraphAnalysis(graph).last_uses
    functions = []
    for region, length, calls in zip(folded.regions, bodies.lengths, call_sites, strict=True):
        first_call = min(calls)
        outputs = {output for call in calls for output in _outputs(graph, last_uses, call.start, length)}
        functions.append(
            RegionFunction(
                items=tuple(bodies.items(region.nodes, first_call.start, first_call.hole_texts)),
                first_call=first_call,
                call_count=len(calls),
                length=length,
                inputs=tuple(_inputs(graph, first_call.start, length)),
                outputs=tuple(sorted(outputs)),
            )
        )
    return graph_items, functions


class _Bodies:
    """The bodies of a folded graph.

    Attributes:
        lengths: the number of nodes of each region.
    """

    def __init__(self, folded: FoldedGraph) -> None:
        self.lengths: list[int] = []
        for region in folded.regions:
            self.lengths.append(
                sum(1 if isinstance(item, Node) else self.lengths[item.region] for item in region.nodes)
            )

    def items(
        self, body: Sequence[Node | RegionCall], start_node: int, hole_texts: Sequence[str] | None = None
    ) -> Iterator[BodyItem]:
        """Yield the items of the graph or, with the texts of a call, of a region whose first node has the number `start_node`."""
        for item in body:
            if isinstance(item, Node):
                yield start_node
                start_node += 1
            else:
                call_texts = (
                    item.holes if hole_texts is None else tuple(fill_template(hole, hole_texts) for hole in item.holes)
                )
                yield RegionCallSite(start_node, item.region, call_texts)
                start_node += self.lengths[item.region]


def _inputs(graph: Graph, start_node: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the first use of each value that a run of nodes does not define: the offset of the node, and the index of the value."""
    known_names: set[str] = set()
    for offset in range(length):
        for value_index, value_name in enumerate(input_names(graph.nodes[start_node + offset])):
            if value_name not in known_names:
                known_names.add(value_name)
                yield offset, value_index
        known_names.update(output_names(graph.nodes[start_node + offset]))


def _outputs(graph: Graph, last_uses: Mapping[str, int], start_node: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the values of a run of nodes that are used after it: the offset of the node, and the index of the value."""
    for offset in range(length):
        for value_index, value_name in enumerate(output_names(graph.nodes[start_node + offset])):
            if last_uses.get(value_name, -1) >= start_node + length:
                yield offset, value_index
