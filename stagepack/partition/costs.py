"""What the nodes, values and weights of a graph cost, at the sizes of the example.

Times are those of a reference device, in picoseconds: 50 TFLOP/s, 1 TB/s of memory bandwidth, and 2 µs to launch an operator.
Once launched, a node takes as long as the slower of the two needs (the roofline model: Williams, Waterman, Patterson, 2009,
doi:10.1145/1498765.1498785). Only the proportion of these times, and of those that `partition` gives to what is sent, matters
to where a model is cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stagepack.format.example_sizes import example_sizes, value_bytes
from stagepack.format.graph import Graph, Node
from stagepack.format.traversal import input_names, output_names

_FLOPS_PER_PICOSECOND = 50
_BYTES_PER_PICOSECOND = 1
_LAUNCH = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts:
    """The costs of a graph.

    Attributes:
        times: of the nodes, in picoseconds, none of them 0.
        values: bytes of the inputs of the graph and of what the nodes make.
        weights: bytes of the stored tensor of each weight, by the name of its value.
    """

    times: tuple[int, ...]
    values: Mapping[str, int]
    weights: Mapping[str, int]


def graph_costs(graph: Graph, stored_bytes: Mapping[str, int]) -> GraphCosts:
    """The costs of a graph; `stored_bytes` gives the size of each stored tensor."""
    sizes = example_sizes(graph.symbols)
    made = (value for node in graph.nodes for value in node.outputs if value is not None)
    return GraphCosts(
        times=tuple(map(time_of, graph.nodes)),
        values={value.name: value_bytes(value, sizes) for value in (*graph.inputs, *made)},
        weights={weight.value: stored_bytes[weight.stored] for weight in graph.weights},
    )


def time_of(node: Node) -> int:
    """How long a node takes, in picoseconds; one that costs nothing, such as a view, launches nothing."""
    busy = max(-(-node.cost.flops // _FLOPS_PER_PICOSECOND), memory_time(node.cost.bytes))
    return _LAUNCH + busy if busy else 1


def memory_time(count: int) -> int:
    """How long it takes to read or write so many bytes of memory, in picoseconds."""
    return -(-count // _BYTES_PER_PICOSECOND)


def last_uses(graph: Graph) -> dict[str, int]:
    """The number of the last node that uses each value; results of the graph are used by a node after the last."""
    last = {name: number for number, node in enumerate(graph.nodes) for name in input_names(node)}
    return last | dict.fromkeys(graph.outputs, len(graph.nodes))


def activation_bytes(graph: Graph, costs: GraphCosts, memory_of: Mapping[str, str]) -> list[int]:
    """The bytes of the values that are alive while each node runs, each piece of memory once.

    `memory_of` names the piece of memory that a value lies in; a value that it lacks has its own.
    """
    last = last_uses(graph)
    born: dict[str, int] = {}
    dies: dict[str, int] = {}
    size: dict[str, int] = {}
    made = [(0, value.name) for value in graph.inputs]
    made += [(number, name) for number, node in enumerate(graph.nodes) for name in output_names(node)]
    for number, name in made:
        memory = memory_of.get(name, name)
        if memory in costs.weights:
            continue
        born[memory] = min(number, born.get(memory, number))
        dies[memory] = max(last.get(name, number), dies.get(memory, 0))
        size[memory] = max(costs.values[name], size.get(memory, 0))
    change = [0] * (len(graph.nodes) + 2)
    for memory, number in born.items():
        change[number] += size[memory]
        change[dies[memory] + 1] -= size[memory]
    alive, total = [], 0
    for number in range(len(graph.nodes)):
        total += change[number]
        alive.append(total)
    return alive
