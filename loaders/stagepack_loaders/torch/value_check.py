"""Compare the values that a graph states with what its operators return, before weights are read (SPEC G16).

Each operator runs on tensors of the device ``meta``, which have a type and a shape but no memory, at the sizes of the example. Calls
that are alike run once: a model of many layers takes hardly longer than one of its layers.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stagepack.errors import DeviceError, FormatError, OperatorError, Problem, first_line
from stagepack.format.aliasing import AliasClasses, alias_classes, may_write
from stagepack.format.graph import Argument, DeviceArg, DtypeArg, Graph, LayoutArg, MemoryFormatArg, Node, Value, Weight
from stagepack.format.shapes import known_size
from stagepack.format.traversal import input_names
from stagepack.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    OperatorOverload,
    operator_schema,
    operators_without_compiler,
    suppress_log_records,
)
from stagepack_loaders.torch.meta_work import meta_work
from stagepack_loaders.torch.resolved_operators import check_call
from stagepack_loaders.torch.subgraph_check import SubgraphFacts, call_subgraphs, subgraph_result
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.value_facts import (
    META,
    UNKNOWN_RESULT,
    CallResult,
    Fact,
    Layout,
    MetaValues,
    argument_key,
    describe_fact,
    fact_of,
    is_fitting,
)

_MAX_PROBLEMS = 20
_SCALAR_TYPES: Mapping[str, type] = {"symint": int, "symfloat": float, "symbool": bool}
# The types of a schema that only one kind of argument fits. torch itself takes any integer in their place, and reads past its tables.
_ONLY_KINDS: Mapping[str, type | None] = {
    "ScalarType": DtypeArg,
    "Layout": LayoutArg,
    "MemoryFormat": MemoryFormatArg,
    "Device": DeviceArg,
    "str": str,
    "Generator": None,
    "Stream": None,
}
_KINDS_WITH_A_TYPE = tuple(kind for kind in _ONLY_KINDS.values() if kind is not None)
# The results but the first of these operators have shapes that depend on the device.
_EMBEDDING_BAGS = frozenset({"aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only"})
# Operators that return a view or a copy, as the strides of their arguments are, which are not known of all values.
_PERHAPS_VIEWS = frozenset({"aten.einsum.default"})
_ANY = Fact(object, None)
# How operators answered in this process, by operator, arguments and default dtype. It holds no tensors.
_RESULTS: dict[object, CallResult] = {}
_MAX_RESULTS = 10_000


class NodeProblem(NamedTuple):
    """What is wrong with a node of a graph or of one of its subgraphs."""

    node: Node
    message: str


def check_graph_values(graph: Graph, operators: Sequence[Callable[..., Any]], graph_name: str) -> None:
    """Compare the values of a graph with what its operators return, see `value_problems`."""
    try:
        problems = value_problems(graph, operators)
    except (DeviceError, OperatorError) as error:
        raise type(error)(f"{graph_name}: {error}") from None
    if problems:
        raise FormatError(
            [
                Problem(rule="G16", where=f"{graph_name}: {_described_node(graph, node)}", message=message)
                for node, message in problems
            ]
        )


def value_problems(graph: Graph, operators: Sequence[Callable[..., Any]]) -> list[NodeProblem]:
    """Compare the values of a graph and of its subgraphs with what its operators return and pass to subgraphs.

    Not compared are the results of operators of custom namespaces, of `flex_attention`, of those that torch cannot run without data, and of
    those that take a value whose size depends on data, and of recurrent layers with long sequences; and inside autocast, which
    floating-point type a result has.

    The result is the nodes whose values are not what their operators return, or whose operators refuse their arguments; at most 20.
    """
    with torch.no_grad(), ExitStack() as around_calls:
        check = _GraphCheck(graph, operators, around_calls)
        check.run()
    return check.problems


def _described_node(graph: Graph, node: Node) -> str:
    value_name = next((value.name for value in node.outputs if value is not None), "")
    return f"{value_name} = {graph.ops[node.op].name}"


@dataclass(slots=True)
class _GraphCheck:
    """The check of one graph."""

    graph: Graph
    operators: Sequence[Callable[..., Any]]
    around_calls: ExitStack
    problems: list[NodeProblem] = field(default_factory=list)
    _has_called: bool = field(init=False, default=False)
    _sizes: dict[str, int] = field(init=False)
    _casting_contexts: set[int] = field(init=False)
    _overloads: list[Callable[..., Any]] = field(init=False)
    _facts: dict[object, Fact] = field(init=False, default_factory=dict)
    _subgraphs: list[SubgraphFacts] = field(init=False, default_factory=list)
    # None if nothing is written: who shares memory makes no difference then.
    _classes: AliasClasses | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._sizes = {symbol.name: symbol.example for symbol in self.graph.symbols if symbol.example is not None}
        self._overloads = [inspect.unwrap(operator) for operator in self.operators]
        self._classes = alias_classes(self.graph) if may_write(self.graph) else None
        self._casting_contexts = set()
        for index, context in enumerate(self.graph.contexts):
            autocast = context.autocast
            if autocast.enabled if autocast is not None else context.parent in self._casting_contexts:
                self._casting_contexts.add(index)

    def run(self) -> None:
        for subgraph in self.graph.subgraphs:
            facts: dict[str, Fact] = {}
            self._check_body(subgraph.inputs, subgraph.nodes, facts, is_subgraph=True)
            if len(self.problems) >= _MAX_PROBLEMS:
                return
            inputs = {value.name: facts[value.name] for value in subgraph.inputs}
            self._subgraphs.append(SubgraphFacts(inputs, subgraph_result(subgraph.result, facts)))
        weights = {
            weight.value: Fact(torch_attribute(weight.dtype, torch.dtype), weight.shape, _weight_layout(weight))
            for weight in self.graph.weights
        }
        self._check_body(self.graph.inputs, self.graph.nodes, weights, is_subgraph=False)

    def _check_body(
        self, inputs: Sequence[Value], nodes: Sequence[Node], facts: dict[str, Fact], *, is_subgraph: bool
    ) -> None:
        """Check the nodes of a graph or subgraph; `facts` are those of its weights, and get those of its other values."""
        facts |= {value.name: self._stated(value) for value in inputs}
        kept_names = {*facts, *(self.graph.outputs if not is_subgraph else ())}
        reshaped_names: set[str] = set()
        for node in nodes:
            # A subgraph runs in the context of the node that calls it.
            is_casting = bool(self._casting_contexts) if is_subgraph else node.context in self._casting_contexts
            result = self._fitting_result(node, facts, is_casting=is_casting)
            if reshaped_names:
                for value_name in reshaped_names.intersection(input_names(node)):
                    self._add_problem(node, f"it uses {value_name}, whose shape or strides another node has changed")
            if result.reshaped:
                used_names = input_names(node)
                reshaped_names.update(used_names[index] for index in result.reshaped)
                for value_name in reshaped_names & kept_names:
                    self._add_problem(node, f"the operator changes the shape or the strides of {value_name}")
            for message in self._misfits(node, result, is_casting=is_casting):
                self._add_problem(node, message)
            if self._classes is not None and not is_subgraph and not is_casting:
                self._check_shared(node, result, self._classes)
            self._add_facts(node, result, facts, is_casting=is_casting)
            if len(self.problems) >= _MAX_PROBLEMS:
                return

    def _check_shared(self, node: Node, result: CallResult, classes: AliasClasses) -> None:
        """Compare the memory that results share with arguments with what the table of operators says, where it is written."""
        if self.graph.ops[node.op].name in _PERHAPS_VIEWS:
            return
        used_names = input_names(node)
        for result_index, input_index in result.shared:
            value = node.outputs[result_index] if result_index < len(node.outputs) else None
            used_name = used_names[input_index]
            if value is None or classes.representative(value.name) == classes.representative(used_name):
                continue
            if classes.is_written(value.name) or classes.is_written(used_name):
                message = (
                    f"it returns the memory of {used_name}, which is written, and the operator's aliases do not say so"
                )
                self._add_problem(node, message)

    def _fitting_result(self, node: Node, facts: Mapping[str, Fact], *, is_casting: bool) -> CallResult:
        """What the operator of a node returns: the first answer that fits what the node states, else that without data or layouts."""
        if isinstance(self._overloads[node.op], HigherOrderOperator):
            operator_name = self.graph.ops[node.op].name
            return call_subgraphs(operator_name, node, facts, self._subgraphs, is_casting=is_casting)
        result = self._result(node, facts, is_casting=is_casting)
        if not self._misfits(node, result, is_casting=is_casting):
            return result
        # Strides are known of few values: an edge or a result of an unknown operator has perhaps those that the operator needs.
        plain_facts = {value_name: facts[value_name]._replace(layout=None) for value_name in input_names(node)}
        plain_result = self._result(node, plain_facts, is_casting=is_casting)
        if not self._misfits(node, plain_result, is_casting=is_casting):
            return plain_result
        # Some operators return other shapes on the CPU, where most models are captured: `_native_batch_norm_legit_no_training` returns
        # empty statistics there.
        with suppress_log_records(FakeTensorMode.__module__), FakeTensorMode(allow_fallback_kernels=False):
            cpu_result = self._run(node, facts, is_casting=is_casting, device=torch.device("cpu"))
        return plain_result if self._misfits(node, cpu_result, is_casting=is_casting) else cpu_result

    def _result(self, node: Node, facts: Mapping[str, Fact], *, is_casting: bool) -> CallResult:
        key = (
            self.operators[node.op],
            tuple([argument_key(argument, facts) for argument in node.args]),
            tuple([(parameter_name, argument_key(argument, facts)) for parameter_name, argument in node.kwargs]),
            len(node.outputs),
            is_casting,
            torch.get_default_dtype(),
        )
        result = _RESULTS.get(key)
        if result is None:
            if len(_RESULTS) >= _MAX_RESULTS:
                _RESULTS.clear()
            result = _RESULTS[key] = self._run(node, facts, is_casting=is_casting)
        return result

    def _run(
        self, node: Node, facts: Mapping[str, Fact], *, is_casting: bool, device: torch.device = META
    ) -> CallResult:
        """Run the operator of a node on tensors without memory."""
        if not self._has_called:
            # The context takes 5 ms, and most of many graphs have no call that was not made before.
            self.around_calls.enter_context(operators_without_compiler())
            self._has_called = True
        operator, overload = self.operators[node.op], self._overloads[node.op]
        values = MetaValues(facts, is_casting=is_casting, device=device)
        check_call(
            self.graph.ops[node.op].name,
            overload,
            len(node.args),
            [parameter_name for parameter_name, _ in node.kwargs],
        )
        try:
            args = [values.argument(argument) for argument in node.args]
            kwargs = {parameter_name: values.argument(argument) for parameter_name, argument in node.kwargs}
        except RuntimeError as error:
            return CallResult(
                reason=f"there is no tensor of the shape of a value that it takes: {_described_error(error)}"
            )
        if isinstance(overload, OperatorOverload):
            if reason := _misplaced_argument(node, overload):
                return CallResult(reason=reason)
            if overload.namespace not in {"aten", "prims"}:
                return UNKNOWN_RESULT
        is_known = all(facts[value_name].is_known for value_name in input_names(node))
        is_assertion = self.graph.ops[node.op].name.startswith("aten._assert_")  # it compares when the graph runs
        if is_assertion or not is_known:
            return UNKNOWN_RESULT
        if isinstance(overload, OperatorOverload):
            work = meta_work(overload, args, kwargs, len(node.outputs))
            if work.is_excessive:
                return CallResult(reason=work.reason)
        try:
            returned = operator(*args, **kwargs)
        except NotImplementedError:
            return UNKNOWN_RESULT  # an operator without an implementation for `meta`
        except Exception as error:  # noqa: BLE001 - operators raise errors of any kind
            if _needs_data(overload, error):
                return UNKNOWN_RESULT
            return CallResult(reason=f"the operator refuses its arguments: {_described_error(error)}")
        reshaped = tuple(index for index, value_name in enumerate(input_names(node)) if values.is_reshaped(value_name))
        shared = values.shared_memory(returned, input_names(node))
        if isinstance(returned, list | tuple):
            facts_of_items = [fact_of(item) for item in returned]
            if self.graph.ops[node.op].name.rpartition(".")[0] in _EMBEDDING_BAGS:
                facts_of_items[1:] = [_ANY] * len(facts_of_items[1:])
            return CallResult(facts_of_items, is_sequence=True, reshaped=reshaped, shared=shared)
        return CallResult([fact_of(returned)], reshaped=reshaped, shared=shared)

    def _misfits(self, node: Node, result: CallResult, *, is_casting: bool) -> list[str]:
        """How the result of a node's operator differs from what the node states."""
        if result.reason:
            return [result.reason]
        if result.facts is None or not any(node.outputs):
            return []
        if result.is_sequence != node.unpack:
            return [f"the operator returns {'several values' if result.is_sequence else 'one value'}"]
        if len(node.outputs) > len(result.facts):
            return [f"it states {len(node.outputs)} values, the operator returns {len(result.facts)}"]
        return [
            f"it states {value.name} as {describe_fact(self._stated(value))}, the operator returns "
            f"{'nothing' if fact is None else describe_fact(fact)}"
            for value, fact in zip(node.outputs, result.facts, strict=False)
            if value is not None
            and fact != _ANY
            and (fact is None or not is_fitting(fact, self._stated(value), is_casting=is_casting))
        ]

    def _add_facts(self, node: Node, result: CallResult, facts: dict[str, Fact], *, is_casting: bool) -> None:
        """Take down what is known of the values of a node: what it states, or what its operator returns if more is known of that."""
        is_compared = result.facts is not None and result.is_sequence == node.unpack
        returned = result.facts if is_compared and result.facts is not None else ()
        for value, fact in itertools.zip_longest(node.outputs, returned[: len(node.outputs)]):
            if value is None:
                continue
            stated = self._stated(value)
            if fact is None or fact == _ANY or not is_fitting(fact, stated, is_casting=is_casting):
                facts[value.name] = stated
            elif fact.is_known and not (is_casting and stated.is_known):
                facts[value.name] = fact
            else:
                facts[value.name] = stated if stated.is_known else fact

    def _add_problem(self, node: Node, message: str) -> None:
        self.problems.append(NodeProblem(node, message))

    def _stated(self, value: Value) -> Fact:
        key = (value.dtype, value.shape, value.expr)
        fact = self._facts.get(key)
        if fact is None:
            scalar_type = _SCALAR_TYPES.get(value.dtype)
            if scalar_type is not None:
                fact = Fact(scalar_type, None if value.expr is None else known_size(value.expr, self._sizes))
            else:
                shape = tuple(known_size(dim, self._sizes) for dim in value.shape)
                fact = Fact(torch_attribute(value.dtype, torch.dtype), shape)
            self._facts[key] = fact
        return fact


