"""Operators of torch -> rows of the op table: their names, what they write, and what their results alias.

- The cost of a node at the sizes of the example: floating-point operations, and bytes read and written.
- The tables of a graph while it is built: operators, scopes, contexts, subgraphs.

- The module and the line of a user's code that a node of a captured program came from, for errors about the node.
"""

import builtins
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx
from torch.fx import Node as FxNode
from torch.utils.flop_counter import FlopCounterMode

from stagepack.capture.torch_messages import traced_location
from stagepack.errors import UnsupportedError
from stagepack.format.graph import Context, Cost, Op, Scope, Subgraph
from stagepack.format.operators import HIGHER_ORDER_OPERATORS, PYTHON_OPERATORS, is_denied_operator
from stagepack.linearize.symbols import SymbolTable
from stagepack.partition.flop_formulas import FLOP_FORMULAS, REPEATED_READS, OperatorCall, TensorShape, estimated_flops
from stagepack.partition.operator_costs import TORCH_COUNTED_OPERATORS, cost_source, operator_base_name
from stagepack.torch_internals import (
    NO_MODULE_PREFIX,
    HigherOrderOperator,
    OperatorOverload,
    example_size,
    has_flop_formula,
    operator_schema,
    storage_identity,
    tree_leaves,
)

# Operators that return their input itself when they do not train; neither their schemas nor their traces show it.
_RETURN_INPUT = (
    "aten.dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_dropout.default",
    "aten.feature_alpha_dropout.default",
)
# Operators that read, of their first argument, only as much as they return.
_GATHERS = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take"})
# Higher-order operators that execute their subgraph once for each item of the first dimension of these arguments.
_LOOPS = {"higher_order.map_impl": 1, "higher_order.scan": 2, "higher_order.associative_scan": 1}
# Integer dtypes of quantized tensors, which operators multiply; wider ones are indices and sizes.
_QUANTIZED = (torch.int8, torch.uint8)


def op_row(target: Callable[..., Any]) -> Op:
    """Return the row of the op table for the target of a call."""
    if isinstance(target, OperatorOverload):
        if is_denied_operator(str(target)):
            raise UnsupportedError(f"the operator {target} is not allowed in a bundle")
        return _overload_row(target)
    if isinstance(target, HigherOrderOperator):
        operator_name = f"higher_order.{target.name()}"
        if operator_name in HIGHER_ORDER_OPERATORS:
            return Op(name=operator_name)
    else:
        operator_name = _python_name(target)
        if operator_name in PYTHON_OPERATORS:
            return Op(name=operator_name)
    raise UnsupportedError(f"the operator {operator_name} cannot be held by a bundle")


def observed_aliases(node: FxNode) -> Iterator[tuple[int, str]]:
    """Yield which results of a call share storage with its arguments, as the capture observed it.

    Some schemas do not say it: those of einsum and meshgrid, which return views.
    """
    if not isinstance(node.target, OperatorOverload):
        return
    schema = operator_schema(node.target)
    positional = {parameter.name: value for parameter, value in zip(schema.arguments, node.args, strict=False)}
    parameter_of_storage = {
        storage: parameter_name
        for parameter_name, argument in (positional | node.kwargs).items()
        for storage in _storages(fx.map_arg(argument, _meta))
    }
    meta: Any = node.meta.get("val")
    for result_index, result in enumerate(meta if len(schema.returns) > 1 else [meta]):
        for storage in _storages(result):
            if storage in parameter_of_storage:
                yield result_index, parameter_of_storage[storage]


