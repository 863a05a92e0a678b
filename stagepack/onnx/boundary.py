"""The types and sizes of the inputs and outputs of an ONNX model."""

from collections.abc import Mapping

import onnx_ir as ir

from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import Edge
from stagepack.format.onnx import (
    COMPLEX_PART_DTYPES,
    NEXT_STATE_PREFIX,
    STATE_PREFIX,
    WRITTEN_PREFIX,
    onnx_element_type,
)
from stagepack.format.shapes import format_dim


def describe_boundary(model: ir.Model, graph: Graph, edges: Mapping[str, Edge]) -> None:
    """Give the inputs and outputs of a model the types and sizes of the edges and weights that they are."""
    weights = {weight.names[0]: weight for weight in graph.weights}
    for output in list(model.graph.outputs):
        _cast_output(model, output, _boundary_value(output.name, edges, weights).dtype)
    for value in (*model.graph.inputs, *model.graph.outputs):
        described = _boundary_value(value.name, edges, weights)
        sizes = [dim if isinstance(dim, int) else format_dim(dim) for dim in described.shape]
        # ONNX has no complex tensors here: the last dimension is real and imaginary part.
        value.shape = ir.Shape([*sizes, 2] if described.dtype in COMPLEX_PART_DTYPES else sizes)


def _boundary_value(value_name: str | None, edges: Mapping[str, Edge], weights: Mapping[str, Weight]) -> Edge | Weight:
    """The edge or weight that an input or output of this name is."""
    assert value_name is not None
    for prefix in (STATE_PREFIX, NEXT_STATE_PREFIX):
        if value_name.startswith(prefix):
            return weights[value_name.removeprefix(prefix)]
    return edges[value_name.removeprefix(WRITTEN_PREFIX)]


def _cast_output(model: ir.Model, output: ir.Value, dtype: str) -> None:
    """Cast an output to its type where it differs: torch's exporter makes symbolic floats float32."""
    element_type = ir.DataType(onnx_element_type(dtype) or 0)
    if output.dtype == element_type:
        return
    output_name, output.name = output.name, f"{output.name}/given"
    cast = ir.node("Cast", [output], {"to": element_type})
    cast.outputs[0].name, cast.outputs[0].dtype = output_name, element_type
    model.graph.append(cast)
    model.graph.outputs[model.graph.outputs.index(output)] = cast.outputs[0]
