"""Nodes of ONNX that replace a node by a choice between it and a graph that is right for special inputs."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir


class Nodes:
    """Nodes that are added one after another, with names that no other value has."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[ir.Node] = []

    def add(self, operator: str, inputs: Sequence[ir.Value], attributes: dict[str, Any] | None = None) -> ir.Value:
        """Add a node, and return its output."""
        node = ir.node(operator, inputs, attributes or {})
        node.outputs[0].name = f"{self.prefix}/{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Add a tensor."""
        return self.add("Constant", [], {"value": tensor})

    def integers(self, *sizes: int, scalar: bool = False) -> ir.Value:
        """Add a tensor of integers, or an integer."""
        return self.constant(ir.tensor(sizes[0] if scalar else list(sizes), dtype=ir.DataType.INT64))


def node_prefix(node: ir.Node) -> str:
    """Return the name of the first used output of a node; the names of its replacement begin with it."""
    return next(output.name for output in node.outputs if output.name)


def replace_by_choice(node: ir.Node, decision: Nodes, is_special: ir.Value, special_graph: ir.Graph) -> None:
    """Replace a node by an ``If`` with the same outputs: another graph where a condition holds, which nodes compute, and else the node."""
    old_outputs = list(node.outputs)
    output_names = [output.name or "" for output in old_outputs]
    prefix = node_prefix(node)
    used = [index for index, output_name in enumerate(output_names) if output_name]
    layer = ir.Node(node.domain, node.op_type, node.inputs, node.attributes.values(), num_outputs=len(old_outputs))
    for output, old_output in zip(layer.outputs, old_outputs, strict=True):
        output.name = f"{old_output.name}/layer" if old_output.name else ""
        output.type, output.shape = old_output.type, old_output.shape
    layer_graph = ir.Graph([], [layer.outputs[index] for index in used], nodes=[layer], name=f"{prefix}/layer")
    choice = ir.node(
        "If", [is_special], {"then_branch": special_graph, "else_branch": layer_graph}, num_outputs=len(used)
    )
    graph = node.graph
    assert graph is not None
    graph.insert_before(node, [*decision.nodes, choice])
    choice.metadata_props.update(node.metadata_props)
    for index, new_output in zip(used, choice.outputs, strict=True):
        old_output = old_outputs[index]
        new_output.type, new_output.shape = old_output.type, old_output.shape
        ir.convenience.replace_all_uses_with(old_output, new_output, replace_graph_outputs=True)
        new_output.name, old_output.name = output_names[index], f"{output_names[index]}/replaced"
    graph.remove(node, safe=True)