def _overload_row(target: OperatorOverload) -> Op:
    schema = operator_schema(target)
    parameters_of_set: dict[str, list[str]] = {}
    mutates = []
    for parameter in schema.arguments:
        if parameter.alias_info is not None:
            if parameter.alias_info.is_write:
                mutates.append(parameter.name)
            for alias_set in parameter.alias_info.before_set:
                parameters_of_set.setdefault(alias_set, []).append(parameter.name)
    aliases = []
    for result_index, result in enumerate(schema.returns):
        # `Tensor(a -> *)` has no set at its result: split and chunk, whose items are views of the input.
        alias_sets = (result.alias_info.before_set or parameters_of_set) if result.alias_info is not None else ()
        for alias_set in sorted(alias_sets):
            aliases += [(result_index, parameter_name) for parameter_name in parameters_of_set.get(alias_set, [])]
    if str(target) in _RETURN_INPUT:
        aliases.append((0, schema.arguments[0].name))
    return Op(
        name=str(target),
        schema=str(schema),
        parameters=tuple(parameter.name for parameter in schema.arguments),
        mutates=tuple(mutates),
        aliases=tuple(aliases),
        random=torch.Tag.nondeterministic_seeded in target.tags,
    )


def _meta(node: FxNode) -> Any:
    return node.meta.get("val")


def _storages(values: object) -> Iterator[int]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield storage_identity(leaf)


def _python_name(target: Callable[..., Any]) -> str:
    module_name = getattr(target, "__module__", "") or ""
    function_name = getattr(target, "__name__", str(target))
    if getattr(operator, function_name, None) is target:
        return f"operator.{function_name}"
    if module_name == builtins.__name__:
        return f"builtins.{function_name}"
    # torch.sym_sqrt calls itself _sym_sqrt.
    return f"{module_name.split('.')[0]}.{function_name.lstrip('_')}"


class CostModel:
    """Costs of nodes. What torch counts is cached by operator and sizes, since layers repeat."""

    def __init__(self) -> None:
        self._counted_flops: dict[Any, int] = {}

    def node_cost(
        self, node: FxNode, operator_name: str, weight_nodes: Collection[FxNode], body_costs: Sequence[Cost] = ()
    ) -> Cost:
        """Return the cost of one call of a node.

        body_costs: the costs of the nodes of its subgraphs; each subgraph is executed once, or once for each step of a loop whose number of
            steps a shape tells.
        """
        own_cost = self._own_cost(node, operator_name, weight_nodes)
        step_count = _step_count(node, operator_name)
        return Cost(
            flops=own_cost.flops + step_count * sum(cost.flops for cost in body_costs),
            bytes=own_cost.bytes + step_count * sum(cost.bytes for cost in body_costs),
        )

    def _own_cost(self, node: FxNode, operator_name: str, weight_nodes: Collection[FxNode]) -> Cost:
        """The cost of a node without that of its subgraphs."""
        base_name = operator_base_name(operator_name)
        is_overload = isinstance(node.target, OperatorOverload)
        if not is_overload and base_name not in FLOP_FORMULAS:
            return Cost()
        if is_overload and node.target.is_view:  # type: ignore[union-attr]
            return Cost()
        returned = [meta for meta in _flat(node.meta.get("val")) if isinstance(meta, torch.Tensor)]
        used = [meta for meta in map(_meta, node.all_input_nodes) if isinstance(meta, torch.Tensor)]
        if base_name in _GATHERS:
            used[:1] = returned
        bytes_moved = sum(_element_count(meta) * meta.element_size() for meta in (*returned, *used))
        if base_name in REPEATED_READS:
            bytes_moved += REPEATED_READS[base_name](_operator_call(node, weight_nodes, returned))
        return Cost(flops=self._flops(node, operator_name, weight_nodes, returned), bytes=bytes_moved)

    def _flops(
        self,
        node: FxNode,
        operator_name: str,
        weight_nodes: Collection[FxNode],
        returned: Sequence[torch.Tensor],
    ) -> int:
        base_name = operator_base_name(operator_name)
        if base_name in FLOP_FORMULAS:
            return FLOP_FORMULAS[base_name](_operator_call(node, weight_nodes, returned))
        if base_name in TORCH_COUNTED_OPERATORS or has_flop_formula(node.target):
            try:
                return self._counted_by_torch(node)
            except Exception:  # noqa: BLE001 - operators refuse the sizes that stand for those that depend on data, by any class
                return estimated_flops(_operator_call(node, weight_nodes, returned))
        if cost_source(operator_name) == "estimated":
            return estimated_flops(_operator_call(node, weight_nodes, returned))
        # One operation for each element that is computed; moving integers is none.
        is_floating_point = any(meta.is_floating_point() for meta in returned)
        return sum(map(_element_count, returned)) if is_floating_point else 0

    def _counted_by_torch(self, node: FxNode) -> int:
        """Run an operator on tensors without data, and let torch count; composite operators are decomposed for it."""

        def concrete(argument: FxNode) -> Any:
            meta = _meta(argument)
            if isinstance(meta, torch.Tensor):
                return torch.empty([_example_size(size) for size in meta.shape], dtype=meta.dtype, device="meta")
            return _example_size(meta) if isinstance(meta, torch.SymInt) else meta

        args = torch.fx.map_arg(node.args, concrete)
        kwargs = torch.fx.map_arg(node.kwargs, concrete)
        cache_key = (node.target, _cache_key(args), _cache_key(kwargs))
        if cache_key not in self._counted_flops:
            counter = FlopCounterMode(display=False)
            with counter, torch.no_grad():
                node.target(*args, **kwargs)  # type: ignore[operator]
            self._counted_flops[cache_key] = counter.get_total_flops()
        return self._counted_flops[cache_key]


