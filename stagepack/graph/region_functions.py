"""The regions of a graph as functions: what they take, what they give, and where they are called."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagepack.format.folded import FoldedGraph, RegionCall
from stagepack.format.graph import Graph, Node
from stagepack.format.template import fill_template
from stagepack.format.traversal import input_names, output_names


class RegionCallSite(NamedTuple):
    """A call of a region: the number of its first node in the graph, the region's own number, and the texts for its holes."""

    start: int
    region: int
    texts: tuple[str, ...]


# The number of a node, or a call.
BodyItem = int | RegionCallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFunction:
    """A region as a function of the values that it uses and does not make.

    Attributes:
        items: what it consists of, at its first place in the graph.
        first: the call that is there.
        calls: at how many places it stands.
        length: how many nodes it has, those of regions that it calls too.
        inputs: of the values that it takes, each where it is first used: the node, counted from the first, and the place among the
            values that this node is given.
        outputs: of the values that it gives, those that something outside uses at one of its places: the node, and the place among
            the values that this node makes.
    """

    items: tuple[BodyItem, ...]
    first: RegionCallSite
    calls: int
    length: int
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    def taken(self, graph: Graph, start: int) -> list[str]:
        """The names of the values that it takes where its first node has this number."""
        return [input_names(graph.nodes[start + node])[place] for node, place in self.inputs]

    def given(self, graph: Graph, start: int) -> list[str]:
        """The names of the values that it gives there."""
        return [list(output_names(graph.nodes[start + node]))[place] for node, place in self.outputs]


def region_functions(folded: FoldedGraph, graph: Graph) -> tuple[list[BodyItem], list[RegionFunction]]:
    """What a graph consists of, and its regions; `graph` is the unfolded one."""
    lengths: list[int] = []
    for region in folded.regions:
        lengths.append(sum(1 if isinstance(item, Node) else lengths[item.region] for item in region.nodes))
    calls_of: list[list[RegionCallSite]] = [[] for _ in lengths]

    def items(
        body: Sequence[Node | RegionCall], start: int, texts: tuple[str, ...] | None = None
    ) -> Iterator[BodyItem]:
        for item in body:
            if isinstance(item, Node):
                yield start
                start += 1
            else:
                inner = item.holes if texts is None else tuple(fill_template(hole, texts) for hole in item.holes)
                yield RegionCallSite(start, item.region, inner)
                start += lengths[item.region]

    whole = list(items(folded.nodes, 0))
    calls = [item for item in whole if isinstance(item, RegionCallSite)]
    for call in calls:
        calls_of[call.region].append(call)
        inside = items(folded.regions[call.region].nodes, call.start, call.texts)
        calls += (item for item in inside if isinstance(item, RegionCallSite))
    last_use = {name: number for number, node in enumerate(graph.nodes) for name in input_names(node)}
    last_use |= dict.fromkeys(graph.outputs, len(graph.nodes))
    found = []
    for number, region in enumerate(folded.regions):
        length = lengths[number]
        outputs = {output for call in calls_of[number] for output in _outputs(graph, call.start, length, last_use)}
        first = min(calls_of[number])
        found.append(
            RegionFunction(
                items=tuple(items(region.nodes, first.start, first.texts)),
                first=first,
                calls=len(calls_of[number]),
                length=length,
                inputs=tuple(_inputs(graph, first.start, length)),
                outputs=tuple(sorted(outputs)),
            )
        )
    return whole, found


def _inputs(graph: Graph, start: int, length: int) -> Iterator[tuple[int, int]]:
    known: set[str] = set()
    for node in range(length):
        for place, name in enumerate(input_names(graph.nodes[start + node])):
            if name not in known:
                known.add(name)
                yield node, place
        known.update(output_names(graph.nodes[start + node]))


def _outputs(graph: Graph, start: int, length: int, last_use: dict[str, int]) -> Iterator[tuple[int, int]]:
    for node in range(length):
        for place, name in enumerate(output_names(graph.nodes[start + node])):
            if last_use.get(name, -1) >= start + length:
                yield node, place
