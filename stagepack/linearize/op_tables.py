"""Operators of torch -> rows of the op table: their names, what they write, and what their results alias; and the contexts of nodes.

``torch.export`` puts the nodes under ``torch.no_grad`` or ``torch.autocast`` into a graph module of their own, which one node calls.
"""

import builtins
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx
from torch.fx import Node as FxNode

from stagepack.capture.torch_messages import traced_location
from stagepack.errors import UnsupportedError
from stagepack.format.graph import Autocast, Context, Op, Scope, Subgraph
from stagepack.format.operators import HIGHER_ORDER_OPERATORS, PYTHON_OPERATORS, is_denied_operator
from stagepack.grouped_product import TRACED_PRODUCT
from stagepack.linearize.node_costs import CostModel, traced_value
from stagepack.linearize.program_tensors import dtype_name
from stagepack.linearize.symbols import SymbolTable
from stagepack.torch_internals import (
    GROUPED_PRODUCT,
    NO_MODULE_PREFIX,
    HigherOrderOperator,
    OperatorOverload,
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
# Operators that return quantized tensors: traces state their results as floats.
_QUANTIZING = (
    "aten.quantize_per_",
    "aten._make_per_",
    "aten._empty_affine_quantized",
    "aten._empty_per_channel_affine",
    "aten.empty_quantized",
)
# Operators that take rows, a matrix for each group, and the end of each group among the rows: in traces of models of transformers 5,
# and in traces of loaded stages.
_TRACED_PRODUCTS = ("transformers.grouped_mm_fallback.default", str(TRACED_PRODUCT))
_GRAD_MODE = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def equivalent_call(node: FxNode) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return what a node calls, and with what: of an operator of a library that is one of ATen, the call of ATen.

    Models of transformers with experts call ``torch._grouped_mm`` when they run, and in a trace an operator of transformers that
    does the same: the compiler has a form of the one of ATen for bfloat16 alone.
    """
    if str(node.target) not in _TRACED_PRODUCTS or not _has_grouped_product(node.meta["val"].device):
        return node.target, node.args, node.kwargs
    parameters = [parameter.name for parameter in operator_schema(node.target).arguments]  # type: ignore[arg-type]
    args = (*node.args, *(node.kwargs[parameter] for parameter in parameters[len(node.args) :]))
    return GROUPED_PRODUCT, args, {}


def _has_grouped_product(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def op_row(target: Callable[..., Any]) -> Op:
    """Return the row of the op table for the target of a call."""
    if isinstance(target, OperatorOverload):
        if is_denied_operator(str(target)):
            raise UnsupportedError(f"the operator {target} is not allowed in a bundle")
        if str(target).startswith(_QUANTIZING):
            raise UnsupportedError(
                f"the operator {target} returns a quantized tensor, which a bundle cannot hold: quantize with torchao or by PT2E, whose "
                "values are integers"
            )
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

    Some schemas do not say it, such as the schemas of einsum and meshgrid, which return views.
    """
    if not isinstance(node.target, OperatorOverload):
        return
    schema = operator_schema(node.target)
    positional = {parameter.name: value for parameter, value in zip(schema.arguments, node.args, strict=False)}
    parameter_of_storage = {
        storage: parameter_name
        for parameter_name, argument in (positional | node.kwargs).items()
        for storage in _storages(fx.map_arg(argument, traced_value))
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


class Tables:
    """What all nodes of one program share."""

    def __init__(
        self,
        symbols: SymbolTable,
        device: str,
        weight_values: Mapping[str, str],
        inner_constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.symbols = symbols
        # The type of the device that the program was captured on.
        self.device = device
        # The names of the values that stand for weights, by the fully qualified names of the weights.
        self.weight_values = weight_values
        # The fully qualified names of tensors that graph modules hold, by the identity of the tensor.
        self.constant_names = {id(tensor): name for name, tensor in inner_constants.items()}
        self.costs = CostModel()
        # The bodies of higher-order operators; those that others use come first.
        self.subgraphs: list[Subgraph] = []
        # The positions of the nodes before which ``split_here`` was called.
        self.split_positions: list[int] = []
        # The fx node of which a node is made at present, for errors.
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


def opens_context(node: FxNode) -> bool:
    """Return whether a node calls a graph module under another grad mode or autocast."""
    return str(node.target) in (_GRAD_MODE, _AUTOCAST)


def context_module_position(node: FxNode) -> int:
    """Return the position, among the arguments of a node that opens a context, of the graph module that it calls; its inputs follow."""
    return 1 if str(node.target) == _GRAD_MODE else 4


def opened_context(node: FxNode, parent: int | None, capture_device: str) -> Context:
    """Return the context that a node opens."""
    if str(node.target) == _GRAD_MODE:
        return Context(parent=parent, grad=bool(node.args[0]))
    device_type, dtype, is_enabled, caches_weights = node.args[:4]
    dtype = torch.get_autocast_dtype(str(device_type)) if dtype is None else dtype
    assert isinstance(dtype, torch.dtype)
    autocast = Autocast(
        device=None if device_type == capture_device else str(device_type),
        dtype=dtype_name(dtype),
        enabled=bool(is_enabled),
        cache=torch.is_autocast_cache_enabled() if caches_weights is None else bool(caches_weights),
    )
    return Context(parent=parent, autocast=autocast)