def _operator_call(node: FxNode, weight_nodes: Collection[FxNode], returned: Sequence[torch.Tensor]) -> OperatorCall:
    """The shapes that a node takes and returns, with the defaults of the parameters that it leaves out."""

    def shape_of(argument: FxNode) -> Any:
        meta = _meta(argument)
        if isinstance(meta, torch.Tensor):
            return _tensor_shape(meta, is_weight=argument in weight_nodes)
        return _example_size(meta) if isinstance(meta, torch.SymInt) else meta

    arguments = {parameter: torch.fx.map_arg(value, shape_of) for parameter, value in _bound_arguments(node)}
    return OperatorCall(arguments=arguments, results=[_tensor_shape(meta) for meta in returned])


def _bound_arguments(node: FxNode) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a node's operator, and what each is given."""
    if isinstance(node.target, OperatorOverload):
        for index, parameter in enumerate(operator_schema(node.target).arguments):
            argument = node.args[index] if index < len(node.args) else node.kwargs.get(parameter.name)
            yield parameter.name, parameter.default_value if argument is None else argument
    else:  # of the higher-order operators, flex_attention alone has a formula
        yield from zip(("query", "key", "value"), node.args, strict=False)


def _step_count(node: FxNode, operator_name: str) -> int:
    """How often a node executes its subgraphs; once where no shape tells."""
    if operator_name not in _LOOPS:
        return 1
    items = torch.fx.map_arg(node.args[_LOOPS[operator_name]], _meta)
    first = next((item for item in _flat(items) if isinstance(item, torch.Tensor) and item.ndim), None)
    return 1 if first is None else _example_size(first.shape[0])


def _tensor_shape(meta: torch.Tensor, *, is_weight: bool = False) -> TensorShape:
    is_multiplied = meta.is_floating_point() or meta.is_complex() or meta.dtype in _QUANTIZED
    return TensorShape(
        sizes=tuple(map(_example_size, meta.shape)),
        is_multiplied=is_multiplied,
        is_weight=is_weight,
        item_size=meta.element_size(),
    )


def _example_size(size: Any) -> int:
    """A size in the example; 1 where it depends on data."""
    if isinstance(size, int):
        return size
    known_size = example_size(size)
    return 1 if known_size is None else known_size


def _element_count(meta: torch.Tensor) -> int:
    return math.prod(map(_example_size, meta.shape))


def _flat(metas: Any) -> list[Any]:
    return list(metas) if isinstance(metas, list | tuple) else [metas]


