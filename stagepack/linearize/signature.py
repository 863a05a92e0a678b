"""How a model or one of its modules is called -> `Signature`.

- Container specs of torch (pytree) -> trees of the format.
- Symbolic sizes of torch (sympy) -> symbols and dimensions of the format.
- Grad mode and autocast in a captured program -> contexts of nodes. ``torch.export`` puts the nodes under ``torch.no_grad`` or
  ``torch.autocast`` into a graph module of their own, which one node calls.
"""

import collections
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import Node as FxNode

from stagepack.capture.result_records import CapturedRecord
from stagepack.capture.tracing import TracedCall
from stagepack.errors import UnsupportedError
from stagepack.format import limits
from stagepack.format.codec import is_plain
from stagepack.format.graph import Autocast, Context
from stagepack.format.manifest import Parameter, Signature
from stagepack.format.shapes import Dim, Expr, Symbol
from stagepack.format.tree import (
    ConstantLeaf,
    DictTree,
    NonFiniteLeaf,
    ObjectTree,
    SequenceTree,
    Tree,
    ValueLeaf,
    constant_identity,
    is_field_name,
    type_name,
)
from stagepack.format.validate import is_identifier
from stagepack.linearize.weight_table import dtype_name
from stagepack.torch_internals import (
    TRANSFORMERS_IMPLIED_KINDS,
    TRANSFORMERS_KIND,
    TreeSpec,
    example_symbol_values,
    symbolic_expression,
    symbolic_functions,
    symbolic_sizes,
    tree_children,
)

# A leaf is the name of a value, or a constant.
Leaf = str | ConstantArgument
FactoryName = Literal["list", "dict", "set", "int", "float", "str"]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_Value = TypeVar("_Value")
_OPERATIONS: Mapping[type, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    sympy.Max: "max",
    sympy.Min: "min",
    **symbolic_functions(),
}
_MAX_BOUND = 2**62  # torch's infinities are larger
_GRAD_MODE = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def container_tree(spec: TreeSpec, leaves: Iterator[Leaf], location: str) -> Tree:
    """Build the tree of nested containers."""
    if spec.is_leaf():
        return leaf_tree(next(leaves), location)
    container_type, context = spec.type, spec.context
    items = [container_tree(child, leaves, location) for child in tree_children(spec)]
    if container_type in (tuple, list, torch.Size):
        return SequenceTree(kind="list" if container_type is list else "tuple", items=tuple(items))
    if container_type is collections.deque:
        return SequenceTree(kind="deque", items=tuple(items), maxlen=context)
    if container_type is dict:
        return DictTree(kind="dict", items=_dict_items(context, items, location))
    if container_type is collections.OrderedDict:
        return DictTree(kind="OrderedDict", items=_dict_items(context, items, location))
    if container_type is collections.defaultdict:
        factory, keys = context
        pairs = _dict_items(keys, items, location)
        return DictTree(kind="defaultdict", items=pairs, factory=_factory_name(factory, location))
    if container_type is collections.namedtuple:  # noqa: PYI024 - pytree's type of all named tuples; the context is the class
        container_type = context
    assert container_type is not None
    if isinstance(context, dict) and TRANSFORMERS_KIND in context:
        return _registered_object_tree(context, items, location)
    if container_type is CapturedRecord:
        class_name, record_fields = context
        return ObjectTree(class_name=class_name, fields=tuple(zip(record_fields, items, strict=True)))
    field_names = _field_names(container_type, context, len(items))
    is_tuple = issubclass(container_type, tuple)
    if is_tuple:
        field_names = [
            field_name if is_field_name(field_name, index) else f"_{index}"
            for index, field_name in enumerate(field_names)
        ]
    fields = tuple(zip(field_names, items, strict=True))
    kind: Literal["object", "tuple"] = "tuple" if is_tuple else "object"
    return ObjectTree(class_name=type_name(container_type), fields=fields, kind=kind)


def leaf_tree(leaf: Leaf, location: str) -> Tree:
    """Return a leaf as a tree."""
    if isinstance(leaf, str):
        return ValueLeaf(leaf)
    constant = leaf.value
    if type(constant) is float and not math.isfinite(constant):
        if math.isnan(constant) and constant_identity(constant) != constant_identity(math.nan):
            raise UnsupportedError(
                f"{location} is a NaN with other bits than math.nan, which a bundle cannot hold: pass math.nan"
            )
        return NonFiniteLeaf("nan" if math.isnan(constant) else "inf" if constant > 0 else "-inf")
    if is_plain(constant):
        return ConstantLeaf(constant)
    raise UnsupportedError(f"{location} is the constant {constant!r}, which a bundle cannot hold")


