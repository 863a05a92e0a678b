"""The nodes of a graph module of torch -> nodes of the format."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stagepack.capture.traced_modes import lost_grad_mode
from stagepack.errors import UnsupportedError
from stagepack.format.graph import (
    Argument,
    Context,
    DeviceArg,
    DictArg,
    ListArg,
    Node,
    SliceArg,
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)
from stagepack.format.operators import is_denied_operator, needed_permission, operator_namespace
from stagepack.format.traversal import child_arguments, subgraph_indices
from stagepack.format.tree import UNUSED_VALUE
from stagepack.linearize.op_tables import (
    Tables,
    context_module_position,
    equivalent_call,
    observed_aliases,
    opened_context,
    opens_context,
)
from stagepack.linearize.program_tensors import (
    constant_argument,
    dtype_name,
    held_tensors,
    module_attribute,
    wrapped_tensor_name,
)
from stagepack.torch_internals import PIPE_SPLIT_OPERATOR, HigherOrderOperator, OperatorOverload, operator_schema

# The argument whose items are passed to all subgraphs as their last inputs.
_OPERANDS: Final = {"cond": 3, "while_loop": 3, "map_impl": 2, "scan": 3, "associative_scan": 2}
# Arguments of flex_attention: the subgraph of the scores and the last item of the block mask, with the operands of each.
_SCORE_OPERANDS, _MASK_OPERANDS = 7, 8
_SPLIT_MARKERS = ("stagepack.split_here.default", PIPE_SPLIT_OPERATOR)
_UNWRAP_OPERATOR = "export.access_subclass_inner_tensor.default"
_EFFECT_OPERATOR = "with_effects"
_SCALAR_DTYPES = {
    torch.SymInt: "symint",
    torch.SymFloat: "symfloat",
    torch.SymBool: "symbool",
    int: "symint",
    float: "symfloat",
    bool: "symbool",
}
# The value of an fx node; a list for a node that returns several.
FxValue = Argument | list[Argument]


def subgraph_operands(node: FxNode) -> Iterator[tuple[int | None, list[FxNode]]]:
    """Yield the subgraphs of a call of a higher-order operator that get the same operands.

    With the position of the argument that lists the operands, or None if all further arguments are operands.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return
    operator_name = node.target.name()
    if operator_name == "flex_attention":
        score, block_mask = node.args[3:5]
        assert isinstance(block_mask, tuple | list)
        for position, argument in ((_SCORE_OPERANDS, score), (_MASK_OPERANDS, block_mask[-1])):
            if isinstance(argument, FxNode):
                yield position, [argument]
    else:
        subgraph_nodes = [
            argument for argument in node.args if isinstance(argument, FxNode) and argument.op == "get_attr"
        ]
        yield _OPERANDS.get(operator_name), subgraph_nodes


def with_operands(
    args: Sequence[Argument], further_operands: Mapping[int | None, Sequence[Argument]]
) -> tuple[Argument, ...]:
    """Return the arguments of a call with further operands."""
    extended = list(args)
    for position, operands in further_operands.items():
        if position is None:
            extended += operands
        elif operands:
            listed = extended[position] if position < len(extended) else None
            if not isinstance(listed, ListArg | TupleArg):
                raise UnsupportedError(
                    "a function that a higher-order operator calls holds a constant: make it a buffer of the module, or an argument"
                )
            extended[position] = type(listed)((*listed.items, *operands))
    return tuple(extended)


