"""What each stage takes, sends and writes when stages exchange values with their neighbours only. Imports no torch.

The schedules of torch.distributed.pipelining do that. So a value that skips stages passes through these, as do results of the model on
their way to the last stage, which computes the loss. Inputs of the model do not pass: each process has them. And what training and
evaluation mode mean to a graph: dropout, and norms with running statistics.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stagepack.errors import OptionError
from stagepack.format.aliasing import AliasClasses, alias_classes
from stagepack.format.graph import Graph, Node
from stagepack.format.manifest import Edge, EntryPoint, Stage
from stagepack.format.reader import Bundle
from stagepack.format.traversal import input_names, output_names, parameter_argument
from stagepack.format.tree import value_names

_DIFFERENTIABLE = ("float", "bfloat", "complex")
# Parameters of operators that a module passes its mode to, and probabilities with which they drop.
_MODE_PARAMETERS = ("train", "training", "use_input_stats")
_PROBABILITIES = ("p", "dropout")
_ATTENTION_PROBABILITY = "dropout_p"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """What one stage takes, returns and writes. Edges are in the order of the manifest."""

    entry: Stage
    model_inputs: tuple[Edge, ...]  # that it uses
    received: tuple[Edge, ...]  # from the stage before it
    sent: tuple[Edge, ...]  # to the next stage, or the results of the model
    is_linked: bool  # there is a stage before it
    links_next: bool  # there is a stage after it
    differentiable: frozenset[str]  # of all values, those that may need gradients
    written_inputs: frozenset[str]  # whose memory it writes
    state_outputs: frozenset[str]  # which share the memory of weights that it writes
    writes_buffers: bool  # and no parameters
    draws: bool  # from a random generator


def find_boundaries(bundle: Bundle, *, adapts: bool = False) -> tuple[StageBoundary, ...]:
    """Return the boundary of each stage. `adapts`: parameters that were frozen at the export may be trained."""
    entry_point = bundle.entry_point
    last_stage = len(entry_point.stages) - 1
    crossing = _crossing_edges(entry_point)
    graphs = _graphs(bundle)
    classes = [alias_classes(graph) for graph in graphs]
    differentiable = _find_differentiable(entry_point, graphs, classes, adapts=adapts)
    boundaries = []
    for number, (entry, graph, aliases) in enumerate(zip(entry_point.stages, graphs, classes, strict=True)):
        written_weights = [weight for weight in graph.weights if aliases.is_written(weight.value)]
        state = {aliases.representative(weight.value) for weight in written_weights}
        boundaries.append(
            StageBoundary(
                entry=entry,
                model_inputs=tuple(
                    edge for edge in entry_point.edges if edge.producer is None and number in edge.consumers
                ),
                received=crossing[number - 1] if number else (),
                sent=crossing[number],
                is_linked=number > 0,
                links_next=number < last_stage,
                differentiable=differentiable,
                written_inputs=frozenset(name for name in entry.inputs if aliases.is_written(name)),
                state_outputs=frozenset(name for name in entry.outputs if aliases.representative(name) in state),
                writes_buffers=bool(state) and all(weight.kind != "parameter" for weight in written_weights),
                draws=draws_numbers(graph),
            )
        )
    return tuple(boundaries)


def _crossing_edges(entry_point: EntryPoint) -> list[tuple[Edge, ...]]:
    """The values that each stage passes on, and last the results of the model."""
    last_stage = len(entry_point.stages) - 1
    results = tuple(dict.fromkeys(value_names(entry_point.signature.result)))
    edges = {edge.name: edge for edge in entry_point.edges}
    for edge_name in results:
        if edges[edge_name].producer is None:
            raise OptionError(f"the result {edge_name} is an input of the model: a schedule cannot return it")

    def crosses(edge: Edge, stage_number: int) -> bool:
        last_consumer = last_stage if edge.name in results else max(edge.consumers, default=-1)
        return edge.producer is not None and edge.producer <= stage_number < last_consumer

    crossing = [
        tuple(edge for edge in entry_point.edges if crosses(edge, stage_number)) for stage_number in range(last_stage)
    ]
    return [*crossing, tuple(edges[edge_name] for edge_name in results)]


def _find_differentiable(
    entry_point: EntryPoint, graphs: list[Graph], classes: list[AliasClasses], *, adapts: bool
) -> frozenset[str]:
    """The edges that may need gradients: floating-point values that are computed from trainable parameters.

    There may be more than need them, such as results of functions whose gradient is zero; never fewer.
    """
    dependent: set[str] = set()
    for graph, aliases in zip(graphs, classes, strict=True):
        # A write into a view makes all values that share its memory depend on what was written.
        dependent_memory = {aliases.representative(value_name) for value_name in dependent}
        dependent_memory |= {
            aliases.representative(weight.value)
            for weight in graph.weights
            if weight.trainable or (adapts and weight.kind == "parameter")
        }
        for node_number, node in enumerate(graph.nodes):
            used_memory = {aliases.representative(value_name) for value_name in input_names(node)}
            if not dependent_memory.isdisjoint(used_memory):
                dependent_memory.update(map(aliases.representative, output_names(node)))
                dependent_memory |= {root for root in used_memory if node_number in aliases.writers.get(root, ())}
        dependent |= {edge.name for edge in entry_point.edges if aliases.representative(edge.name) in dependent_memory}
    return frozenset(
        edge.name for edge in entry_point.edges if edge.name in dependent and edge.dtype.startswith(_DIFFERENTIABLE)
    )


def evaluation_scopes(bundle: Bundle) -> tuple[str, ...]:
    """Return the modules that were exported in evaluation mode, and do something else in training mode."""
    scopes = (
        graph.scopes[node.scope].path
        for graph in _graphs(bundle)
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


def _graphs(bundle: Bundle) -> list[Graph]:
    return [bundle.graph_file(number, module_calls=False).graph for number in range(len(bundle.stages))]


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
