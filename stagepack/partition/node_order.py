"""The order of the nodes in which a model is cut into consecutive stages: that of execution, but state is touched late.

Some models set all their counters, or the lengths of all their caches, before the first layer. State that is written must stay
in one stage, so in the order of execution no cut could separate the layers.
"""

from collections import defaultdict

from stagepack.format.graph import Graph
from stagepack.format.traversal import input_names, is_random, output_names
from stagepack.graph.aliasing import alias_classes


def late_state_sort_keys(graph: Graph) -> list[int]:
    """For each node the number of the node before which it comes.

    That is its own, or for a node that touches written memory, that of the first one that depends on it. Sorted by these keys,
    and by number where they are equal, every node comes after all that it depends on.
    """
    memory = alias_classes(graph)
    keys = list(range(len(graph.nodes)))
    first_use: dict[str, int] = defaultdict(
        lambda: len(keys)
    )  # of a value or of written memory, by the nodes that follow
    for number in reversed(range(len(graph.nodes))):
        node = graph.nodes[number]
        made, used = list(output_names(node)), list(input_names(node))
        touched = {memory.of.get(name, name) for name in (*made, *used) if memory.is_written(name)}
        if touched and not is_random(graph, node):
            needed = min(first_use[name] for name in (*made, *touched))
            keys[number] = needed if needed < len(keys) else number
        for name in (*used, *touched):
            first_use[name] = min(first_use[name], keys[number])
    return keys
