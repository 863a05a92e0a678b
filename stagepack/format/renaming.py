"""The names that stand in a part of a graph, in a fixed order: those that templates of a region may vary."""

from collections.abc import Iterator

from msgspec.structs import replace

from stagepack.format.folded import Region
from stagepack.format.graph import (
    Argument,
    DictArg,
    ListArg,
    ModuleCall,
    Node,
    SliceArg,
    TupleArg,
    Value,
    ValueArg,
    Weight,
)
from stagepack.format.shapes import Dim, Expr, symbol_names
from stagepack.format.traversal import input_names
from stagepack.format.tree import value_names


def names_in_value(value: Value) -> Iterator[str]:
    """Yield the names in a value: its own, and those of symbols."""
    yield value.name
    for dim in value.shape:
        yield from symbol_names(dim)
    if value.expr is not None:
        yield from symbol_names(value.expr)


def names_in_node(node: Node) -> Iterator[str]:
    """Yield the names in a node: of the values that it is given, and those in the values that it makes."""
    yield from input_names(node)
    for value in node.outputs:
        if value is not None:
            yield from names_in_value(value)


def names_in_weight(weight: Weight) -> Iterator[str]:
    """Yield the names in a weight."""
    yield weight.value
    yield from weight.names
    if weight.base is not None:
        yield weight.base


def names_in_call(call: ModuleCall) -> Iterator[str]:
    """Yield the names in the call of a module, and where it begins."""
    yield call.path
    yield call.first
    if call.signature is not None:
        yield from value_names(*call.signature.trees)


def names_in_region(region: Region) -> Iterator[str]:
    """Yield the templates of a region."""
    for item in region.nodes:
        yield from names_in_node(item) if isinstance(item, Node) else item.holes
    yield from (scope.path for scope in region.scopes)
    for weight in region.weights:
        yield from names_in_weight(weight)
    for call in region.calls:
        yield from names_in_call(call)


def rename_node(node: Node, names: Iterator[str]) -> Node:
    """A node with other names, which come in the order of `node_texts`."""
    args = tuple([_argument(argument, names) for argument in node.args])
    kwargs = tuple([(key, _argument(argument, names)) for key, argument in node.kwargs])
    return replace(node, args=args, kwargs=kwargs, outputs=tuple([_value(value, names) for value in node.outputs]))


def rename_weight(weight: Weight, names: Iterator[str]) -> Weight:
    """A weight with other names, which come in the order of `weight_texts`."""
    value, own = next(names), tuple([next(names) for _ in weight.names])
    return replace(weight, value=value, names=own, base=None if weight.base is None else next(names))


def rename_call(call: ModuleCall, names: Iterator[str]) -> ModuleCall:
    """The call of a module with other names, which come in the order of `call_texts`."""
    path, first = next(names), next(names)
    signature = None if call.signature is None else call.signature.renamed(lambda _: next(names))
    return replace(call, path=path, first=first, signature=signature)


def _argument(argument: Argument, names: Iterator[str]) -> Argument:
    match argument:
        case ValueArg():
            return ValueArg(next(names))
        case ListArg(items) | TupleArg(items):
            return type(argument)(tuple([_argument(item, names) for item in items]))
        case DictArg(items):
            return DictArg(tuple([(key, _argument(item, names)) for key, item in items]))
        case SliceArg(start, stop, step):
            return SliceArg(*[_argument(part, names) for part in (start, stop, step)])
        case _:
            return argument


def _value(value: Value | None, names: Iterator[str]) -> Value | None:
    if value is None:
        return None
    name, shape = next(names), tuple([_dim(dim, names) for dim in value.shape])
    return replace(value, name=name, shape=shape, expr=None if value.expr is None else _dim(value.expr, names))


def _dim(dim: Dim, names: Iterator[str]) -> Dim:
    if isinstance(dim, Expr):
        return Expr(op=dim.op, args=tuple([_dim(arg, names) for arg in dim.args]))
    return next(names) if isinstance(dim, str) else dim
