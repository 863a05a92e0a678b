"""A graph and the calls of modules in it -> what runs them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch.fx import GraphModule

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Cost, Graph, ModuleCall, Node, ValueArg
from stagepack.format.renaming import rename_node
from stagepack.format.signature import Parameter, Signature
from stagepack.format.traversal import input_names, output_names, parameter_argument, sort_module_calls, split_call_path
from stagepack.format.tree import SequenceTree, Tree, ValueLeaf, value_names
from stagepack_loaders.torch.build import Builder, FunctionCall, Step, made_by, used_by, values_of
from stagepack_loaders.torch.modules import ModuleCallBody, enter


def build_modules(
    graph: Graph,
    places: Sequence[int],
    targets: Sequence[Callable[..., Any]],
    device: torch.device,
    types: Collection[type],
) -> tuple[GraphModule, list[ModuleCallBody]]:
    """Make a module of a graph, called as that of `build.build`, and the calls of modules that it makes.

    Args:
        graph: the stage, with the calls of modules.
        places: where each node stands in the whole model; -1 for one that stands nowhere.
        targets: the operators of the op table.
        device: what the graph calls its own device.
        types: classes to build arguments and results of.

    Raises:
        OperatorError, DeviceError: see `build.build`.
    """
    return _Building(graph, targets, device, types).build(places)


class _Span(NamedTuple):
    """The nodes of a call of a module: the number of the first, and that after the last."""

    start: int
    end: int
    call: ModuleCall


def _with_weights_by_name(graph: Graph) -> Graph:
    """A graph that calls a weight which it has written by its own name: an operator that writes in place gives back what it wrote.

    So a module that counts its calls in a buffer takes the buffer at each call, not what the call before gave back.
    """
    name_of = {weight.value: weight.value for weight in graph.weights}
    nodes = []
    for node in graph.nodes:
        renamed = rename_node(node, lambda name: name_of.get(name, name))
        nodes.append(replace(renamed, outputs=node.outputs))
        op = graph.ops[node.op]
        for index, parameter in op.aliases:
            written = parameter in op.mutates and index < len(node.outputs) and not node.unpack
            whole = parameter_argument(node, op, parameter) if written else None
            output = node.outputs[index] if written else None
            if output is not None and isinstance(whole, ValueArg) and whole.name in name_of:
                name_of[output.name] = name_of[whole.name]
    return replace(graph, nodes=tuple(nodes))


class _Building:
    """A graph on its way to modules."""

    def __init__(
        self, graph: Graph, targets: Sequence[Callable[..., Any]], device: torch.device, types: Collection[type]
    ) -> None:
        self.weights = {weight.value for weight in graph.weights}
        self.graph = graph = _with_weights_by_name(graph)
        self.classes = types
        self.builder = Builder(graph, (), targets, device)
        made = [
            (number, value) for number, node in enumerate(graph.nodes) for value in node.outputs if value is not None
        ]
        self.types = {value.name: value for value in (*graph.inputs, *(value for _, value in made))}
        self.made_at = dict.fromkeys((*self.weights, *(value.name for value in graph.inputs)), -1)
        self.made_at |= {value.name: number for number, value in made}
        self.last_use = {name: number for number, node in enumerate(graph.nodes) for name in input_names(node)}
        self.last_use |= dict.fromkeys(graph.outputs, len(graph.nodes))
        self.owners: dict[tuple[str, bytes], str] = {}
        self.bodies: list[ModuleCallBody] = []

    def build(self, places: Sequence[int]) -> tuple[GraphModule, list[ModuleCallBody]]:
        """The module of the whole graph."""
        graph, at = self.graph, {place: number for number, place in enumerate(places)}
        spans = []
        for call in sort_module_calls(graph.calls):
            first, last = at.get(int(call.first)), at.get(int(call.first) + call.nodes - 1)
            if first is not None and last is not None and last - first == call.nodes - 1:
                spans.append(_Span(first, last + 1, call))
        names = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights)]
        steps = self._steps(0, len(graph.nodes), spans, None)
        return self.builder.module(names, steps, values_of(graph.outputs), None, "Stage"), self.bodies

    def _steps(self, start: int, end: int, spans: Sequence[_Span], around: ModuleCallBody | None) -> list[Step]:
        """Nodes, and calls in their place; `spans` are those inside, in order."""
        steps: list[Step] = []
        known = self.weights.union((value.name for value in self.graph.inputs) if around is None else around.inputs)
        number = 0
        while start < end:
            if number == len(spans) or spans[number].start != start:
                steps.append(self.graph.nodes[start])
                start += 1
            else:
                span, first = spans[number], number + 1
                number = first
                while number < len(spans) and spans[number].start < span.end:
                    number += 1
                steps.append(self._call(span, spans[first:number], around, known))
                start = span.end
            known.update(made_by(steps[-1]))
        return steps

    def _call(
        self, span: _Span, inside: Sequence[_Span], around: ModuleCallBody | None, known: Collection[str]
    ) -> FunctionCall:
        """A call of a module, with those `inside` it; `known` are the values that there are before it."""
        start, end, call = span
        nodes = self.graph.nodes[start:end]
        used = dict.fromkeys(name for node in nodes for name in input_names(node) if self.made_at[name] < start)
        needs = [name for name in used if name not in self.weights]
        made = [name for node in nodes for name in output_names(node)]
        used_after = [name for name in made if self.last_use.get(name, -1) >= end]
        signature = call.signature or self._plain_signature(needs, used_after)
        given_back = list(value_names(signature.result))
        arguments = value_names(*(parameter.tree for parameter in signature.parameters))
        leaves = (*arguments, *(name for name in given_back if name not in self.weights))
        inputs = list(dict.fromkeys((*needs, *(name for name in leaves if name in known))))
        results = {*used_after, *given_back, *(() if around is None else around.outputs)}
        body = ModuleCallBody(
            call=call,
            around=around,
            owner=self._owner(call, signature, nodes),
            signature=signature,
            inputs=inputs,
            needs=needs,
            outputs=[name for name in made if name in results],
            passed={name for name in given_back if name in known and self.last_use.get(name, -1) >= end},
            weights=[],
            types=self.types,
            stage=self.graph,
            classes=self.classes,
        )
        self.bodies.append(body)
        steps = self._steps(start, end, inside, body)
        own = (*(name for step in steps for name in used_by(step)), *given_back)
        body.weights.extend(dict.fromkeys(name for name in own if name in self.weights and name not in inputs))
        names = [*inputs, *body.weights]
        body.graph = self.builder.module(names, steps, values_of(body.outputs), None, "Module")
        return FunctionCall(enter, body, inputs, body.outputs, self._context(nodes))

    def _plain_signature(self, needs: Sequence[str], used_after: Sequence[str]) -> Signature:
        """The signature of a call of which the capture did not tell: tensors one by one, as ``torch.export.unflatten`` has it."""
        tensors = [name for name in needs if self.types[name].dtype not in SCALAR_DTYPES]
        parameters = (
            Parameter(name=f"arg_{number}", tree=ValueLeaf(name), positional=True, keyword=False)
            for number, name in enumerate(tensors)
        )
        results: list[Tree] = [ValueLeaf(name) for name in used_after]
        result = results[0] if len(results) == 1 else SequenceTree(kind="tuple", items=tuple(results))
        return Signature(parameters=tuple(parameters), result=result)

    def _owner(self, call: ModuleCall, signature: Signature, nodes: Sequence[Node]) -> str:
        """The path of the module that runs a call: that of the first call with the same graph."""
        path, _ = split_call_path(call.path)
        numbers: dict[str, str] = {}

        def plain(name: str) -> str:
            return name if name in self.weights else numbers.setdefault(name, str(len(numbers)))

        same: list[Any] = [signature.renamed(plain)]
        for node in nodes:
            outputs = [None if value is None else plain(value.name) for value in node.outputs]
            bare = replace(node, outputs=(), scope=0, cost=Cost())
            same.append((rename_node(bare, plain), outputs))
        key = (path, msgspec.msgpack.encode(same))
        known = any(other == path for other, _ in self.owners)
        return self.owners.setdefault(key, call.path if known else path)

    def _context(self, nodes: Sequence[Node]) -> int | None:
        """The innermost context that all nodes stand in."""
        contexts = self.graph.contexts
        common: list[int] | None = None
        for found in {node.context for node in nodes}:
            chain: list[int] = []
            while found is not None:
                chain.insert(0, found)
                found = contexts[found].parent
            common = chain if common is None else [a for a, b in zip(common, chain, strict=False) if a == b]
        return common[-1] if common else None
