"""Training and evaluation mode, as far as the graphs of a bundle tell: dropout, and norms with running statistics. Imports no torch."""

from collections.abc import Iterator

from stagepack.format.graph import Graph, Node
from stagepack.format.reader import Bundle
from stagepack.format.traversal import parameter_argument

# Parameters of operators that a module passes its mode to, and probabilities with which they drop.
_MODE_PARAMETERS = ("train", "training", "use_input_stats")
_PROBABILITIES = ("p", "dropout")
_ATTENTION_PROBABILITY = "dropout_p"


def evaluation_scopes(bundle: Bundle) -> tuple[str, ...]:
    """Return the modules that were exported in evaluation mode, and do something else in training mode."""
    scopes = (
        graph.scopes[node.scope].path
        for stage_number in range(len(bundle.stages))
        for graph in [bundle.graph_file(stage_number, module_calls=False).graph]
        for node in _all_nodes(graph)
        if _is_in_evaluation(graph, node) and _probability(graph, node) != 0
    )
    return tuple(dict.fromkeys(scopes))


def draws_numbers(graph: Graph) -> bool:
    """Whether a graph draws from a random generator."""
    return any(
        graph.ops[node.op].random and not _is_in_evaluation(graph, node) and not _drops_nothing(graph, node)
        for node in _all_nodes(graph)
    )


def _all_nodes(graph: Graph) -> Iterator[Node]:
    yield from graph.nodes
    for subgraph in graph.subgraphs:
        yield from subgraph.nodes


def _is_in_evaluation(graph: Graph, node: Node) -> bool:
    op = graph.ops[node.op]
    modes = [parameter_argument(node, op, parameter) for parameter in _MODE_PARAMETERS if parameter in op.parameters]
    return bool(modes) and not any(modes)


def _probability(graph: Graph, node: Node) -> object:
    """The probability with which a node drops; None where it has none."""
    op = graph.ops[node.op]
    named = [parameter for parameter in _PROBABILITIES if parameter in op.parameters]
    return parameter_argument(node, op, named[0]) if named else None


def _drops_nothing(graph: Graph, node: Node) -> bool:
    """Whether a node is an attention without dropout, which draws nothing."""
    op = graph.ops[node.op]
    return _ATTENTION_PROBABILITY in op.parameters and not parameter_argument(node, op, _ATTENTION_PROBABILITY)
