"""Build a module of a graph that runs by calls of the model's modules."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch.fx import GraphModule

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Cost, Graph, ModuleCall, Node, ValueArg
from stagepack.format.manifest import Parameter, Signature
from stagepack.format.traversal import input_names, output_names, passed_arguments, sort_module_calls, split_call_path
from stagepack.format.tree import SequenceTree, Tree, ValueLeaf, value_names
from stagepack.format.unfold import rename_node
from stagepack_loaders.torch.build import GraphBuilder
from stagepack_loaders.torch.module_call import ModuleCallBody, call_module
from stagepack_loaders.torch.steps import FunctionStep, Step, produced_names, tuple_of, used_names


def build_with_modules(
    graph: Graph,
    node_numbers: Sequence[int],
    operators: Sequence[Callable[..., Any]],
    device: torch.device,
    types: Collection[type],
) -> tuple[GraphModule, list[ModuleCallBody]]:
    """Return a module of a graph, called as that of `build.build_graph_module`, and the calls of modules that it makes."""
    return _ModuleBuilder(graph, operators, device, types).build(node_numbers)


class _Span(NamedTuple):
    """The nodes of a module call: from `start` to `end`, exclusive."""

    start: int
    end: int
    call: ModuleCall


class _ModuleBuilder:
    """Builds a graph call by call, from the outside in."""

    def __init__(
        self, graph: Graph, operators: Sequence[Callable[..., Any]], device: torch.device, types: Collection[type]
    ) -> None:
        self._graph = graph = _with_weights_by_name(graph)
        self._weight_names = {weight.value for weight in graph.weights}
        self._classes = types
        self._builder = GraphBuilder(graph, (), operators, device)
        outputs = [
            (index, value) for index, node in enumerate(graph.nodes) for value in node.outputs if value is not None
        ]
        self._value_types = {value.name: value for value in (*graph.inputs, *(value for _, value in outputs))}
        # The node that makes each value, -1 for inputs and weights; and the last node that uses it.
        self._producers = dict.fromkeys((*self._weight_names, *(value.name for value in graph.inputs)), -1)
        self._producers |= {value.name: index for index, value in outputs}
        self._last_uses = {
            value_name: index for index, node in enumerate(graph.nodes) for value_name in input_names(node)
        }
        self._last_uses |= dict.fromkeys(graph.outputs, len(graph.nodes))
        self._module_paths: dict[tuple[str, bytes], str] = {}
        self._bodies: list[ModuleCallBody] = []

    def build(self, node_numbers: Sequence[int]) -> tuple[GraphModule, list[ModuleCallBody]]:
        """Return the module of the whole graph, and all calls."""
        graph = self._graph
        stage_inputs = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights)]
        steps = self._steps(0, len(graph.nodes), _complete_calls(graph, node_numbers), None)
        return self._builder.build_module(stage_inputs, steps, tuple_of(graph.outputs), None, "Stage"), self._bodies

    def _steps(self, start: int, end: int, spans: Sequence[_Span], outer: ModuleCallBody | None) -> list[Step]:
        """The nodes from `start` to `end`, with those of each outermost span replaced by a call."""
        steps: list[Step] = []
        known_names = self._weight_names.union(
            (value.name for value in self._graph.inputs) if outer is None else outer.inputs
        )
        index = 0
        while start < end:
            if index == len(spans) or spans[index].start != start:
                steps.append(self._graph.nodes[start])
                start += 1
            else:
                span, first_inside = spans[index], index + 1
                index = first_inside
                while index < len(spans) and spans[index].start < span.end:
                    index += 1
                steps.append(self._call_step(span, spans[first_inside:index], outer, known_names))
                start = span.end
            known_names.update(produced_names(steps[-1]))
        return steps

    def _call_step(
        self, span: _Span, inside: Sequence[_Span], outer: ModuleCallBody | None, known_names: Collection[str]
    ) -> FunctionStep:
        """A call of a module, with the calls inside it; `known_names` are the values that exist before it."""
        body = self._call_body(span, outer, known_names)
        self._bodies.append(body)
        steps = self._steps(span.start, span.end, inside, body)
        own_names = (
            *(value_name for step in steps for value_name in used_names(step)),
            *value_names(body.signature.result),
        )
        own_weights = (
            value_name for value_name in own_names if value_name in self._weight_names and value_name not in body.inputs
        )
        body.weights.extend(dict.fromkeys(own_weights))
        module_inputs = [*body.inputs, *body.weights]
        body.graph_module = self._builder.build_module(module_inputs, steps, tuple_of(body.outputs), None, "Module")
        context = self._common_context(self._graph.nodes[span.start : span.end])
        return FunctionStep(call_module, body, body.inputs, body.outputs, context)

    def _call_body(self, span: _Span, outer: ModuleCallBody | None, known_names: Collection[str]) -> ModuleCallBody:
        """What a call takes and returns."""
        start, end, call = span
        nodes = self._graph.nodes[start:end]
        used = dict.fromkeys(
            value_name for node in nodes for value_name in input_names(node) if self._producers[value_name] < start
        )
        required = [value_name for value_name in used if value_name not in self._weight_names]
        produced = [value_name for node in nodes for value_name in output_names(node)]
        used_after = [value_name for value_name in produced if self._last_uses.get(value_name, -1) >= end]
        signature = call.signature or self._default_signature(required, used_after)
        returned = list(value_names(signature.result))
        arguments = value_names(*(parameter.tree for parameter in signature.parameters))
        leaves = (*arguments, *(value_name for value_name in returned if value_name not in self._weight_names))
        results = {*used_after, *returned, *(() if outer is None else outer.outputs)}
        return ModuleCallBody(
            call=call,
            outer=outer,
            module_path=self._module_path(call, signature, nodes),
            signature=signature,
            inputs=list(
                dict.fromkeys((*required, *(value_name for value_name in leaves if value_name in known_names)))
            ),
            required=required,
            outputs=[value_name for value_name in produced if value_name in results],
            forwarded={
                value_name
                for value_name in returned
                if value_name in known_names and self._last_uses.get(value_name, -1) >= end
            },
            value_types=self._value_types,
            stage_graph=self._graph,
            classes=self._classes,
        )

    def _default_signature(self, required: Sequence[str], used_after: Sequence[str]) -> Signature:
        """The signature of a call that the capture recorded without one: tensors one by one, as in ``torch.export.unflatten``."""
        tensor_names = [
            value_name for value_name in required if self._value_types[value_name].dtype not in SCALAR_DTYPES
        ]
        parameters = (
            Parameter(name=f"arg_{index}", tree=ValueLeaf(value_name), positional=True, keyword=False)
            for index, value_name in enumerate(tensor_names)
        )
        results: list[Tree] = [ValueLeaf(value_name) for value_name in used_after]
        result = results[0] if len(results) == 1 else SequenceTree(kind="tuple", items=tuple(results))
        return Signature(parameters=tuple(parameters), result=result)

    def _module_path(self, call: ModuleCall, signature: Signature, nodes: Sequence[Node]) -> str:
        """The path of the module that runs a call: that of the first call with an equal graph."""
        path, _ = split_call_path(call.path)
        canonical_names: dict[str, str] = {}

        def canonical(value_name: str) -> str:
            return (
                value_name
                if value_name in self._weight_names
                else canonical_names.setdefault(value_name, str(len(canonical_names)))
            )

        content: list[Any] = [signature.renamed(canonical)]
        for node in nodes:
            outputs = [None if value is None else canonical(value.name) for value in node.outputs]
            bare_node = replace(node, outputs=(), scope=0, cost=Cost())
            content.append((rename_node(bare_node, canonical), outputs))
        key = (path, msgspec.msgpack.encode(content))
        is_taken = any(taken_path == path for taken_path, _ in self._module_paths)
        return self._module_paths.setdefault(key, call.path if is_taken else path)

    def _common_context(self, nodes: Sequence[Node]) -> int | None:
        """The innermost context that all nodes are in."""
        chains = [self._context_chain(context) for context in {node.context for node in nodes}]
        common: int | None = None
        for contexts in zip(*chains, strict=False):
            if len(set(contexts)) > 1:
                break
            common = contexts[0]
        return common

    def _context_chain(self, context: int | None) -> list[int]:
        """A context with those around it, from the outside in."""
        chain: list[int] = []
        while context is not None:
            chain.insert(0, context)
            context = self._graph.contexts[context].parent
        return chain


def _complete_calls(graph: Graph, node_numbers: Iterable[int]) -> list[_Span]:
    """The module calls whose nodes are all in the stage, the outer ones before those inside them."""
    positions = {node_number: position for position, node_number in enumerate(node_numbers)}
    spans = []
    for call in sort_module_calls(graph.calls):
        first, last = positions.get(int(call.first)), positions.get(int(call.first) + call.nodes - 1)
        if first is not None and last is not None and last - first == call.nodes - 1:
            spans.append(_Span(first, last + 1, call))
    return spans


def _with_weights_by_name(graph: Graph) -> Graph:
    """Return a graph that uses a written weight by its own name, and not by the output of the operator that wrote it.

    So a module that counts its calls in a buffer reads the buffer at each call, not the result of the previous call.
    """
    weight_names = {weight.value: weight.value for weight in graph.weights}
    # For each operator, the parameters that it writes and returns.
    in_place_parameters = [
        {parameter for result_index, parameter in op.aliases if result_index == 0}.intersection(op.mutates)
        for op in graph.ops
    ]
    nodes = []
    for node in graph.nodes:
        renamed = rename_node(node, lambda value_name: weight_names.get(value_name, value_name))
        nodes.append(replace(renamed, outputs=node.outputs))
        output = node.outputs[0] if node.outputs and not node.unpack else None
        if output is None or not in_place_parameters[node.op]:
            continue
        for parameter, argument in passed_arguments(node, graph.ops[node.op]):
            is_written = parameter in in_place_parameters[node.op]
            if is_written and isinstance(argument, ValueArg) and argument.name in weight_names:
                weight_names[output.name] = weight_names[argument.name]
    return replace(graph, nodes=tuple(nodes))
