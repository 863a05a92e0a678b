"""The memory of the values that are alive while each node runs."""

import itertools

from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.costs import GraphCosts
from stagepack.partition.node_order import NodeOrder


def activation_bytes(analysis: GraphAnalysis, costs: GraphCosts, order: NodeOrder) -> list[int]:
    """Compute the memory of the values that are alive while each node runs.

    Values that may share memory count once, with the largest of them; weights do not count.
    """
    graph, representative = analysis.graph, analysis.alias_classes.representative
    births = [(0, value.name) for value in graph.inputs]
    last_uses: dict[str, int] = {}
    for position, node_number in enumerate(order.node_numbers):
        births += ((position, value_name) for value_name in analysis.node_outputs[node_number])
        for value_name in analysis.node_inputs[node_number]:
            last_uses[value_name] = position
    last_uses |= dict.fromkeys(graph.outputs, len(graph.nodes))
    first_position: dict[str, int] = {}
    last_position: dict[str, int] = {}
    memory_bytes: dict[str, int] = {}
    for position, value_name in births:
        memory = representative(value_name)
        if memory not in costs.weight_bytes:
            first_position.setdefault(memory, position)
            last_position[memory] = max(last_uses.get(value_name, position), last_position.get(memory, 0))
            memory_bytes[memory] = max(costs.value_bytes[value_name], memory_bytes.get(memory, 0))
    changes = [0] * (len(graph.nodes) + 2)
    for memory, position in first_position.items():
        changes[position] += memory_bytes[memory]
        changes[last_position[memory] + 1] -= memory_bytes[memory]
    return list(itertools.accumulate(changes[: len(graph.nodes)]))
