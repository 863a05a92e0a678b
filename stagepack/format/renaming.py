"""The names in nodes, values, weights and module calls, listed and replaced in a fixed order.

These are the names that the templates of a region may vary. For each kind of object `x` there are two functions with the law:
``list(names_in_x(rename_x(x, rename))) == [rename(name) for name in names_in_x(x)]``.
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from stagepack.format.folded import Region
from stagepack.format.graph import Argument, ModuleCall, Node, Value, ValueArg, Weight
from stagepack.format.shapes import rename_symbols, symbol_names
from stagepack.format.traversal import input_names, map_node_arguments
from stagepack.format.tree import value_names


def names_in_value(value: Value) -> Iterator[str]:
    """Yield the name of a value, and the names of the symbols in its shape and its `expr`."""
    yield value.name
    for dim in value.shape:
        yield from symbol_names(dim)
    if value.expr is not None:
        yield from symbol_names(value.expr)


def names_in_node(node: Node) -> Iterator[str]:
    """Yield the names of the values that a node uses, and then the names in the values that it defines."""
    yield from input_names(node)
    for value in node.outputs:
        if value is not None:
            yield from names_in_value(value)


def names_in_weight(weight: Weight) -> Iterator[str]:
    """Yield the value name of a weight, its names in the model, and the name of its base."""
    yield weight.value
    yield from weight.names
    if weight.base is not None:
        yield weight.base


def names_in_module_call(call: ModuleCall) -> Iterator[str]:
    """Yield the path of a module call, the position of its first node, and the value names in its signature."""
    yield call.path
    yield call.first
    if call.signature is not None:
        yield from value_names(*call.signature.trees)


def names_in_region(region: Region) -> Iterator[str]:
    """Yield the templates of a region, with repeats: of its nodes and region calls, scopes, weights and module calls."""
    for item in region.nodes:
        yield from names_in_node(item) if isinstance(item, Node) else item.holes
    yield from (scope.path for scope in region.scopes)
    for weight in region.weights:
        yield from names_in_weight(weight)
    for call in region.calls:
        yield from names_in_module_call(call)


def rename_value(value: Value, rename: Callable[[str], str]) -> Value:
    """Return a value with other names."""
    return replace(
        value,
        name=rename(value.name),
        shape=tuple([rename_symbols(dim, rename) for dim in value.shape]),
        expr=None if value.expr is None else rename_symbols(value.expr, rename),
    )


def rename_node(node: Node, rename: Callable[[str], str]) -> Node:
    """Return a node with other names."""

    def rename_leaf(leaf: Argument) -> Argument:
        return ValueArg(rename(leaf.name)) if isinstance(leaf, ValueArg) else leaf

    renamed = map_node_arguments(node, rename_leaf)
    outputs = [None if value is None else rename_value(value, rename) for value in node.outputs]
    return replace(renamed, outputs=tuple(outputs))


def rename_weight(weight: Weight, rename: Callable[[str], str]) -> Weight:
    """Return a weight with other names."""
    return replace(
        weight,
        value=rename(weight.value),
        names=tuple([rename(weight_name) for weight_name in weight.names]),
        base=None if weight.base is None else rename(weight.base),
    )


def rename_module_call(call: ModuleCall, rename: Callable[[str], str]) -> ModuleCall:
    """Return a module call with other names."""
    return replace(
        call,
        path=rename(call.path),
        first=rename(call.first),
        signature=None if call.signature is None else call.signature.renamed(rename),
    )


def rename_in_order(new_names: Iterable[str]) -> Callable[[str], str]:
    """Return a function for the functions above that ignores the old name and returns the next new name."""
    remaining = iter(new_names)
    return lambda _: next(remaining)
