"""Layers that run only if there is something to run on: without elements ONNX Runtime ends the process, or runs without end.

An ``If`` around a recurrent layer answers with zeros for no rows, as torch does. One around a convolution fails.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from stagepack.roads.onnx.branches import Nodes, node_prefix, replace_by_choice

_RECURRENT = {"GRU", "LSTM"}
_IMAGES_IN_3D = 5  # dimensions


def guard_empty_inputs(model: ir.Model) -> None:
    """Put each layer with which ONNX Runtime may end the process, or run without end, into a branch."""
    for node in list(model.graph.all_nodes()):
        if node.op_type in _RECURRENT and not _has_elements(node.inputs[0]):
            _put_into_branch(node)
        elif _is_unsafe_convolution(node):
            _fail_without_elements(node)


def _is_unsafe_convolution(node: ir.Node) -> bool:
    """Whether a convolution may have no channels or an empty kernel, or a transposed one in 3D an empty image.

    Of ONNX Runtime 1.31, measured with each size set to 0: the first ones run without end, the last one ends by SIGSEGV.
    """
    if node.op_type == "Conv":
        image, kernel = (value.shape if value is not None else None for value in node.inputs[:2])
        return image is None or kernel is None or not _are_positive([image[1], *kernel])
    if node.op_type == "ConvTranspose":
        image = node.inputs[0].shape if node.inputs[0] is not None else None
        return image is None or (len(image) == _IMAGES_IN_3D and not _are_positive(list(image)[1:]))
    return False


def _are_positive(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _has_elements(sequences: ir.Value | None) -> bool:
    shape = None if sequences is None else sequences.shape
    return shape is not None and _are_positive(list(shape)[:2])


def _put_into_branch(node: ir.Node) -> None:
    """Put a recurrent layer into a branch, with zeros in the other."""
    sequences, prefix = node.inputs[0], node_prefix(node)
    assert sequences is not None
    count = Nodes(f"{prefix}/count")
    elements = count.add("ReduceProd", [count.add("Shape", [sequences], {"start": 0, "end": 2})], {"keepdims": 0})
    used = [index for index, output in enumerate(node.outputs) if output.name]
    replace_by_choice(node, count, _is_zero(count, elements), _zeros_graph(node, sequences, used, prefix))


def _fail_without_elements(node: ir.Node) -> None:
    """Put a convolution into a branch, with a node that fails in the other."""
    image, kernel = node.inputs[:2]
    assert image is not None
    assert kernel is not None
    prefix = node_prefix(node)
    count, failure = Nodes(f"{prefix}/count"), Nodes(f"{prefix}/expected_elements")
    sizes = count.add("Concat", [count.add("Shape", [image], {"start": 1}), count.add("Shape", [kernel])], {"axis": 0})
    elements = count.add("ReduceProd", [sizes], {"keepdims": 0})
    zero = failure.add("CastLike", [failure.constant(ir.tensor(0.0)), image])
    # No elements cannot become one. Their number is not known before, so that nothing is computed when the model is loaded.
    empty = failure.add("Expand", [zero, failure.add("Reshape", [elements, failure.integers(1)])])
    rank = len(image.shape) if image.shape is not None else 1
    output = failure.add("Reshape", [empty, failure.integers(*[1] * rank)])
    output.type = node.outputs[0].type
    failing = ir.Graph([], [output], nodes=failure.nodes, name=f"{prefix}/expected_elements")
    replace_by_choice(node, count, _is_zero(count, elements), failing)


def _is_zero(count: Nodes, elements: ir.Value) -> ir.Value:
    return count.add("Equal", [elements, count.integers(0, scalar=True)])


def _zeros_graph(node: ir.Node, sequences: ir.Value, used: Sequence[int], prefix: str) -> ir.Graph:
    """The answers of a layer without elements: zeros, and its states as they are."""
    nodes = Nodes(f"{prefix}/zeros")
    directions = 2 if node.attributes.get_string("direction", "forward") == "bidirectional" else 1
    hidden_size = node.attributes.get_int("hidden_size", 0)
    outputs = []
    for index in used:
        old_output = node.outputs[index]
        # The initial states are the inputs 5 and 6; the outputs are all states, and the last ones.
        initial = node.inputs[4 + index] if index and len(node.inputs) > 4 + index else None
        if initial is not None:
            output = nodes.add("Identity", [initial])
        else:
            rows = nodes.add("Shape", [sequences], {"start": 1, "end": 2})
            dims = [nodes.integers(directions), rows, nodes.integers(hidden_size)]
            if index == 0:
                dims.insert(0, nodes.add("Shape", [sequences], {"start": 0, "end": 1}))
            zero = nodes.add("CastLike", [nodes.constant(ir.tensor(0.0)), sequences])
            output = nodes.add("Expand", [zero, nodes.add("Concat", dims, {"axis": 0})])
        output.type, output.shape = old_output.type, old_output.shape
        outputs.append(output)
    return ir.Graph([], outputs, nodes=nodes.nodes, name=f"{prefix}/zeros")
