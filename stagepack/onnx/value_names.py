"""Names of the values of an ONNX model: edges at the boundary, weights as in the original model, all others unique to the stage."""

from collections.abc import Iterator

import onnx_ir as ir

from stagepack.format.graph import Graph
from stagepack.format.onnx import NEXT_STATE_PREFIX, STATE_PREFIX, WRITTEN_PREFIX
from stagepack.onnx.functional_stage import StageWrites


def name_values(model: ir.Model, graph: Graph, writes: StageWrites, stage_number: int) -> None:
    """Rename all values and nodes of a model.

    Stages can then be merged, for example by ``onnx.compose``, apart from inputs and weights that several stages use.
    """
    weight_names = {weight.value: weight.names[0] for weight in graph.weights}
    state_names = [weight_names[value_name] for value_name in writes.state]
    input_names = [
        *(value.name for value in graph.inputs),
        *(STATE_PREFIX + weight_name for weight_name in state_names),
    ]
    output_names = [
        *graph.outputs,
        *(NEXT_STATE_PREFIX + weight_name for weight_name in state_names),
        *(WRITTEN_PREFIX + input_name for input_name in writes.inputs),
    ]
    boundary_names = {*input_names, *output_names}
    prefix = _stage_prefix(stage_number, [*weight_names.values()])
    new_names: dict[ir.Value, str] = {}
    for value in all_values(model):
        weight_name = weight_names.get(value.name or "") if value.is_initializer() else None
        if weight_name is None or weight_name in boundary_names:
            new_names[value] = f"{prefix}{value.name}"
        else:
            new_names[value] = weight_name
    new_names |= zip(model.graph.inputs, input_names, strict=True)
    new_names |= zip(model.graph.outputs, output_names, strict=True)
    # In two passes, since a new name may be the old name of another value.
    for value_index, value in enumerate(new_names):
        value.name = f"/{value_index}"
    for value, new_name in new_names.items():
        value.name = new_name
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name if node.outputs else None


def all_values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the values of a model and of the graphs in it, each once."""
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from attribute.as_graph().inputs


def _stage_prefix(stage_number: int, weight_names: list[str]) -> str:
    """The prefix of names that only this stage has: no weight begins with it."""
    prefix = f"s{stage_number}."
    while any(weight_name.startswith(prefix) for weight_name in weight_names):
        prefix = f"_{prefix}"
    return prefix
