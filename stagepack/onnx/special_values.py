"""Nodes of ONNX that ONNX Runtime runs otherwise than torch for NaN and infinity.

MaxPool of ONNX Runtime 1.31 leaves NaN out, and has the smallest finite number for windows of -inf. Two further poolings in each call
made a ResNet-18 18 % slower, so they run only if the sum of the elements is not finite. An interpolation spreads NaN and infinity to other
elements than in torch: it fails if the sum is not finite.
"""

import math

import onnx_ir as ir

from stagepack.onnx.branches import Nodes, node_prefix, replace_by_choice

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


_INTERPOLATIONS = {"GridSample", "Resize"}
_SPREADING = {*_INTERPOLATIONS, "InstanceNormalization", "STFT"}


def guard_special_values(model: ir.Model) -> None:
    """Put maximum poolings of floats without indices, and nodes that spread NaN otherwise than torch, into branches."""
    for node in list(model.graph.all_nodes()):
        elements = node.inputs[0] if node.inputs else None
        # The optimizer does not know all dtypes.
        if elements is None or (elements.dtype or node.outputs[0].dtype or ir.DataType.FLOAT) not in _FLOATS:
            continue
        has_indices = len(node.outputs) > 1 and node.outputs[1].uses()
        is_nearest = node.attributes.get_string("mode", "nearest") == "nearest"
        if node.op_type == "MaxPool" and not has_indices:
            _choose(node, elements, _special_maxima(node, elements))
        elif node.op_type in _SPREADING and not (node.op_type == "Resize" and is_nearest):
            _choose(node, elements, _failure(node, elements))


def _choose(node: ir.Node, elements: ir.Value, special: Nodes) -> None:
    """Run nodes of which the last one gives the output, in the place of a node, if the sum of the elements is not finite."""
    prefix = node_prefix(node)
    decision = Nodes(f"{prefix}/sum")
    total = decision.add("ReduceSum", [elements], {"keepdims": 0})
    is_special = decision.add("IsNaN", [decision.add("Sub", [total, total])])
    output = special.nodes[-1].outputs[0]
    output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
    graph = ir.Graph([], [output], nodes=special.nodes, name=f"{special.prefix}/graph")
    replace_by_choice(node, decision, is_special, graph)


def _failure(node: ir.Node, elements: ir.Value) -> Nodes:
    """Nodes that fail."""
    failure = Nodes(f"{node_prefix(node)}/expected_finite_elements")
    one_more = failure.add("Add", [failure.add("Size", [elements]), failure.integers(1, scalar=True)])
    impossible = failure.add("Reshape", [elements, failure.add("Reshape", [one_more, failure.integers(1)])])
    shape = node.outputs[0].shape
    failure.add("Reshape", [impossible, failure.integers(*[1] * (1 if shape is None else len(shape)))])
    return failure


def _special_maxima(node: ir.Node, elements: ir.Value) -> Nodes:
    """Nodes of a maximum pooling that keeps NaN and -inf."""
    special = Nodes(f"{node_prefix(node)}/special")

    def pooled(values: ir.Value) -> ir.Value:
        return special.add("MaxPool", [values], dict(node.attributes))

    # 2 for NaN, 0 for -inf, and else 1.
    lowest = _constant_like(special, -math.inf, elements)
    is_other = special.add("Not", [special.add("Equal", [elements, lowest])])
    flags = [special.add("CastLike", [flag, elements]) for flag in (special.add("IsNaN", [elements]), is_other)]
    kinds = pooled(special.add("Add", flags))
    is_lowest = special.add("Equal", [kinds, _constant_like(special, 0.0, elements)])
    is_nan = special.add("Greater", [kinds, _constant_like(special, 1.0, elements)])
    largest = special.add("Where", [is_lowest, lowest, pooled(elements)])
    special.add("Where", [is_nan, _constant_like(special, math.nan, elements), largest])
    return special


def _constant_like(nodes: Nodes, value: float, like: ir.Value) -> ir.Value:
    return nodes.add("CastLike", [nodes.constant(ir.tensor(value, dtype=ir.DataType.FLOAT)), like])
