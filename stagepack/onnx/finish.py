"""A model of torch's ONNX exporter -> the ONNX model of a stage as bundles have it (SPEC section 10)."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import optimize_ir

from stagepack.format.graph import Graph, Weight
from stagepack.format.weights import TensorSpec
from stagepack.onnx.boundary import describe_boundary
from stagepack.onnx.empty_inputs import guard_empty_inputs
from stagepack.onnx.external_weights import move_weights_out
from stagepack.onnx.functional_stage import StageWrites
from stagepack.onnx.linear_layers import use_stored_weights
from stagepack.onnx.stage_place import StagePlace, describe_place
from stagepack.onnx.value_names import all_values, name_values
from stagepack.torch_internals import NO_MODULE_PREFIX

_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFiles:
    """The content of the files of an ONNX model.

    Attributes:
        model: the ONNX file.
        tensors: the tensors that are in no weight file of the stage, with their bytes.
    """

    model: bytes
    tensors: Mapping[TensorSpec, bytes]

    def read(self, tensor_name: str) -> list[bytes]:
        """Return the bytes of a tensor in one piece."""
        return [content for spec, content in self.tensors.items() if spec.name == tensor_name]


def finish_model(model: ir.Model, graph: Graph, writes: StageWrites, stage_place: StagePlace) -> OnnxFiles:
    """Give a model of torch's exporter the names, types and weights of its stage."""
    weights = {weight.value: weight for weight in graph.weights}
    # The argument that `FunctionalStage` does not use.
    del model.graph.inputs[0]
    _optimize(model, weights)
    guard_empty_inputs(model)
    _allow_zero_sizes(model)
    tensors = move_weights_out(model, weights, stage_place)
    module_paths = {node: _module_path(node) for node in model.graph.all_nodes()}
    _clear_debug_information(model)
    name_values(model, graph, writes, stage_place.stage_number)
    describe_boundary(model, graph, stage_place.edges)
    describe_place(model, stage_place, module_paths)
    return OnnxFiles(model=ir.to_proto(model).SerializeToString(deterministic=True), tensors=tensors)


def _optimize(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Optimize a model as torch's exporter would, without changing its weights, which stay those of the weight files.

    Functions are inlined; torch makes them of branches and subgraphs.
    """
    initializers = model.graph.initializers.values()
    weight_tensors = {value: value.const_value for value in initializers if value.name in weights}
    # The optimizer cannot fold a tensor that it does not know.
    for value in weight_tensors:
        value.const_value = None
    use_stored_weights(model)
    optimize_ir(model, onnx_shape_inference=False)
    for value, tensor in weight_tensors.items():
        value.const_value = tensor


def _allow_zero_sizes(model: ir.Model) -> None:
    """Let a 0 in the shape of a `Reshape` be a size of 0, where all of the shape is sizes: by default it copies a size of the input."""
    for node in model.graph.all_nodes():
        shape = node.inputs[1] if node.op_type == "Reshape" else None
        maker = None if shape is None else shape.producer()
        if maker is None or maker.op_type != "Concat":
            continue
        constants = [ir.convenience.get_const_tensor(part) for part in maker.inputs if part is not None]
        if all(constant is None or bool((constant.numpy() > 0).all()) for constant in constants):
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)


def _module_path(node: ir.Node) -> str:
    """The path of the module that a node came from; the last scope that torch's exporter records is the node itself."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES_KEY, "[]"))
    return scopes[-2] if len(scopes) > 1 and not scopes[-2].startswith(NO_MODULE_PREFIX) else ""


def _clear_debug_information(model: ir.Model) -> None:
    """Remove what torch's exporter records for debugging: stack traces, and sizes under names of its own."""
    common.ClearMetadataAndDocStringPass()(model)
    model.graph.metadata_props.clear()
    for value in all_values(model):
        value.metadata_props.clear()
        if value.is_graph_input() or value.is_graph_output():
            # A loop needs the rank of its inputs.
            shape = value.shape
            value.shape = shape and ir.Shape([dim if isinstance(dim, int) else None for dim in shape])
        elif not value.is_initializer():
            value.shape = value.type = None
