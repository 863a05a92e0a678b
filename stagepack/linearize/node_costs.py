"""The cost of a node at the sizes of the example: floating-point operations, and bytes read and written."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils.flop_counter import FlopCounterMode

from stagepack.format.graph import Cost
from stagepack.partition.flop_formulas import FLOP_FORMULAS, REPEATED_READS, OperatorCall, TensorShape, estimated_flops
from stagepack.partition.operator_costs import TORCH_COUNTED_OPERATORS, cost_source, operator_base_name
from stagepack.torch_internals import OperatorOverload, example_size, has_flop_formula, operator_schema

# Operators that read, of their first argument, only as much as they return.
_GATHERS = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take"})
# Higher-order operators that execute their subgraph once for each item of the first dimension of these arguments.
_LOOPS = {"higher_order.map_impl": 1, "higher_order.scan": 2, "higher_order.associative_scan": 1}
# Integer dtypes of quantized tensors, which operators multiply; wider ones are indices and sizes.
_QUANTIZED = (torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedNode:
    """A node whose cost is asked for."""

    node: FxNode
    operator_name: str
    # The nodes of the graph that stand for weights.
    weight_nodes: Collection[FxNode]

    @property
    def base_name(self) -> str:
        """The name that the tables of costs have for the operator."""
        return operator_base_name(self.operator_name)

    def results(self) -> list[torch.Tensor]:
        """The tensors that the node returns."""
        return [meta for meta in _flat(traced_value(self.node)) if isinstance(meta, torch.Tensor)]

    def operator_call(self) -> OperatorCall:
        """The shapes that the node takes and returns, with the defaults of the parameters that it leaves out."""

        def shape_of(argument: FxNode) -> Any:
            meta = traced_value(argument)
            if isinstance(meta, torch.Tensor):
                return _tensor_shape(meta, is_weight=argument in self.weight_nodes)
            return _example_size(meta) if isinstance(meta, torch.SymInt) else meta

        arguments = {parameter: torch.fx.map_arg(value, shape_of) for parameter, value in _bound_arguments(self.node)}
        return OperatorCall(arguments=arguments, results=[_tensor_shape(meta) for meta in self.results()])


class CostModel:
    """Costs of nodes. What torch counts is cached by operator and sizes, since layers repeat."""

    def __init__(self) -> None:
        self._counted_flops: dict[Any, int] = {}

    def node_cost(
        self, node: FxNode, operator_name: str, weight_nodes: Collection[FxNode], body_costs: Sequence[Cost] = ()
    ) -> Cost:
        """Return the cost of one call of a node, of whose subgraphs the nodes have `body_costs`.

        Each subgraph is executed once, or once for each step of a loop whose number of steps a shape tells.
        """
        own_cost = self._own_cost(_TracedNode(node=node, operator_name=operator_name, weight_nodes=weight_nodes))
        step_count = _step_count(node, operator_name)
        return Cost(
            flops=own_cost.flops + step_count * sum(cost.flops for cost in body_costs),
            bytes=own_cost.bytes + step_count * sum(cost.bytes for cost in body_costs),
        )

    def _own_cost(self, traced: _TracedNode) -> Cost:
        """The cost of a node without that of its subgraphs."""
        target = traced.node.target
        is_overload = isinstance(target, OperatorOverload)
        if not is_overload and traced.base_name not in FLOP_FORMULAS:
            return Cost()
        if is_overload and target.is_view:  # type: ignore[union-attr]
            return Cost()
        returned = traced.results()
        used = [meta for meta in map(traced_value, traced.node.all_input_nodes) if isinstance(meta, torch.Tensor)]
        if traced.base_name in _GATHERS:
            used[:1] = returned
        bytes_moved = sum(_element_count(meta) * meta.element_size() for meta in (*returned, *used))
        if traced.base_name in REPEATED_READS:
            bytes_moved += REPEATED_READS[traced.base_name](traced.operator_call())
        return Cost(flops=self._flops(traced), bytes=bytes_moved)

    def _flops(self, traced: _TracedNode) -> int:
        base_name = traced.base_name
        if base_name in FLOP_FORMULAS:
            return FLOP_FORMULAS[base_name](traced.operator_call())
        if base_name in TORCH_COUNTED_OPERATORS or has_flop_formula(traced.node.target):
            try:
                return self._counted_by_torch(traced.node)
            except Exception:  # noqa: BLE001 - operators refuse the sizes that stand for those that depend on data, by any class
                return estimated_flops(traced.operator_call())
        if cost_source(traced.operator_name) == "estimated":
            return estimated_flops(traced.operator_call())
        # One operation for each element that is computed; moving integers is none.
        returned = traced.results()
        is_floating_point = any(meta.is_floating_point() for meta in returned)
        return sum(map(_element_count, returned)) if is_floating_point else 0

    def _counted_by_torch(self, node: FxNode) -> int:
        """Run an operator on tensors without data, and let torch count; composite operators are decomposed for it."""

        def concrete(argument: FxNode) -> Any:
            meta = traced_value(argument)
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


def traced_value(node: FxNode) -> Any:
    """Return what the trace has for the value of a node."""
    return node.meta.get("val")


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
    items = torch.fx.map_arg(node.args[_LOOPS[operator_name]], traced_value)
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
