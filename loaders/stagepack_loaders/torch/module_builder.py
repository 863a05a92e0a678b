"""Build a module of a graph that runs by calls of the model's modules, as a stage does that is loaded with ``modules=True``.

Each call takes values of the graph and returns values of the graph; between them are the arguments and results of Python, as they were
when the model was captured. Each module can be called on its own, and be replaced.
"""

# Long because modules, their calls and what a call has are built from one tree of paths.

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch.fx import GraphModule

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, bind_call, check_constant, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.folded_graph import rename_node
from stagepack.format.graph import Cost, Graph, ModuleCall, Node, Value, ValueArg
from stagepack.format.rules import split_call_path
from stagepack.format.shapes import evaluate_dim, symbol_names
from stagepack.format.traversal import input_names, output_names, passed_arguments, sort_module_calls
from stagepack.format.tree import (
    ConstantLeaf,
    NonFiniteLeaf,
    Parameter,
    SequenceTree,
    Signature,
    Tree,
    ValueLeaf,
    constant_value,
    flatten_tree,
    unflatten_tree,
    value_names,
)
from stagepack.torch_internals import child_modules
from stagepack_loaders.torch.build import FunctionStep, GraphBuilder, Step, produced_names, tuple_of, used_names
from stagepack_loaders.torch.container import Container, Slot, settle

_BODIES = "stagepack.bodies"