def _weight_layout(weight: Weight) -> Layout | None:
    if weight.strides is None:
        return None
    reach = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.strides, strict=True)) + 1
    return Layout(weight.strides, weight.offset, weight.offset + reach)


def _misplaced_argument(node: Node, overload: OperatorOverload) -> str:
    """What is wrong with an argument that is not of the one kind that its parameter takes; empty if nothing is."""
    parameters = operator_schema(overload).arguments
    named = {parameter.name: parameter for parameter in parameters}
    passed = [*zip(parameters, node.args, strict=False), *((named[name], argument) for name, argument in node.kwargs)]
    for parameter, argument in passed:
        type_name = str(parameter.real_type).removeprefix("Optional[").removesuffix("]")
        if argument is None or (type_name not in _ONLY_KINDS and not isinstance(argument, _KINDS_WITH_A_TYPE)):
            continue
        kind = _ONLY_KINDS.get(type_name)
        if kind is None or not isinstance(argument, kind):
            return f"the parameter {parameter.name} takes {type_name}, the node passes {_describe_argument(argument)}"
    return ""


def _describe_argument(argument: Argument) -> str:
    """An argument in a message: a word for its kind, and a short name or number."""
    kind = type(argument).__name__.removesuffix("Arg").lower()
    content = getattr(argument, "name", argument if isinstance(argument, bool | int | float | str) else None)
    return f"the {kind} {str(content)[:80]!r}" if content is not None else f"a {kind}"


def _needs_data(overload: object, error: Exception) -> bool:
    """Whether an operator failed since a tensor without memory has no data."""
    tags = overload.tags if isinstance(overload, OperatorOverload) else ()
    return (
        torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags or "meta tensor" in str(error)
    )


def _described_error(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:300]}"
