"""Nodes of ONNX that ONNX Runtime runs otherwise than torch for NaN and infinity.

MaxPool of ONNX Runtime 1.31 leaves NaN out, and has the smallest finite number for windows of -inf. Two further poolings in each call
made a ResNet-18 18 % slower, so they run only if the sum of the elements is not finite. An interpolation spreads NaN and infinity to other
elements than in torch, and a recurrent layer makes 1 of NaN: they fail if the sum is not finite. An attention does not fail:
a text of a batch whose keys are not finite must not end those beside it.
"""

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir

from stagepack.roads.onnx.branches import Nodes, node_prefix, replace_by_choice

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}
# Torch saturates only casts to `float8_e4m3fn`.
_UNSATURATED = {ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E5M2FNUZ}
_INTERPOLATIONS = {"GridSample", "Resize"}
_SPREADING = {*_INTERPOLATIONS, "InstanceNormalization", "STFT", "DFT", "GRU", "LSTM", "RNN"}
# The self check finds weights that are not finite, but for computed ones.
_WEIGHTED = {"Conv", "GRU", "LSTM", "RNN"}
# The position of the integers among the inputs of a recurrent layer.
_LENGTHS = 4


def guard_special_values(model: ir.Model) -> None:
    """Put maximum poolings of floats without indices into branches, and let nodes that treat NaN otherwise than torch fail."""
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
            _expect_finite_inputs(node, elements, [elements, *_computed_weights(node)])
        elif (
            node.op_type == "Conv"
            and any(node.attributes.get_ints("pads", []))
            and (weights := _computed_weights(node))
        ):
            # The product of infinity and a 0 of the padding is NaN in one runtime and left out in the other.
            _expect_finite_inputs(node, elements, weights)


def _computed_weights(node: ir.Node) -> list[ir.Value]:
    """The floats that a node takes beside its elements, and that are computed from the inputs of the stage."""
    others = [
        value
        for position, value in enumerate(node.inputs)
        if value is not None and position not in (0, _LENGTHS) and node.op_type in _WEIGHTED
    ]
    return [value for value in others if _depends_on_inputs(value)]


def _depends_on_inputs(value: ir.Value) -> bool:
    found, remaining = {value}, [value]
    while remaining:
        current = remaining.pop()
        if current.is_graph_input():
            return True
        producer = current.producer()
        used = {value for value in (() if producer is None else producer.inputs) if value is not None} - found
        found |= used
        remaining += used
    return False


def keep_overflow(model: ir.Model) -> None:
    """Let casts to floats of 8 bits make infinity or NaN of numbers that are out of range, where torch does."""
    for node in model.graph.all_nodes():
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) in _UNSATURATED:
            node.attributes["saturate"] = ir.AttrInt64("saturate", 0)


def bound_clips(model: ir.Model) -> None:
    """Let a ``Clip`` of floats without one of its bounds have infinity there: it takes the largest finite number, also for infinity."""
    for node in list(model.graph.all_nodes()):
        elements = node.inputs[0] if node.op_type == "Clip" else None
        if elements is None or (elements.dtype or node.outputs[0].dtype or ir.DataType.FLOAT) not in _FLOATS:
            continue
        bounds = Nodes(f"{node_prefix(node)}/bounds")
        lowest, highest = ([*node.inputs[1:], None, None])[:2]
        lowest = _constant_like(bounds, -math.inf, elements) if lowest is None else lowest
        highest = _constant_like(bounds, math.inf, elements) if highest is None else highest
        assert node.graph is not None
        node.graph.insert_before(node, bounds.nodes)
        node.resize_inputs(3)
        node.replace_input_with(1, lowest)
        node.replace_input_with(2, highest)


def _choose(node: ir.Node, elements: ir.Value, special: Nodes) -> None:
    """Run nodes of which the last one gives the output, in the place of a node, if the sum of some elements is not finite."""
    decision = Nodes(f"{node_prefix(node)}/sum")
    is_special = _has_infinite_sum(decision, [elements])
    used = [output for output in node.outputs if output.name]
    outputs = [last.outputs[0] for last in special.nodes[-len(used) :]]
    for output, replaced in zip(outputs, used, strict=True):
        output.type, output.shape = replaced.type, replaced.shape
    graph = ir.Graph([], outputs, nodes=special.nodes, name=f"{special.prefix}/graph")
    replace_by_choice(node, decision, is_special, graph)


def _has_infinite_sum(nodes: Nodes, summed: Sequence[ir.Value]) -> ir.Value:
    sums = [nodes.add("ReduceSum", [elements], {"keepdims": 0}) for elements in summed]
    total = functools.reduce(lambda first, second: nodes.add("Add", [first, second]), sums)
    return nodes.add("IsNaN", [nodes.add("Sub", [total, total])])


def _expect_finite_inputs(node: ir.Node, elements: ir.Value, summed: Sequence[ir.Value]) -> None:
    """Let a node fail if the sum of some of its inputs is not finite."""
    check = _finite_check(node)
    node.replace_input_with(0, _checked(check, elements, summed))
    assert node.graph is not None
    node.graph.insert_before(node, check.nodes)


def _finite_check(node: ir.Node) -> Nodes:
    return Nodes(f"{node_prefix(node)}/expected_finite_elements")


def _checked(check: Nodes, value: ir.Value, summed: Sequence[ir.Value]) -> ir.Value:
    """A value, by a reshape to its own shape, which is impossible if a sum is not finite."""
    excess = check.add("Cast", [_has_infinite_sum(check, summed)], {"to": ir.DataType.INT64})
    shape = check.add("Add", [check.add("Shape", [value]), excess])
    checked = check.add("Reshape", [value, shape], {"allowzero": 1})
    checked.type, checked.shape = value.type, value.shape
    return checked


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
