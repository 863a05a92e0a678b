"""Estimated costs of the nodes, values and weights of a graph, at the sizes of the example.

Times are estimates for a reference device, in picoseconds: 50 TFLOP/s, 1 TB/s of memory bandwidth, 2 µs to launch an operator. After the
launch, a node takes as long as the slower of arithmetic and memory (the roofline model: Williams, Waterman, Patterson, 2009,
doi:10.1145/1498765.1498785). Only the proportions of these times, and of the times of sending values, decide where a model is cut.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stagepack.format.graph import Graph, Node, value_bytes
from stagepack.format.shapes import example_sizes
from stagepack.partition.operator_costs import cost_source

_FLOPS_PER_PICOSECOND = 50
_BYTES_PER_PICOSECOND = 1
_LAUNCH_PICOSECONDS = 2_000_000
# 25 GB/s: PCIe 4.0 x16, as measured.
_PICOSECONDS_PER_BYTE_SENT = 40
_PICOSECONDS_PER_VALUE_SENT = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """What it costs to send a value from one device to another, in picoseconds; by default between reference devices."""

    per_value: int = _PICOSECONDS_PER_VALUE_SENT
    per_byte: float = _PICOSECONDS_PER_BYTE_SENT

    def sending_time(self, byte_count: int) -> int:
        """Return the time to send one value."""
        return round(self.per_value + byte_count * self.per_byte)


REFERENCE_LINK = LinkCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts:
    """The costs of a graph."""

    # Time of each node in picoseconds, at least 1.
    node_times: tuple[int, ...]
    # Bytes of each input of the graph and of each value that a node defines, by name.
    value_bytes: Mapping[str, int]
    # Bytes of the stored tensor of each weight, by the name of its value.
    weight_bytes: Mapping[str, int]
    link: LinkCosts = REFERENCE_LINK


def graph_costs(graph: Graph, stored_bytes: Mapping[str, int]) -> GraphCosts:
    """Estimate the costs of a graph, whose stored tensors have these bytes."""
    sizes = example_sizes(graph.symbols)
    node_values = (value for node in graph.nodes for value in node.outputs if value is not None)
    return GraphCosts(
        node_times=tuple(map(_node_time, graph.nodes)),
        value_bytes={value.name: value_bytes(value, sizes) for value in (*graph.inputs, *node_values)},
        weight_bytes={weight.value: stored_bytes[weight.stored] for weight in graph.weights},
    )


def estimated_operators(graphs: Iterable[Graph]) -> Mapping[str, int]:
    """Count the nodes whose costs are estimates, by the name of their operator."""
    counts: Counter[str] = Counter()
    for graph in graphs:
        estimated = {index: op.name for index, op in enumerate(graph.ops) if cost_source(op.name) == "estimated"}
        nodes = (*graph.nodes, *(node for subgraph in graph.subgraphs for node in subgraph.nodes))
        counts.update(estimated[node.op] for node in nodes if node.op in estimated)
    return dict(sorted(counts.items()))


def _node_time(node: Node) -> int:
    return estimated_time(-(-node.cost.flops // _FLOPS_PER_PICOSECOND), memory_time(node.cost.bytes))


def estimated_time(arithmetic_time: int, memory_time: int) -> int:
    """Return the time of a node that is launched, and then takes as long as the slower of arithmetic and memory; all in picoseconds."""
    busy_time = max(arithmetic_time, memory_time)
    return _LAUNCH_PICOSECONDS + busy_time if busy_time else 1


def memory_time(byte_count: int) -> int:
    """Estimate the time to read or write memory."""
    return -(-byte_count // _BYTES_PER_PICOSECOND)


def transfer_time(byte_count: int) -> int:
    """Estimate the time that bytes take from one device to another, without the latency of a transfer."""
    return byte_count * _PICOSECONDS_PER_BYTE_SENT
