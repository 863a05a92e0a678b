"""What passes from each stage to the next one when stages exchange values with their neighbours only. Imports no torch.

The schedules of torch.distributed.pipelining do that. So a value that skips stages passes through these, as do results of the model on
their way to the last stage, which computes the loss. Inputs of the model do not pass: each process has them.
"""

from dataclasses import dataclass

from stagepack.errors import OptionError
from stagepack.format.aliasing import alias_classes
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.traversal import input_names, output_names
from stagepack.format.tree import value_names

_DIFFERENTIABLE = ("float", "bfloat", "complex")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """What one stage takes and returns.

    Attributes:
        model_inputs: the inputs of the model that it uses, in the order of the manifest.
        received: the values that come from the stage before it, in the order of the manifest.
        sent: the values that it passes to the next stage; those of the last stage are the results of the model.
        is_linked: there is a stage before it.
        links_next: there is a stage after it.
    """

    model_inputs: tuple[Edge, ...]
    received: tuple[Edge, ...]
    sent: tuple[Edge, ...]
    is_linked: bool
    links_next: bool


def find_boundaries(entry_point: EntryPoint) -> tuple[StageBoundary, ...]:
    """Return the boundary of each stage."""
    last_stage = len(entry_point.stages) - 1
    results = tuple(dict.fromkeys(value_names(entry_point.signature.result)))
    edges = {edge.name: edge for edge in entry_point.edges}
    for edge_name in results:
        if edges[edge_name].producer is None:
            raise OptionError(f"the result {edge_name} is an input of the model: a schedule cannot return it")
    crossing: list[tuple[Edge, ...]] = [
        tuple(edge for edge in entry_point.edges if _crosses(edge, stage_number, last_stage, edge.name in results))
        for stage_number in range(last_stage)
    ]
    crossing.append(tuple(edges[edge_name] for edge_name in results))
    return tuple(
        StageBoundary(
            model_inputs=tuple(
                edge for edge in entry_point.edges if edge.producer is None and stage_number in edge.consumers
            ),
            received=crossing[stage_number - 1] if stage_number else (),
            sent=crossing[stage_number],
            is_linked=stage_number > 0,
            links_next=stage_number < last_stage,
        )
        for stage_number in range(last_stage + 1)
    )


def _crosses(edge: Edge, stage_number: int, last_stage: int, is_result: bool) -> bool:
    """Whether a value passes from a stage to the next one."""
    if edge.producer is None or edge.producer > stage_number:
        return False
    last_consumer = last_stage if is_result else max(edge.consumers, default=-1)
    return last_consumer > stage_number


def find_differentiable(bundle: Bundle, *, adapts: bool = False) -> frozenset[str]:
    """Return the names of the edges that may need gradients: floating-point values that are computed from trainable parameters.

    It may name more than need them, such as results of functions whose gradient is zero; never fewer.
    """
    dependent: set[str] = set()
    for stage_number in range(len(bundle.stages)):
        graph = bundle.graph_file(stage_number, module_calls=False).graph
        classes = alias_classes(graph)
        # A write into a view makes all values that share its memory depend on what was written.
        dependent_memory = {classes.representative(value_name) for value_name in dependent}
        dependent_memory |= {
            classes.representative(weight.value)
            for weight in graph.weights
            if weight.trainable or (adapts and weight.kind == "parameter")
        }
        for node_number, node in enumerate(graph.nodes):
            used_memory = {classes.representative(value_name) for value_name in input_names(node)}
            if not dependent_memory.isdisjoint(used_memory):
                dependent_memory.update(map(classes.representative, output_names(node)))
                dependent_memory |= {root for root in used_memory if node_number in classes.writers.get(root, ())}
        dependent |= {edge.name for edge in bundle.edges if classes.representative(edge.name) in dependent_memory}
    return frozenset(
        edge.name for edge in bundle.edges if edge.name in dependent and edge.dtype.startswith(_DIFFERENTIABLE)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMemory:
    """The memory that a stage writes in each call.

    Attributes:
        inputs: the inputs whose memory it writes.
        state_outputs: the outputs that share the memory of weights that it writes.
        has_buffers: it writes buffers, and no parameters.
    """

    inputs: frozenset[str]
    state_outputs: frozenset[str]
    has_buffers: bool


def find_written_memory(bundle: Bundle, stage_number: int) -> WrittenMemory:
    """Return the memory that a stage writes."""
    graph = bundle.graph_file(stage_number, module_calls=False).graph
    entry = bundle.stages[stage_number]
    classes = alias_classes(graph)
    written_weights = [weight for weight in graph.weights if classes.is_written(weight.value)]
    state = {classes.representative(weight.value) for weight in written_weights}
    return WrittenMemory(
        inputs=frozenset(name for name in entry.inputs if classes.is_written(name)),
        state_outputs=frozenset(name for name in entry.outputs if classes.representative(name) in state),
        has_buffers=bool(state) and all(weight.kind != "parameter" for weight in written_weights),
    )