class BodyBuilder:
    """Builds the nodes of one graph module. The nodes of the graph modules that run in a context of their own are among them."""

    def __init__(self, tables: Tables, module: GraphModule, *, is_subgraph: bool = False) -> None:
        self.tables = tables
        self.inputs: list[Value] = []
        # The nodes in execution order.
        self.nodes: list[Node] = []
        # The fx node that each of the nodes was made of.
        self.sources: list[FxNode] = []
        # The values of the fx nodes.
        self.arguments: dict[FxNode, FxValue] = {}
        self.result: Argument = None
        self._module = module
        self._is_subgraph = is_subgraph
        self._taken_names = set() if is_subgraph else {UNUSED_VALUE, *tables.weight_values.values()}
        self._weight_nodes: set[FxNode] = set()
        # In a subgraph, the inputs that pass constants, by the name of the constant.
        self._lifted: dict[str, ValueArg] = {}
        # The weights of a tensor subclass by name: no value stands for them, but for the tensors that they wrap.
        self._wrapper_weights: dict[FxNode, str] = {}

    def add_input(self, node: FxNode, value_name: str) -> str:
        """Add an input of the graph, and return the name of its value."""
        value = self._value(value_name, node.meta["val"], node)
        self.inputs.append(value)
        self.arguments[node] = ValueArg(value.name)
        return value.name

    def add_constant_input(self, constant: torch.Tensor) -> None:
        """Add an input of the graph that passes a constant, which its graph module holds."""
        shape = tuple(map(self.tables.symbols.dim, constant.shape))
        value_name = self._unique_name(f"arg_{len(self.inputs)}")
        self.inputs.append(Value(name=value_name, dtype=dtype_name(constant.dtype), shape=shape))
        self._lifted[self.tables.constant_names[id(constant)]] = ValueArg(value_name)

    def bind_weight(self, node: FxNode, weight_name: str) -> None:
        """Let an fx node stand for a weight, by its fully qualified name."""
        value_name = self.tables.weight_values.get(weight_name)
        if value_name is None:
            self._wrapper_weights[node] = weight_name
        else:
            self.arguments[node] = ValueArg(value_name)
            self._weight_nodes.add(node)

    def build(self) -> Argument:
        """Append the nodes of the graph module, whose placeholders are bound already, and return its result."""
        self.result = self._append_module(self._module, context=None)
        return self.result

    def copy_into(self, target: FxNode, result: Argument) -> None:
        """Append a copy of a result into a buffer or an input: a functional program returns what others write."""
        op = self.tables.op_index(torch.ops.aten.copy_.default)
        scope = self.tables.scope_index(target)
        self.nodes.append(Node(op=op, args=(self._argument(target, target), result), outputs=(None,), scope=scope))
        self.sources.append(target)

    def _append_module(self, module: GraphModule, context: int | None) -> Argument:
        """Append the nodes of a graph module in a context, and return its result."""
        result: Argument = None
        for node in module.graph.nodes:
            match node.op:
                case "get_attr":
                    self.arguments[node] = self._module_argument(module, node)
                case "call_function":
                    self.tables.current_node = node
                    self._append_call(module, node, context)
                case "output":
                    result = self._argument(node.args[0], node)
        return result

    def _append_call(self, module: GraphModule, node: FxNode, context: int | None) -> None:
        operator_name = str(node.target)
        if node.target is operator.getitem and isinstance(self._bound(node.args[0]), list):
            self.arguments[node] = self._bound(node.args[0])[node.args[1]]
        elif opens_context(node):
            self.arguments[node] = self._append_context(module, node, context)
        elif operator_name == _UNWRAP_OPERATOR:
            wrapper, attribute = node.args
            assert isinstance(wrapper, FxNode)
            self.bind_weight(node, wrapped_tensor_name(self._wrapper_weights[wrapper], str(attribute)))
        elif operator_name == _EFFECT_OPERATOR:
            self.arguments[node] = [None, *self._append_effect(module, node, context)]
        elif operator_name in _SPLIT_MARKERS:
            if self._is_subgraph:
                raise UnsupportedError(f"{node.target} is inside a branch or a loop, where no stage can begin")
            self.tables.split_positions.append(len(self.nodes))
        elif not _is_unused_query(node):
            self._append_node(module, node, self._complete_context(node, context))

    def _append_effect(self, module: GraphModule, node: FxNode, context: int | None) -> Sequence[Argument]:
        """Append a call that torch orders by a token, as the order of the nodes does; return its values."""
        target: Any
        _, target, *args = node.args
        token_and_results = node.meta["val"]
        result_count = len(operator_schema(target).returns)
        call = FxNode(node.graph, node.name, "call_function", target, tuple(args), node.kwargs)
        call.meta = {**node.meta, "val": token_and_results[1:] if result_count > 1 else token_and_results[1]}
        self._append_node(module, call, self._complete_context(node, context))
        # The call is not in the graph, whose nodes should not count it as a user.
        call.args, call.kwargs = (), {}
        result = self.arguments[call]
        return result if isinstance(result, list) else [result]

    def _complete_context(self, node: FxNode, context: int | None) -> int | None:
        """The context of a node, with its grad mode if torch has lost that."""
        grad = lost_grad_mode(node, self.tables.grad_mode(context))
        return context if grad is None else self.tables.context_index(Context(parent=context, grad=grad))

    def _append_context(self, module: GraphModule, node: FxNode, context: int | None) -> list[Argument]:
        """Append the nodes that run under another grad mode or autocast; return the values of the node that calls them."""
        opened = opened_context(node, context, self.tables.device)
        module_node, *arguments = node.args[context_module_position(node) :]
        assert isinstance(module_node, FxNode)
        called_module = getattr(module, str(module_node.target))
        placeholders = [called_node for called_node in called_module.graph.nodes if called_node.op == "placeholder"]
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            self.arguments[placeholder] = self._argument(argument, node)
            if isinstance(argument, FxNode) and argument in self._weight_nodes:
                self._weight_nodes.add(placeholder)
        return list(child_arguments(self._append_module(called_module, self.tables.context_index(opened))))

    def _append_node(self, module: GraphModule, node: FxNode, context: int | None) -> None:
        meta: Any = node.meta.get("val")
        returns_several = isinstance(meta, list | tuple)
        target, call_args, call_kwargs = equivalent_call(node)
        op = self.tables.op_index(target)
        outputs = self._outputs(node, op, meta if returns_several else [meta], numbered=returns_several)
        further_operands = self._add_subgraphs(module, node)
        args = with_operands([self._argument(argument, node) for argument in call_args], further_operands)
        named_arguments = {**call_kwargs, **_dtype_of_default(node)}
        kwargs = tuple((parameter, self._argument(argument, node)) for parameter, argument in named_arguments.items())
        self.tables.add_aliases(op, observed_aliases(node))
        subgraphs = [self.tables.subgraphs[index] for index in subgraph_indices(Node(op=op, args=args, kwargs=kwargs))]
        body_costs = [body_node.cost for subgraph in subgraphs for body_node in subgraph.nodes]
        self.nodes.append(
            Node(
                op=op,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                unpack=returns_several,
                scope=self.tables.scope_index(node),
                context=context,
                cost=self.tables.costs.node_cost(node, self.tables.ops[op].name, self._weight_nodes, body_costs),
            )
        )
        self.sources.append(node)
        results: list[Argument] = [None if output is None else ValueArg(output.name) for output in outputs]
        self.arguments[node] = results if returns_several else results[0]

    def _outputs(self, node: FxNode, op: int, metas: Sequence[Any], *, numbered: bool) -> tuple[Value | None, ...]:
        """The values that a node defines, named by its position, so that the names of repeated runs differ by one number alone."""
        base_name = f"{self.tables.ops[op].name.split('.')[1]}_{len(self.nodes)}"
        value_names = [f"{base_name}_{index}" for index in range(len(metas))] if numbered else [base_name]
        return tuple(
            None if meta is None else self._value(value_name, meta, node)
            for value_name, meta in zip(value_names, metas, strict=True)
        )

    def _value(self, value_name: str, meta: object, node: FxNode) -> Value:
        """Describe a value of torch, under this name or one like it."""
        symbols = self.tables.symbols
        if isinstance(meta, torch.Tensor):
            shape = tuple(map(symbols.dim, meta.shape))
            return Value(name=self._unique_name(value_name), dtype=dtype_name(meta.dtype), shape=shape)
        if type(meta) not in _SCALAR_DTYPES:
            raise UnsupportedError(
                f"the value {node.name} of {node.target} is a {type(meta).__name__}, which a bundle cannot hold"
            )
        size = symbols.exact_dim(meta) if isinstance(meta, torch.SymInt) else meta if type(meta) is int else None
        return Value(name=self._unique_name(value_name), dtype=_SCALAR_DTYPES[type(meta)], expr=size)

    def _argument(self, argument: object, node: FxNode) -> Argument:
        """One argument of an fx node as data."""
        match argument:
            case FxNode():
                bound = self._bound_value(argument, node)
                return ListArg(tuple(bound)) if isinstance(bound, list) else bound
            case list():
                return ListArg(tuple(self._argument(item, node) for item in argument))
            case tuple():
                return TupleArg(tuple(self._argument(item, node) for item in argument))
            case dict() if all(isinstance(key, str) for key in argument):
                return DictArg(tuple((key, self._argument(item, node)) for key, item in argument.items()))
            case slice():
                bounds = (argument.start, argument.stop, argument.step)
                return SliceArg(*(self._argument(bound, node) for bound in bounds))
            case torch.device():
                return DeviceArg(None if argument.type == self.tables.device else argument.type)
            case _:
                return constant_argument(argument, f"an argument of {node.name} ({node.target})")

    def _bound(self, argument: object) -> Any:
        return self.arguments.get(argument) if isinstance(argument, FxNode) else None

    def _bound_value(self, argument: FxNode, user: FxNode) -> FxValue:
        if argument in self._wrapper_weights:
            raise UnsupportedError(
                f"{user.target} takes the weight {self._wrapper_weights[argument]!r} as one tensor of its class: quantize it in a way "
                "that torch.export traces into, or make it a plain tensor"
            )
        return self.arguments[argument]

    def _module_argument(self, module: GraphModule, node: FxNode) -> FxValue:
        """An attribute that is an argument of nodes: a constant, or a subgraph unless its nodes are appended where it is called."""
        attribute = module_attribute(module, str(node.target))
        if isinstance(attribute, torch.Tensor):
            return self._constant(attribute)
        if not isinstance(attribute, GraphModule):
            raise UnsupportedError(
                f"the attribute {node.target} is a {type(attribute).__name__}, which a bundle cannot hold"
            )
        return []  # until a node calls it

    def _add_subgraphs(self, module: GraphModule, node: FxNode) -> dict[int | None, list[Argument]]:
        """Add the subgraphs that a node calls; return the constants that they hold, by the position of the operands that pass them."""
        further_operands = {}
        for position, subgraph_nodes in subgraph_operands(node):
            bodies = [module_attribute(module, str(subgraph_node.target)) for subgraph_node in subgraph_nodes]
            graph_modules = [body for body in bodies if isinstance(body, GraphModule)]
            # All subgraphs that get the same operands take the constants of all of them.
            constants = {id(tensor): tensor for body in graph_modules for tensor in held_tensors(body)}
            for subgraph_node, body in zip(subgraph_nodes, graph_modules, strict=True):
                self.arguments[subgraph_node] = SubgraphArg(self._add_subgraph(body, list(constants.values())))
            further_operands[position] = [self._constant(tensor) for tensor in constants.values()]
        return further_operands

    def _constant(self, tensor: torch.Tensor) -> Argument:
        """The value of a constant that a graph module holds: a weight, or in a subgraph the input that passes it."""
        constant_name = self.tables.constant_names[id(tensor)]
        return self._lifted.get(constant_name) or ValueArg(self.tables.weight_values[constant_name])

    def _add_subgraph(self, module: GraphModule, constants: Sequence[torch.Tensor]) -> int:
        body = BodyBuilder(self.tables, module, is_subgraph=True)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                body.add_input(node, f"arg_{len(body.inputs)}")
        for constant in constants:
            body.add_constant_input(constant)
        result = body.build()
        self.tables.subgraphs.append(Subgraph(inputs=tuple(body.inputs), nodes=tuple(body.nodes), result=result))
        return len(self.tables.subgraphs) - 1

    def _unique_name(self, value_name: str) -> str:
        """The name, with underscores appended until no other value has it."""
        while value_name in self._taken_names:
            value_name += "_"
        self._taken_names.add(value_name)
        return value_name


def _dtype_of_default(node: FxNode) -> dict[str, torch.dtype]:
    """The dtype of a tensor that a function without tensors makes under another default dtype than that of processes that set none."""
    result = node.meta.get("val")
    if not isinstance(node.target, OperatorOverload) or not isinstance(result, torch.Tensor):
        return {}
    parameters = operator_schema(node.target).arguments
    has_default = any(parameter.name == "dtype" for parameter in parameters) and node.kwargs.get("dtype") is None
    is_other = result.dtype not in (torch.float32, torch.complex64) and (
        result.is_floating_point() or result.is_complex()
    )
    makes_tensor = not any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
    return {"dtype": result.dtype} if has_default and is_other and makes_tensor else {}


def _is_unused_query(node: FxNode) -> bool:
    """Whether a call of ATen on constants alone, which loaders do not run by default, is of no use.

    `torch.tensor` of a list asks ``promote_types`` for the dtype of its items while it is traced.
    """
    if node.users or node.all_input_nodes or not isinstance(node.target, OperatorOverload):
        return False
    operator_name = str(node.target)
    is_aten = operator_namespace(operator_name) == "aten" and not is_denied_operator(operator_name)
    return is_aten and needed_permission(operator_name) is not None
