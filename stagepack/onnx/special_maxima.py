"""Maximum poolings that are right for NaN and -inf too.

MaxPool of ONNX Runtime 1.31 leaves NaN out, and has the smallest finite number for windows of -inf. Two further poolings in each call
made a ResNet-18 18 % slower, so they run only if the sum of the elements is not finite.
"""

import math

import onnx_ir as ir

from stagepack.onnx.branches import Nodes, node_prefix, replace_by_choice

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


def keep_special_maxima(model: ir.Model) -> None:
    """Put each maximum pooling of floats without indices into a branch, with one for special values in the other."""
    for node in list(model.graph.all_nodes()):
        elements = node.inputs[0] if node.op_type == "MaxPool" else None
        has_indices = len(node.outputs) > 1 and node.outputs[1].uses()
        if elements is not None and elements.dtype in _FLOATS and not has_indices:
            _put_into_branch(node, elements)


def _put_into_branch(node: ir.Node, elements: ir.Value) -> None:
    prefix = node_prefix(node)
    decision, special = Nodes(f"{prefix}/sum"), Nodes(f"{prefix}/special")
    total = decision.add("ReduceSum", [elements], {"keepdims": 0})
    is_special = decision.add(
        "Not", [decision.add("Equal", [decision.add("Sub", [total, total]), _number(decision, 0.0, elements)])]
    )

    def pooled(values: ir.Value) -> ir.Value:
        return special.add("MaxPool", [values], dict(node.attributes))

    # 2 for NaN, 0 for -inf, and else 1.
    lowest = _number(special, -math.inf, elements)
    is_other = special.add("Not", [special.add("Equal", [elements, lowest])])
    flags = [special.add("CastLike", [flag, elements]) for flag in (special.add("IsNaN", [elements]), is_other)]
    kinds = pooled(special.add("Add", flags))
    is_lowest = special.add("Equal", [kinds, _number(special, 0.0, elements)])
    is_nan = special.add("Greater", [kinds, _number(special, 1.0, elements)])
    largest = special.add("Where", [is_lowest, lowest, pooled(elements)])
    output = special.add("Where", [is_nan, _number(special, math.nan, elements), largest])
    output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
    graph = ir.Graph([], [output], nodes=special.nodes, name=f"{prefix}/special")
    replace_by_choice(node, decision, is_special, graph)


def _number(nodes: Nodes, number: float, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return nodes.constant(ir.tensor(number, dtype=like.dtype))
