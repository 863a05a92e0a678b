"""The regions of a graph as functions: their inputs, their outputs, and where they are called."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagepack.format.folded_graph import fill_template, trivially_folded
from stagepack.format.graph import FoldedGraph, Graph, Node, RegionCall, Value, Weight
from stagepack.format.shapes import Dim
from stagepack.format.traversal import all_values, input_names, output_names
from stagepack.graph.analysis import GraphAnalysis


class RegionCallSite(NamedTuple):
    """A call of a region."""

    start: int  # the number of its first node in the unfolded graph
    region: int
    hole_texts: tuple[str, ...]


# The number of a node in the unfolded graph, or a call.
BodyItem = int | RegionCallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFunction:
    """A region as a function of the values that it uses and does not define."""

    items: tuple[BodyItem, ...]  # its nodes and the regions that it calls, as its first call has them
    first_call: RegionCallSite  # the call with the first node
    call_count: int
    length: int  # the number of its nodes, with the nodes of the regions that it calls
    # For each value that it takes, its first use: the offset of the node from the first node of the region, and the index among the
    # values that this node uses.
    inputs: tuple[tuple[int, int], ...]
    # For each value that it returns, which something outside uses at one of its calls: the offset of the node, and the index among the
    # values that this node defines.
    outputs: tuple[tuple[int, int], ...]

    def input_names(self, graph: Graph, start_node: int) -> list[str]:
        """Return the names of the values that a call takes."""
        return [input_names(graph.nodes[start_node + offset])[value_index] for offset, value_index in self.inputs]

    def output_names(self, graph: Graph, start_node: int) -> list[str]:
        """Return the names of the values that a call returns."""
        return [
            list(output_names(graph.nodes[start_node + offset]))[value_index] for offset, value_index in self.outputs
        ]


def region_functions(folded: FoldedGraph, graph: Graph) -> tuple[list[BodyItem], list[RegionFunction]]:
    """Describe a folded graph as calls of functions: the items of the graph in order, and a function for each region."""
    calls_of_graph = _Calls(folded)
    last_uses = GraphAnalysis(graph).last_uses
    functions = []
    for length, calls in zip(calls_of_graph.lengths, calls_of_graph.of_region, strict=True):
        first_call = min(calls)
        outputs = {output for call in calls for output in _outputs(graph, last_uses, call.start, length)}
        functions.append(
            RegionFunction(
                items=tuple(calls_of_graph.items(first_call)),
                first_call=first_call,
                call_count=len(calls),
                length=length,
                inputs=tuple(_inputs(graph, first_call.start, length)),
                outputs=tuple(sorted(outputs)),
            )
        )
    return calls_of_graph.graph_items, functions


def folded_functions(folded: FoldedGraph, graph: Graph) -> FoldedGraph:
    """Return a folded graph if each of its regions is one function, which all its calls can run; otherwise the graph without regions.

    A region is text: names of two values may be equal at one of its calls and differ at another one, or stand for values of other shapes.
    """
    if not folded.regions:
        return folded
    calls = _Calls(folded)
    types = value_types(graph)
    for region_calls, length in zip(calls.of_region, calls.lengths, strict=True):
        patterns = {_call_pattern(graph, types, call.start, length) for call in region_calls}
        if len(patterns) > 1:
            return trivially_folded(graph)
    return folded


def _call_pattern(
    graph: Graph, types: Mapping[str, Value | Weight], start_node: int, length: int
) -> tuple[object, ...]:
    """What must be alike at all calls of a function: which names are equal, and the types of the values that it takes."""
    numbers: dict[str, int] = {}
    pattern = tuple(
        numbers.setdefault(value_name, len(numbers))
        for node in graph.nodes[start_node : start_node + length]
        for value_name in (*input_names(node), *output_names(node))
    )
    inputs = [
        types[input_names(graph.nodes[start_node + offset])[value_index]]
        for offset, value_index in _inputs(graph, start_node, length)
    ]
    shapes = tuple((value.dtype, *[dim if isinstance(dim, int) else None for dim in value.shape]) for value in inputs)
    return (pattern, shapes, tuple(size_sources(inputs).items()))


def value_types(graph: Graph) -> dict[str, Value | Weight]:
    """Return the entries of the values and weights of a graph by their names."""
    types: dict[str, Value | Weight] = {value.name: value for value in all_values(graph)}
    return types | {weight.value: weight for weight in graph.weights}


def size_sources(inputs: Sequence[Value | Weight]) -> dict[int, tuple[int, int]]:
    """Return the symbolic integers among inputs that are sizes of tensors among them: input -> (input, dimension)."""
    sources: dict[Dim, tuple[int, int]] = {}
    values = [(index, value) for index, value in enumerate(inputs) if isinstance(value, Value)]
    for index, value in values:
        for dim, size in enumerate(value.shape):
            sources.setdefault(size, (index, dim))
    return {index: sources[value.expr] for index, value in values if value.expr is not None and value.expr in sources}


class _Calls:
    """The items of a folded graph, the number of nodes of each region, and the calls of each."""

    def __init__(self, folded: FoldedGraph) -> None:
        self.lengths: list[int] = []
        for region in folded.regions:
            item_lengths = (1 if isinstance(item, Node) else self.lengths[item.region] for item in region.nodes)
            self.lengths.append(sum(item_lengths))
        self.graph_items = list(self._items(folded.nodes, 0))
        self._regions = folded.regions
        self.of_region: list[list[RegionCallSite]] = [[] for _ in folded.regions]
        pending = [item for item in self.graph_items if isinstance(item, RegionCallSite)]
        for call in pending:
            self.of_region[call.region].append(call)
            pending += (item for item in self.items(call) if isinstance(item, RegionCallSite))

    def items(self, call: RegionCallSite) -> Iterator[BodyItem]:
        """Yield the items of a region at one of its calls."""
        return self._items(self._regions[call.region].nodes, call.start, call.hole_texts)

    def _items(
        self, body: Sequence[Node | RegionCall], start_node: int, hole_texts: Sequence[str] | None = None
    ) -> Iterator[BodyItem]:
        for item in body:
            if isinstance(item, Node):
                yield start_node
                start_node += 1
                continue
            filled_texts = (
                item.holes if hole_texts is None else tuple(fill_template(hole, hole_texts) for hole in item.holes)
            )
            yield RegionCallSite(start_node, item.region, filled_texts)
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