def _registered_object_tree(entry: Any, items: Sequence[Tree], location: str) -> Tree:
    """The tree of an object that transformers has registered, such as a cache.

    The entry describes an attribute, or an item of it, with all that it holds; entries for tensors are numbers of items.
    """
    if isinstance(entry, list):
        return SequenceTree(kind="list", items=tuple(_registered_object_tree(part, items, location) for part in entry))
    if not isinstance(entry, dict):
        return leaf_tree(ConstantArgument(name=location, value=entry), location)
    kind = entry.get(TRANSFORMERS_KIND)
    if kind in ("tensor", "sym"):
        return items[entry["i"]]
    if kind not in (None, "obj", "map", "items"):
        raise UnsupportedError(f"{location} holds a {kind} ({entry.get('p', entry)}), which a bundle cannot hold")
    entries = entry if kind is None else dict(entry["s" if kind == "obj" else "v"])
    stored_entries = {
        key: part
        for key, part in entries.items()
        if not isinstance(part, dict) or part.get(TRANSFORMERS_KIND) not in TRANSFORMERS_IMPLIED_KINDS
    }
    trees = [_registered_object_tree(part, items, location) for part in stored_entries.values()]
    if kind == "obj":
        class_name = entry["p"].replace(":", ".")
        return ObjectTree(class_name=class_name, fields=tuple(zip(stored_entries, trees, strict=True)))
    return DictTree(kind="dict", items=_dict_items(list(stored_entries), trees, location))


def _factory_name(factory: type | None, location: str) -> FactoryName | None:
    if factory is None:
        return None
    if factory.__name__ not in get_args(FactoryName):
        raise UnsupportedError(f"{location} holds a defaultdict of {factory.__name__}, which a bundle cannot hold")
    return cast("FactoryName", factory.__name__)


def _field_names(container_type: type, context: Any, field_count: int) -> list[str]:
    """The names of the fields of an object, from what its registration as a pytree tells; else their numbers."""
    match_args = getattr(container_type, "__match_args__", ())
    if issubclass(container_type, tuple) and len(match_args) == field_count:
        return list(match_args)
    candidates = [context, context[0]] if isinstance(context, list | tuple) and context else []
    for candidate in candidates:
        if (
            isinstance(candidate, list | tuple)
            and len(candidate) == field_count
            and all(isinstance(item, str) for item in candidate)
        ):
            return list(candidate)
    return [str(field_index) for field_index in range(field_count)]


def _dict_items(keys: Sequence[Any], items: Sequence[Tree], location: str) -> tuple[tuple[Any, Tree], ...]:
    for key in keys:
        if not is_plain(key) or (isinstance(key, float) and not math.isfinite(key)):
            raise UnsupportedError(f"{location} holds a dict with the key {key!r}, which a bundle cannot hold")
    return tuple(zip(keys, items, strict=True))


def program_signature(
    program: ExportedProgram, inputs: Sequence[Leaf], results: Sequence[Leaf], forward: Callable[..., Any] | None
) -> Signature:
    """Return the signature of a program: the parameters that the example passes, and those with a plain default.

    forward: the call of the original model, for the order and the defaults of its parameters; None if there is no model.
    """
    leaves = iter(inputs)
    args_spec, kwargs_spec = tree_children(program.call_spec.in_spec)
    args = [container_tree(spec, leaves, "an input") for spec in tree_children(args_spec)]
    kwargs = {
        parameter_name: container_tree(spec, leaves, f"the input {parameter_name}")
        for parameter_name, spec in _named_children(kwargs_spec)
    }
    parameters = _captured_parameters(program, args, kwargs)
    if forward is not None:
        parameters = _declared_parameters(inspect.signature(forward).parameters, args, kwargs)
    result = container_tree(program.call_spec.out_spec, iter(results), "the result")
    return Signature(parameters=tuple(parameters), result=result)


def call_signature(call: TracedCall, arguments: Sequence[Leaf], results: Sequence[Leaf]) -> Signature:
    """Return the signature of a call of a module, with its arguments as they were passed."""
    leaves = iter(arguments)
    args_spec, kwargs_spec = tree_children(call.arguments_spec)
    declared = [parameter for parameter in call.parameters.values() if parameter.kind in _POSITIONAL]
    parameters = []
    for position, spec in enumerate(tree_children(args_spec)):
        parameter = declared[position] if position < len(declared) else None
        parameter_name = f"arg_{position}" if parameter is None else parameter.name
        takes_keyword = parameter is not None and parameter.kind != parameter.POSITIONAL_ONLY
        tree = container_tree(spec, leaves, f"the argument {parameter_name}")
        parameters.append(Parameter(name=parameter_name, tree=tree, positional=True, keyword=takes_keyword))
    for parameter_name, spec in _named_children(kwargs_spec):
        tree = container_tree(spec, leaves, f"the argument {parameter_name}")
        parameters.append(Parameter(name=parameter_name, tree=tree))
    result = container_tree(call.results_spec, iter(results), "the result")
    return Signature(parameters=tuple(parameters), result=result)