@dataclass(slots=True, eq=False)
class ModuleCallBody:
    """One call of a module in a stage. Values are given by their names.

    Attributes:
        outer: the call that makes it; None if the stage does.
        module_path: the path of the module that runs it.
        inputs: what it is passed by `outer` or the stage.
        required: the inputs without which it cannot run.
        outputs: what it makes and is used after it.
        forwarded: inputs and weights that it returns unchanged and that are used after it.
        weights: those that it uses itself or returns, not in modules inside it.
        classes: classes to build arguments and results of.
        graph_module: computes the outputs from the inputs and then the weights.
        module: the module at `module_path`, as it was loaded.
    """

    call: ModuleCall
    outer: "ModuleCallBody | None"
    module_path: str
    signature: Signature
    inputs: list[str]
    required: list[str]
    outputs: list[str]
    forwarded: set[str]
    value_types: Mapping[str, Value]
    stage_graph: Graph
    classes: Collection[type]
    weights: list[str] = field(default_factory=list)
    graph_module: GraphModule | None = None
    slots: list[Slot] = field(default_factory=list)
    module: torch.nn.Module | None = None
    stage: torch.nn.Module | None = None

    def current_module(self) -> torch.nn.Module:
        """Return the module that the call goes to, which the user may have replaced.

        It is looked up from the module around it as it was loaded, which the user may have wrapped into another one.
        """
        module, path = self.stage, self.module_path
        if self.outer is not None and path.startswith(f"{self.outer.module_path}."):
            module, path = self.outer.module, path.removeprefix(f"{self.outer.module_path}.")
        for module_name in path.split("."):
            module = None if module is None else child_modules(module).get(module_name)
        if module is None:
            raise InputError(
                f"the module {self.module_path} was removed: replace it by a module that takes the same call"
            )
        return module

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the call, from values by name. A value that the stage does not have is None: nothing uses it."""
        args, kwargs = [], {}
        for parameter in self.signature.parameters:
            argument = self._build(parameter.tree, values)
            if parameter.positional:
                args.append(argument)
            else:
                kwargs[parameter.name] = argument
        return args, kwargs

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], outer_values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a call: of its arguments, sizes that these determine, and otherwise the sizes in `outer_values`."""
        bound_arguments = bind_call(self.signature, args, kwargs)
        symbol_sizes = self._check(bound_arguments)
        derived_arguments = {}
        for value_name in self.required:
            expr = self.value_types[value_name].expr
            if value_name in bound_arguments:
                continue
            if expr is not None and set(symbol_names(expr)) <= symbol_sizes.keys():
                derived_arguments[value_name] = BoundArgument(value_name, evaluate_dim(expr, symbol_sizes))
            elif value_name in outer_values:
                derived_arguments[value_name] = BoundArgument(value_name, outer_values[value_name])
        if derived_arguments:
            self._check(bound_arguments | derived_arguments)
        return {
            **outer_values,
            **{value_name: argument.value for value_name, argument in (bound_arguments | derived_arguments).items()},
        }

    def run(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Run on values by name."""
        missing = [value_name for value_name in self.required if value_name not in values]
        if missing:
            raise InputError(
                f"{self.call.path} uses {', '.join(missing)}, which its arguments do not determine: it runs only inside its stage"
            )
        assert self.graph_module is not None
        weights = self._weight_tensors() | {
            value_name: values[value_name] for value_name in self.weights if value_name in values
        }
        results = self.graph_module(*map(values.get, self.inputs), *weights.values())
        outputs = dict(zip(self.outputs, results, strict=True))
        return outputs, self._build(self.signature.result, {**values, **weights, **outputs})

    def outputs_of_result(self, result: Any, values: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs that the result of a module contains, which may be the user's."""
        outputs = {}
        for leaf_location, leaf, element in flatten_tree(
            self.signature.result, result, f"the result of {self.module_path}"
        ):
            if not isinstance(leaf, ValueLeaf):
                if constant_value(leaf) is not None:
                    check_constant(leaf, element, leaf_location)
            elif leaf.name in self.outputs:
                outputs[leaf.name] = BoundArgument(leaf_location, element)
            elif leaf.name in self.forwarded and element is not (values | self._weight_tensors())[leaf.name]:
                raise InputError(
                    f"{leaf_location}: expected the same object that was passed, since later nodes of the stage use it, found another one"
                )
        inputs = {
            value_name: BoundArgument(value_name, values[value_name])
            for value_name in self.required
            if self.value_types[value_name].dtype not in SCALAR_DTYPES
        }
        check_values([self.value_types[value_name] for value_name in (*inputs, *outputs)], inputs | outputs, ())
        return {value_name: argument.value for value_name, argument in outputs.items()}

    def _check(self, bound_arguments: Mapping[str, BoundArgument]) -> dict[str, int]:
        """Check the required values, and others that are there, against their types; return the sizes of symbols."""
        checked = [
            self.value_types[value_name]
            for value_name, argument in bound_arguments.items()
            if value_name in self.value_types and (value_name in self.required or argument.value is not None)
        ]
        return check_values(checked, bound_arguments, self.stage_graph.symbols)

    def _weight_tensors(self) -> dict[str, Any]:
        return {value_name: slot.get() for value_name, slot in zip(self.weights, self.slots, strict=True)}

    def _build(self, tree: Tree, values: Mapping[str, Any]) -> Any:
        def leaf_value(leaf: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return values.get(leaf.name) if isinstance(leaf, ValueLeaf) else constant_value(leaf)

        return unflatten_tree(tree, leaf_value, self.classes)


@dataclass(slots=True)
class PendingCall:
    """A call on its way from the stage to the module that runs it, with the values by name and then the outputs."""

    body: ModuleCallBody
    values: dict[str, Any]
    outputs: dict[str, Any] | None = None


# The call that the next module to be called belongs to.
pending_call: ContextVar[PendingCall | None] = ContextVar("pending_call", default=None)


def call_module(body: ModuleCallBody, *values: Any) -> tuple[Any, ...]:
    """Call the module that a call goes to."""
    call = PendingCall(body, dict(zip(body.inputs, values, strict=True)))
    args, kwargs = body.arguments(call.values)
    token = pending_call.set(call)
    try:
        result = body.current_module()(*args, **kwargs)
    finally:
        pending_call.reset(token)
    outputs = (call.outputs or {}) | body.outputs_of_result(result, call.values)
    missing = [value_name for value_name in body.outputs if value_name not in outputs]
    if missing:
        raise InputError(
            f"{body.module_path} cannot be replaced: later nodes use {', '.join(missing)}, which it computes and does not return"
        )
    return tuple(outputs[value_name] for value_name in body.outputs)


class _Span(NamedTuple):
    """The nodes of a module call: from `start` to `end`, exclusive."""

    start: int
    end: int
    call: ModuleCall


class ModuleBuilder:
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
        """Return a module of the whole graph, called as in `build.build_graph_module`, and the calls of modules that it makes."""
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
        shared = itertools.takewhile(lambda contexts: len(set(contexts)) == 1, zip(*chains, strict=False))
        return next(reversed([contexts[0] for contexts in shared]), None)

    def _context_chain(self, context: int | None) -> list[int]:
        """A context with those around it, from the outside in."""
        if context is None:
            return []
        return [*self._context_chain(self._graph.contexts[context].parent), context]


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


class CalledModule(Container):
    """A module of the model. It is called as the model called it when it was captured.

    Inside its stage it is also passed the values that it uses and that were not among its arguments; on its own it runs without them
    where it can.
    """

    def __init__(self, bodies: Sequence[ModuleCallBody]) -> None:
        super().__init__()
        self.__dict__[_BODIES] = list(bodies)
        for body in bodies:
            body.module = self

    def _get_name(self) -> str:
        return self.__dict__[_BODIES][0].call.type.rpartition(".")[2] or type(self).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        call = pending_call.get()
        if call is None or not any(call.body is body for body in self.__dict__[_BODIES]):
            body = self._fitting_body(args, kwargs)
            return body.run(body.bind(args, kwargs, {}))[1]
        pending_call.set(None)  # the modules inside have calls of their own
        call.outputs, result = call.body.run(call.body.bind(args, kwargs, call.values))
        return result

    def _fitting_body(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleCallBody:
        """The first call whose arguments fit, or else the first call: calls may differ in sizes that are fixed."""
        bodies: list[ModuleCallBody] = self.__dict__[_BODIES]
        for body in bodies if len(bodies) > 1 else ():
            try:
                body.bind(args, kwargs, {})
            except InputError:
                continue
            return body
        return bodies[0]


def called_modules(bodies: Iterable[ModuleCallBody]) -> list[tuple[str, CalledModule]]:
    """Return the modules that run calls, with their paths; a module comes before those inside it."""
    by_path: dict[str, list[ModuleCallBody]] = {}
    for body in bodies:
        by_path.setdefault(body.module_path, []).append(body)
    return [(path, CalledModule(by_path[path])) for path in sorted(by_path, key=lambda path: path.count("."))]


def connect_calls(stage: Container, bodies: Sequence[ModuleCallBody], slots: Mapping[str, Slot]) -> None:
    """Connect calls with their stage and its weights, and tell containers which of their modules are called."""
    for body in bodies:
        body.stage = stage
        body.slots = [slots[value_name] for value_name in body.weights]
    for module in stage.modules():
        if isinstance(module, Container):
            settle(module, CalledModule)