def _cache_key(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.dtype)
    if isinstance(argument, list | tuple):
        return tuple(map(_cache_key, argument))
    if isinstance(argument, dict):
        return tuple((key, _cache_key(item)) for key, item in argument.items())
    return argument


class Tables:
    """What all nodes of one program share.

    Attributes:
        symbols: the sizes that may change.
        device: the type of the device that the program was captured on.
        weight_values: the names of the values that stand for weights, by the fully qualified names of the weights.
        constant_names: the fully qualified names of tensors that graph modules hold, by the identity of the tensor.
        costs: the costs of nodes.
        subgraphs: the bodies of higher-order operators; those that others use come first.
        split_positions: the positions of the nodes before which ``split_here`` was called.
        current_node: the fx node of which a node is made at present, for errors.
    """

    def __init__(
        self,
        symbols: SymbolTable,
        device: str,
        weight_values: Mapping[str, str],
        inner_constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.symbols = symbols
        self.device = device
        self.weight_values = weight_values
        self.constant_names = {id(tensor): name for name, tensor in inner_constants.items()}
        self.costs = CostModel()
        self.subgraphs: list[Subgraph] = []
        self.split_positions: list[int] = []
        self.current_node: FxNode | None = None
        self._op_rows: list[Op] = []
        self._op_indices: dict[Any, int] = {}
        self._scope_indices: dict[Scope, int] = {}
        self._context_indices: dict[Context, int] = {}

    @property
    def ops(self) -> Sequence[Op]:
        """The op table."""
        return self._op_rows

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scope table."""
        return tuple(self._scope_indices)

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The context table."""
        return tuple(self._context_indices)

    def op_index(self, target: Any) -> int:
        """Return the index of an operator, which is added when it is new."""
        if target not in self._op_indices:
            self._op_indices[target] = len(self._op_rows)
            self._op_rows.append(op_row(target))
        return self._op_indices[target]

    def add_aliases(self, op: int, aliases: Iterable[tuple[int, str]]) -> None:
        """Record that results of an operator may share memory with arguments."""
        row = self._op_rows[op]
        self._op_rows[op] = replace(row, aliases=tuple(dict.fromkeys((*row.aliases, *aliases))))

    def context_index(self, context: Context) -> int:
        """Return the index of a context, which is added when it is new."""
        return self._context_indices.setdefault(context, len(self._context_indices))

    def grad_mode(self, context: int | None) -> bool | None:
        """Return the grad mode in a context; None where no context sets one."""
        contexts = self.contexts
        while context is not None:
            if contexts[context].grad is not None:
                return contexts[context].grad
            context = contexts[context].parent
        return None

    def scope_index(self, node: FxNode) -> int:
        """Return the index of the module that a node came from, which is added when it is new."""
        stack = module_stack(node)
        scope = stack[-1] if stack else Scope(path="")
        return self._scope_indices.setdefault(scope, len(self._scope_indices))


def module_stack(node: FxNode) -> list[Scope]:
    """Return the calls of modules that a node was made in, the outermost first."""
    stack = []
    for call_key, (path, module_type) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith(NO_MODULE_PREFIX):
            return []
        occurrence = call_key.rpartition("@")[2] if "@" in call_key else ""
        type_name = (
            module_type if isinstance(module_type, str) else f"{module_type.__module__}.{module_type.__qualname__}"
        )
        stack.append(Scope(path=f"{path}@{occurrence}" if occurrence else path, type=type_name))
    return stack


def with_node_location(message: str, node: FxNode | None) -> str:
    """Append module and line of a node to a message about it, such as ``(layers.0: net.py, line 7, in forward)``, if they are known."""
    if node is None:
        return message
    stack = module_stack(node)
    path = stack[-1].path if stack else ""
    location = ": ".join(filter(None, (path, traced_location(node.meta.get("stack_trace") or ""))))
    return f"{message} ({location})" if location else message