def _captured_parameters(
    program: ExportedProgram, args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> Iterator[Parameter]:
    """Yield the parameters of a program without a model; torch may have recorded the names of its arguments."""
    root_signature = program.module_call_graph[0].signature
    recorded_names = (root_signature.forward_arg_names if root_signature else None) or []
    for position, tree in enumerate(args):
        has_name = len(args) <= len(recorded_names)
        yield Parameter(name=recorded_names[position] if has_name else f"arg{position}", tree=tree, positional=True)
    yield from (Parameter(name=parameter_name, tree=tree) for parameter_name, tree in kwargs.items())


def _declared_parameters(
    declared: Mapping[str, inspect.Parameter], args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> Iterator[Parameter]:
    """Yield the parameters of a model. Behind one that the example leaves out, no further argument can be passed by position."""
    positional = [parameter for parameter in declared.values() if parameter.kind in _POSITIONAL]
    remaining_kwargs = dict(kwargs)
    keyword_only: list[Parameter] = []
    is_gap_met = False
    for position, parameter in enumerate(positional):
        tree = args[position] if position < len(args) else remaining_kwargs.pop(parameter.name, None)
        tree = _default_tree(parameter) if tree is None else tree
        if tree is None:
            is_gap_met = True
        elif is_gap_met:
            keyword_only.append(Parameter(name=parameter.name, tree=tree))
        else:
            takes_keyword = parameter.kind != parameter.POSITIONAL_ONLY
            yield Parameter(name=parameter.name, tree=tree, positional=True, keyword=takes_keyword)
    variadic_name = next(
        (
            parameter_name
            for parameter_name, parameter in declared.items()
            if parameter.kind == parameter.VAR_POSITIONAL
        ),
        "arg",
    )
    for index, tree in enumerate(args[len(positional) :]):
        yield Parameter(name=f"{variadic_name}_{index}", tree=tree, positional=True, keyword=False)
    yield from keyword_only
    for parameter in declared.values():
        if parameter.kind == parameter.KEYWORD_ONLY:
            tree = remaining_kwargs.pop(parameter.name, None) or _default_tree(parameter)
            if tree is not None:
                yield Parameter(name=parameter.name, tree=tree)
    yield from (Parameter(name=parameter_name, tree=tree) for parameter_name, tree in remaining_kwargs.items())


def _default_tree(parameter: inspect.Parameter) -> Tree | None:
    """The default of a parameter that the example leaves out, if it is plain: passing it changes nothing."""
    if is_plain(parameter.default):
        return leaf_tree(ConstantArgument(name=parameter.name, value=parameter.default), parameter.name)
    return None


def _named_children(kwargs_spec: TreeSpec) -> Iterator[tuple[str, TreeSpec]]:
    yield from zip(kwargs_spec.context or [], tree_children(kwargs_spec), strict=True)


class TracedSymbol(NamedTuple):
    """The name that torch has for a symbol, and the smallest size that it traced the program for."""

    name: str
    min: int | None


class SymbolTable:
    """The symbols of one program. A symbol has the name of the caller's ``Dim``, else ``s0``, ``s1`` ... by first use."""

    def __init__(
        self, program: ExportedProgram, dim_names: Mapping[str, str], smallest_sizes: Mapping[str, int] | None = None
    ) -> None:
        self._smallest_sizes = smallest_sizes or {}
        self._traced_symbols: dict[str, TracedSymbol] = {}
        self._ranges = program.range_constraints
        self._dim_names = dim_names
        self._example_values = example_symbol_values(program)
        input_sizes = symbolic_sizes(program.graph.find_nodes(op="placeholder"))
        self._input_sizes = {symbolic_expression(size) for size in input_sizes}
        self._symbols: dict[sympy.Expr, Symbol] = {}

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols that were used so far, in the order of their first use."""
        return tuple(self._symbols.values())

    @property
    def traced_symbols(self) -> Mapping[str, "TracedSymbol"]:
        """What torch has for each symbol that was used so far, by its name here."""
        return self._traced_symbols

    def symbol(self, variable: sympy.Symbol) -> Symbol | None:
        """Return the symbol for one of torch's, if it was used so far."""
        return self._symbols.get(variable)

    def dim(self, size: "int | torch.SymInt") -> Dim:
        """Return a size as a dimension."""
        return size if isinstance(size, int) else self._dim(symbolic_expression(size))

    def exact_dim(self, size: "torch.SymInt") -> Dim | None:
        """Return a symbolic integer as a dimension; None if the format cannot express its arithmetic."""
        return self.expressed(symbolic_expression(size))

    def expressed(self, expression: sympy.Expr) -> Dim | None:
        """Return an expression of torch as a dimension; None if the format cannot express its arithmetic."""
        return self._dim(expression) if self._is_expressible(expression) else None

    def _is_expressible(self, expression: sympy.Expr) -> bool:
        if expression.is_Integer or expression.is_Symbol:
            return bool(expression.is_Symbol) or abs(int(expression)) <= limits.TENSOR_ELEMENTS
        return type(expression) in _OPERATIONS and all(map(self._is_expressible, expression.args))

    def _dim(self, expression: sympy.Expr) -> Dim:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol or not self._is_expressible(expression):
            return self._symbol_name(expression)
        args = [self._dim(arg) for arg in expression.args]
        if isinstance(expression, sympy.Add | sympy.Mul):
            args.sort(key=lambda arg: (isinstance(arg, int), str(arg)))
        return Expr(op=_OPERATIONS[type(expression)], args=tuple(args))

    def _symbol_name(self, expression: sympy.Expr) -> str:
        if expression not in self._symbols:
            traced_min, upper = self._bounds(expression)
            lower = (
                None if traced_min is None else min(traced_min, self._smallest_sizes.get(str(expression), traced_min))
            )
            example = self._example_value(expression, lower, upper)
            symbol_name = self._unique_name(expression)
            self._traced_symbols[symbol_name] = TracedSymbol(str(expression), traced_min)
            self._symbols[expression] = Symbol(name=symbol_name, min=lower, max=upper, example=example)
        return self._symbols[expression].name

    def _bounds(self, expression: sympy.Expr) -> tuple[int | None, int | None]:
        """The range of a symbol. Of one that only expressions over it are sizes of inputs, such as ``4*h``, their ranges decide.

        torch 2.13 starts the range of such a symbol at 2, also where ``Dim("h", min=1)`` says otherwise, and checks those of the sizes.
        """
        derived = list(_solutions(expression, {size: self._ranges.get(size) for size in self._input_sizes}))
        if expression in self._input_sizes or not derived:
            value_range = self._ranges.get(expression)
            return _finite_bound(getattr(value_range, "lower", None)), _finite_bound(
                getattr(value_range, "upper", None)
            )
        lowers, uppers = [], []
        for factor, offset, size_range in derived:
            first, last = (_finite_bound(getattr(size_range, end, None)) for end in ("lower", "upper"))
            if factor < 0:
                first, last = last, first
            lowers += [] if first is None else [-((offset - first) // factor)]
            uppers += [] if last is None else [(last - offset) // factor]
        return max(lowers, default=None), min(uppers, default=None)

    def _unique_name(self, expression: sympy.Expr) -> str:
        taken_names = {symbol.name for symbol in self._symbols.values()}
        dim_name = self._dim_names.get(str(expression), "")
        if is_identifier(dim_name) and dim_name not in taken_names:
            return dim_name
        candidates = (f"s{index}" for index in range(len(taken_names) + 1))
        return next(candidate for candidate in candidates if candidate not in taken_names)

    def _example_value(self, expression: sympy.Expr, lower: int | None, upper: int | None) -> int | None:
        """The value in the example; None if it depends on data or is outside the range."""
        value = expression.xreplace(dict(self._example_values))
        # A program that was read from a file has the values of the sizes 4*h, but not that of h.
        for factor, offset, size in _solutions(expression, self._example_values):
            value = sympy.Integer((int(size) - offset) // factor)
        if not value.is_Integer or not (lower or 0) <= int(value) <= (int(value) if upper is None else upper):
            return None
        return int(value)


def _solutions(symbol: sympy.Expr, values: Mapping[sympy.Expr, _Value]) -> Iterator[tuple[int, int, _Value]]:
    """The expressions ``factor*symbol + offset`` among some, as factor, offset and what the expression maps to."""
    for expression, value in values.items():
        if expression != symbol and expression.free_symbols == {symbol}:
            factor = expression.coeff(symbol)
            offset = expression - factor * symbol
            if factor.is_Integer and offset.is_Integer and factor:
                yield int(factor), int(offset), value


def _finite_bound(bound: object) -> int | None:
    if isinstance(bound, int | sympy.Integer) and abs(int(bound)) < _MAX_BOUND:
        return int(bound)
    return None


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
